"""Every exception that autopar raises on purpose: one tree under `AutoparError`.

Each message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Root of all errors of autopar's own."""


class UsageError(AutoparError, ValueError):
    """An argument of an autopar function cannot be used as given."""


class ClusterError(UsageError):
    """A cluster description names no known preset, or a shape that does not fit it."""


class MeshError(UsageError):
    """A mesh is larger than the devices at hand, or names an axis that does not exist."""


class RuleError(UsageError):
    """A sharding rule's notation is malformed or does not fit the primitive it is registered for."""


class ScheduleError(UsageError):
    """A pipeline schedule does not exist, misses a task, or would wait for ever."""


class ModelError(UsageError):
    """A zoo model or a target's callable cannot be built as asked."""


class TraceError(AutoparError):
    """The user's function raised while it was traced, or returned what cannot be planned."""


class MicrobatchError(UsageError):
    """The step cannot run as that many microbatches with the numbers of one batch; the message names the line."""


class PlanError(AutoparError):
    """A plan is malformed, or belongs to another program, other shapes or another mesh."""


class IllegalStrategyError(PlanError):
    """A strategy or conversion breaks the op's sharding rule."""


class StateError(AutoparError):
    """State given to a step was donated before, or does not match the state the step returns."""


class SolverError(AutoparError):
    """The solver ended without an answer for a reason other than infeasibility."""


class CheckError(AutoparError):
    """An internal invariant does not hold. This is a fault of autopar, not of the caller."""


class InfeasibleError(AutoparError):
    """No plan fits the memory of a device.

    `peak_bytes` is the least peak that any plan found needs, `budget_bytes` what a device has, `live` what
    fills the peak as (what, bytes) pairs from large to small, `suggestions` what would make it fit.
    """

    def __init__(
        self,
        message: str,
        *,
        peak_bytes: int = 0,
        budget_bytes: int = 0,
        live: tuple[tuple[str, int], ...] = (),
        suggestions: tuple[str, ...] = (),
    ):
        super().__init__(message)
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
        self.live = live
        self.suggestions = suggestions
