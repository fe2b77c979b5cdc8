"""What a stage and a transfer cost, as numbers that a simulation takes. Seconds and bytes; bytes are those of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from autopar.errors import ScheduleError
from autopar.schedule.tasks import Task


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a stage per microbatch, of its step's end, and the bytes that it keeps from forward to backward.

    `backward_s` is all of backward; a schedule that splits it takes `input_s` and `weight_s`, whose sum may be larger. `update_s`, once
    per step after the stage's device has run all its tasks: gradient reductions and the optimiser. `residual_bytes` per microbatch stay
    from the begin of forward until `B`, or `W`, ends; `input_bytes` of them, which weights' gradients do not read, only until `I` ends.
    `inner_bytes` is what `I` keeps for `W`; `fixed_bytes` what is there all the time: parameters, optimiser, accumulators.
    """

    forward_s: float
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    update_s: float = 0.0
    residual_bytes: float = 0.0
    input_bytes: float = 0.0
    inner_bytes: float = 0.0
    fixed_bytes: float = 0.0

    def seconds(self, task: Task) -> float:
        """How long one task runs."""
        return {"F": self.forward_s, "B": self.backward_s, "I": self.input_s, "W": self.weight_s}[task.kind]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What goes from stage `source` to stage `target` for each microbatch, and the cotangents on the way back.

    A direction's transfer keeps the link from the source's device to the target's busy for its seconds and arrives `latency_s` later. Two
    directions do not meet. A transfer runs beside the tasks of both devices. `forward_bytes` and `backward_bytes` stand on the
    receiving device from when the transfer begins until the task that reads them ends, `forward_sent_bytes` and `backward_sent_bytes`
    on the sending one from when the task that makes them begins until they have arrived.
    """

    source: int
    target: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    latency_s: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_sent_bytes: float = 0.0
    backward_sent_bytes: float = 0.0


def check_costs(costs: Sequence[StageCost], transfers: Sequence[Transfer], stages: int, edges: Sequence[tuple[int, int]]) -> None:
    """Raises `ScheduleError` for costs that do not fit the stages, transfers along no edge or twice along one, and bad numbers."""
    if len(costs) != stages:
        raise ScheduleError(f"{len(costs)} stage costs were given for {stages} stages; give one for each stage.")
    seen: set[tuple[int, int]] = set()
    for transfer in transfers:
        edge = (transfer.source, transfer.target)
        if edge not in edges:
            a, b = edge
            raise ScheduleError(f"a transfer goes from stage {a} to stage {b}, which the schedule does not know; add it to its skips.")
        if edge in seen:
            raise ScheduleError(f"two transfers go from stage {edge[0]} to stage {edge[1]}; give their sum.")
        seen.add(edge)
    nouns: tuple[StageCost | Transfer, ...] = (*costs, *transfers)
    for noun in nouns:
        for field in fields(noun):
            value = getattr(noun, field.name)
            if not math.isfinite(value) or value < 0:
                raise ScheduleError(f"{field.name} of {noun} must be a finite number that is not negative.")
