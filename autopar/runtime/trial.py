"""Some steps of a plan beside one device, with all that is compared afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.emit.hlo import CompiledCollective
from autopar.ir.plan import Plan
from autopar.runtime.executable import AnyExecutable
from autopar.runtime.verify import (
    LeafError,
    Run,
    Verification,
    check_collectives,
    check_memory,
    check_numbers,
    check_time,
    compiled_collectives,
    compiled_memory,
    run_beside,
)
from autopar.trace.trace import Traced

_CHECK = ("expected", "actual", "agree", "detail")
_COLLECTIVE = ("ids", "kind", "group_size", "nbytes", "times")

OnStep = Callable[[int, "float | None"], None]
"""Told after each step: its number from 0, and its loss where the function returns one."""


@dataclass(frozen=True)
class Trial:
    """What some steps showed. `memory` is XLA's, in bytes per device; `losses` is empty where the function returns none."""

    verification: Verification
    run: Run
    memory: dict[str, int]
    collectives: tuple[CompiledCollective, ...]
    losses: tuple[float, ...]

    @property
    def step_time_s(self) -> float:
        """The median step, the first left out: it warms up."""
        return _median(self.run.seconds)

    @property
    def reference_step_time_s(self) -> float:
        """The same of the function under `jax.jit` on one device."""
        return _median(self.run.reference_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Checks and measurements as JSON data."""
        v = self.verification
        checks = {c.name: {n: getattr(c, n) for n in _CHECK} for c in (v.numbers, v.collectives, v.memory, v.time)}
        measured = {
            "step_time_s": self.step_time_s,
            "reference_step_time_s": self.reference_step_time_s,
            "peak_bytes": self.memory["total"],
            "argument_bytes": self.memory["argument"],
            "temp_bytes": self.memory["temp"],
            "collectives": [{n: getattr(c, n) for n in _COLLECTIVE} for c in self.collectives],
            "seconds": list(self.run.seconds),
            "reference_seconds": list(self.run.reference_seconds),
            "losses": list(self.losses),
        }
        return {"agree": v.agree, "steps": len(self.run.seconds), "checks": checks, "measured": measured}


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds[1:] or seconds)) if seconds else 0.0


def attempt(
    plan: Plan,
    traced: Traced,
    executable: AnyExecutable,
    leaves: Sequence[Any],
    steps: int,
    on_step: OnStep = lambda n, loss: None,
    batches: Sequence[Sequence[Any]] = (),
) -> Trial:
    """Run `steps` steps from these leaves under the plan and on one device, and compare; see `run_beside` for `batches`."""
    index, losses = loss_output(traced), []

    def after(n: int, outputs: Sequence[Any], errors: Sequence[LeafError]) -> None:
        if index is not None:
            losses.append(float(outputs[index]))
        on_step(n, losses[-1] if losses else None)

    run = run_beside(traced, executable, leaves, steps, after, batches)
    checks = Verification(
        check_numbers(run), check_collectives(plan, executable), check_memory(plan, executable), check_time(plan, run.seconds)
    )
    compiled = compiled_collectives(executable)
    return Trial(checks, run, compiled_memory(executable), compiled, tuple(losses))


def loss_output(traced: Traced) -> int | None:
    """Which output is the loss: a floating scalar that is not carried on, by that name if there are several."""
    carried = {o for o, _ in traced.roles.carried}
    avals = [traced.graph.aval(o) for o in traced.graph.outputs]
    scalars = [i for i, a in enumerate(avals) if i not in carried and a.shape == () and "float" in a.dtype and a.dtype != "float0"]
    named = [i for i in scalars if "loss" in traced.graph.output_names[i].lower()]
    return next(iter(named or scalars), None)
