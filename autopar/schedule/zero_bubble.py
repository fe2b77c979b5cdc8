"""ZB-H1: 1F1B whose gradients of weights fill the bubble (Qi et al. 2023).

Every stage holds as many microbatches as the first one does under 1F1B.
"""

from __future__ import annotations

from autopar.schedule.check import check, check_counts
from autopar.schedule.tasks import Schedule, Task


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Stage s runs the weights' gradient of a microbatch s input gradients later, so that at most `stages` microbatches are held."""
    check_counts("zero_bubble", stages=stages, microbatches=microbatches)
    orders = tuple(_order(stages, microbatches, s) for s in range(stages))
    return check(Schedule("zero_bubble", microbatches, tuple(range(stages)), orders))


def _order(stages: int, microbatches: int, s: int) -> tuple[Task, ...]:
    ahead = min(stages - 1 - s, microbatches)
    order = [Task("F", s, m) for m in range(ahead)]
    for m in range(microbatches + s):
        if m + ahead < microbatches:
            order.append(Task("F", s, m + ahead))
        if m < microbatches:
            order.append(Task("I", s, m))
        if m >= s:
            order.append(Task("W", s, m - s))
    return tuple(order)
