"""Whether a schedule can run: each task once, on its stage's device, and in an order in which none waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.errors import ScheduleError
from autopar.schedule.tasks import Schedule, Task


def check(schedule: Schedule) -> Schedule:
    """The schedule itself. Raises `ScheduleError` that names the first task that is missing, misplaced or waits for ever."""
    _check_shape(schedule)
    _check_places(schedule)
    _check_complete(schedule)
    for _ in running(schedule):
        pass
    return schedule


def check_counts(name: str, **counts: int) -> None:
    """Raises `ScheduleError` for a count of stages, microbatches or chunks that is no positive whole number."""
    for what, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"schedule {name!r} needs {what} to be a positive whole number, not {count!r}.")


def running(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """(device, task) in an order in which each task follows all that it needs.

    Raises `ScheduleError` on a deadlock, which says what every device waits for.
    """
    done: set[Task] = set()
    place = [0] * schedule.num_devices
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(schedule.orders):
            while place[d] < len(order) and done.issuperset(schedule.needs(order[place[d]])):
                task = order[place[d]]
                done.add(task)
                place[d] += 1
                moved = True
                yield d, task
    if any(p < len(order) for p, order in zip(place, schedule.orders, strict=True)):
        waits = _stuck(schedule, place, done)
        raise ScheduleError(f"schedule {schedule.name!r} deadlocks: {waits}. Reorder the tasks of one of these devices.")


def _stuck(schedule: Schedule, place: list[int], done: set[Task]) -> str:
    waits = []
    for d, order in enumerate(schedule.orders):
        if place[d] < len(order):
            task = order[place[d]]
            missing = ", ".join(str(t) for t in schedule.needs(task) if t not in done)
            waits.append(f"device {d} stands before {task}, which needs {missing}")
    return "; ".join(waits)


def _check_shape(schedule: Schedule) -> None:
    check_counts(schedule.name, stages=schedule.num_stages, microbatches=schedule.num_microbatches, devices=schedule.num_devices)
    for s, d in enumerate(schedule.device_of):
        if not 0 <= d < schedule.num_devices:
            raise ScheduleError(f"schedule {schedule.name!r} puts stage {s} on device {d}, but has orders for {schedule.num_devices}.")
    for a, b in schedule.skips:
        if not 0 <= a < b - 1 < schedule.num_stages - 1:
            raise ScheduleError(
                f"schedule {schedule.name!r} has a skip from stage {a} to stage {b}: "
                f"skips go forward between two of {schedule.num_stages} stages that are no neighbours."
            )


def _check_places(schedule: Schedule) -> None:
    for d, order in enumerate(schedule.orders):
        for task, times in Counter(order).items():
            known = 0 <= task.stage < schedule.num_stages and 0 <= task.microbatch < schedule.num_microbatches and task.kind in "FBIW"
            if not known:
                raise ScheduleError(f"schedule {schedule.name!r} has {task} on device {d}, which is none of its stages and microbatches.")
            home = schedule.device_of[task.stage]
            if home != d:
                raise ScheduleError(f"schedule {schedule.name!r} runs {task} on device {d}; its stage is on device {home}.")
            if times > 1:
                raise ScheduleError(f"schedule {schedule.name!r} runs {task} {times} times on device {d}; each task runs once.")


def _check_complete(schedule: Schedule) -> None:
    """Each stage and microbatch has a forward, and either all have a backward, whole or in two parts, or none has."""
    backward = any(task.kind != "F" for task in schedule.tasks)
    kinds: dict[tuple[int, int], set[str]] = {}
    for task in schedule.tasks:
        kinds.setdefault((task.stage, task.microbatch), set()).add(task.kind)
    for s in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            found = kinds.get((s, m), set())
            if found not in (({"F", "B"}, {"F", "I", "W"}) if backward else ({"F"},)):
                wanted = "F and B, or F, I and W" if backward else "F"
                given = ", ".join(sorted(found)) or "nothing"
                raise ScheduleError(f"schedule {schedule.name!r} has {given} for stage {s} and microbatch {m}; it needs {wanted}.")
