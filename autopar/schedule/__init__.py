"""Pipeline schedules as data, a simulator of what they take, and the formulas that foretell it."""

from __future__ import annotations

from autopar.errors import ScheduleError
from autopar.schedule.check import check
from autopar.schedule.costs import StageCost, Transfer
from autopar.schedule.formulas import Flight, Formula
from autopar.schedule.forward import forward
from autopar.schedule.gpipe import gpipe
from autopar.schedule.interleaved import interleaved
from autopar.schedule.one_f_one_b import eager_one_f_one_b, one_f_one_b
from autopar.schedule.simulate import Simulation, simulate
from autopar.schedule.tasks import Buffer, Schedule, Task
from autopar.schedule.zero_bubble import zero_bubble

BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_one_f_one_b,
    "zero_bubble": zero_bubble,
    "forward": forward,
}


def build(name: str, devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule that `Options.schedule` calls `name`. Raises `ScheduleError` for an unknown one, or chunks where there are none.

    >>> build("1f1b", 2, 3).orders[0]
    (Task(kind='F', stage=0, microbatch=0), Task(kind='F', stage=0, microbatch=1), Task(kind='B', stage=0, microbatch=0), \
Task(kind='F', stage=0, microbatch=2), Task(kind='B', stage=0, microbatch=1), Task(kind='B', stage=0, microbatch=2))
    """
    if name == "interleaved":
        return interleaved(devices, microbatches, chunks)
    if name not in BUILDERS:
        raise ScheduleError(f"there is no schedule {name!r}; use {', '.join((*BUILDERS, 'interleaved'))}.")
    if chunks != 1:
        raise ScheduleError(f"schedule {name!r} has one chunk per device, not {chunks}; use 'interleaved'.")
    return BUILDERS[name](devices, microbatches)


__all__ = [
    "BUILDERS",
    "Buffer",
    "Flight",
    "Formula",
    "Schedule",
    "Simulation",
    "StageCost",
    "Task",
    "Transfer",
    "build",
    "check",
    "simulate",
]
