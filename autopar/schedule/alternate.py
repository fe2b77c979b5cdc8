"""One forward, one backward: what 1F1B and its kin have in common."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedule.tasks import Task


def alternate(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> tuple[Task, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = zip(forwards[warmup:], backwards, strict=False)
    return (*forwards[:warmup], *(task for pair in steady for task in pair), *backwards[len(forwards) - warmup :])
