"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every device holds all microbatches at once."""

from __future__ import annotations

from autopar.schedule.check import check, check_counts
from autopar.schedule.tasks import Schedule, Task


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Backwards run in the order of microbatches too, so that gradients are summed in one order under every schedule."""
    check_counts("gpipe", stages=stages, microbatches=microbatches)
    forwards = [[Task("F", s, m) for m in range(microbatches)] for s in range(stages)]
    orders = tuple((*row, *(Task("B", task.stage, task.microbatch) for task in row)) for row in forwards)
    return check(Schedule("gpipe", microbatches, tuple(range(stages)), orders))
