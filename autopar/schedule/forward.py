"""Forward alone: inference and evaluation."""

from __future__ import annotations

from autopar.schedule.check import check, check_counts
from autopar.schedule.tasks import Schedule, Task


def forward(stages: int, microbatches: int) -> Schedule:
    """Microbatch after microbatch; nothing is kept."""
    check_counts("forward", stages=stages, microbatches=microbatches)
    orders = tuple(tuple(Task("F", s, m) for m in range(microbatches)) for s in range(stages))
    return check(Schedule("forward", microbatches, tuple(range(stages)), orders))
