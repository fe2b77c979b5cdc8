"""1F1B: backward as soon as it can, with no more microbatches in flight than stages lie ahead (PipeDream-flush; Narayanan et al. 2021)."""

from __future__ import annotations

from autopar.schedule.alternate import alternate
from autopar.schedule.check import check, check_counts
from autopar.schedule.tasks import Schedule, Task


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Stage s runs `stages - 1 - s` forwards first and holds at most `stages - s` microbatches."""
    check_counts("1f1b", stages=stages, microbatches=microbatches)
    return check(_warmed(stages, microbatches, "1f1b", 1))


def eager_one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Twice the forwards ahead: at most `2 (stages - s) - 1` microbatches on stage s, and transfers are hidden (Zhuang et al. 2023)."""
    check_counts("eager_1f1b", stages=stages, microbatches=microbatches)
    return check(_warmed(stages, microbatches, "eager_1f1b", 2))


def _warmed(stages: int, microbatches: int, name: str, depth: int) -> Schedule:
    orders = tuple(
        alternate(
            [Task("F", s, m) for m in range(microbatches)],
            [Task("B", s, m) for m in range(microbatches)],
            depth * (stages - 1 - s),
        )
        for s in range(stages)
    )
    return Schedule(name, microbatches, tuple(range(stages)), orders)
