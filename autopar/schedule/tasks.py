"""The nouns of a schedule: tasks, the order in which each device runs them, and what each of them frees.

A *device* here is whatever runs one task at a time: the submesh of a stage, or of several chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["F", "B", "I", "W"]
What = Literal["activation", "residual", "cotangent", "inner"]


@dataclass(frozen=True, slots=True)
class Task:
    """One stage working on one microbatch.

    `F` is forward and `B` all of backward; `I` makes the gradient of the stage's input and `W` that of its weights, together `B`.
    Stages are numbered as data flows; a device with several chunks holds several of them.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """What one task leaves for another on a device.

    `activation`: what a stage gives to later ones. `residual`: what its forward keeps for its backward. `cotangent`: the gradient of
    its input, for earlier stages. `inner`: what `I` keeps for `W`. `stage` is the one that made it; one that is sent to another device
    stands there once more.
    """

    what: What
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Which device runs which task, and in what order. Every builder's result has passed `check`.

    `device_of[s]` is the device of stage s. Stage s reads what stage s-1 gives, and what `skips`, pairs (source, target) of stages
    that are no neighbours, bring from farther off; cotangents go the other way.
    """

    name: str
    num_microbatches: int
    device_of: tuple[int, ...]
    orders: tuple[tuple[Task, ...], ...]
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.device_of)

    @property
    def num_devices(self) -> int:
        return len(self.orders)

    @cached_property
    def tasks(self) -> frozenset[Task]:
        return frozenset(task for order in self.orders for task in order)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(source, target) stages of all activations."""
        return (*((s, s + 1) for s in range(self.num_stages - 1)), *self.skips)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The stages whose activations each stage reads."""
        return tuple(tuple(a for a, b in self.edges if b == s) for s in range(self.num_stages))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """The stages that read each stage's activations."""
        return tuple(tuple(b for a, b in self.edges if a == s) for s in range(self.num_stages))

    def backward(self, stage: int, microbatch: int) -> Task | None:
        """The task that makes the cotangent of a stage's input, if the schedule has backward tasks."""
        found = (Task(kind, stage, microbatch) for kind in ("B", "I"))
        return next((task for task in found if task in self.tasks), None)

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks that must end before this one begins, those of its own device's order left out."""
        s, m = task.stage, task.microbatch
        if task.kind == "F":
            return tuple(Task("F", source, m) for source in self.sources[s])
        if task.kind == "W":
            return (Task("I", s, m),)
        later = (self.backward(target, m) for target in self.targets[s])
        return (Task("F", s, m), *(t for t in later if t is not None))

    def makes(self, task: Task) -> tuple[Buffer, ...]:
        """What a task leaves for others. Gradients of weights are accumulated, not left."""
        s, m = task.stage, task.microbatch
        made: list[Buffer] = []
        if task.kind == "F":
            made += [Buffer("activation", s, m)] if self.targets[s] else []
            made += [Buffer("residual", s, m)] if self.backward(s, m) else []
        elif task.kind in "BI":
            made += [Buffer("cotangent", s, m)] if self.sources[s] else []
            made += [Buffer("inner", s, m)] if task.kind == "I" else []
        return tuple(made)

    def reads(self, task: Task) -> tuple[Buffer, ...]:
        """What a task reads of others; all of it stands on its device by then."""
        s, m = task.stage, task.microbatch
        if task.kind == "F":
            return tuple(Buffer("activation", source, m) for source in self.sources[s])
        if task.kind == "W":
            return (Buffer("residual", s, m), Buffer("inner", s, m))
        return (Buffer("residual", s, m), *(Buffer("cotangent", target, m) for target in self.targets[s]))

    @cached_property
    def frees(self) -> tuple[tuple[tuple[Buffer, ...], ...], ...]:
        """For each device and each position in its order, the buffers that this device needs no longer.

        What is only sent away is freed, as far as this device goes, by the task that makes it: the transfer holds it until it is done.
        """
        return tuple(self._freed(order) for order in self.orders)

    def _freed(self, order: Sequence[Task]) -> tuple[tuple[Buffer, ...], ...]:
        last = {buffer: k for k, task in enumerate(order) for buffer in (*self.reads(task), *self.makes(task))}
        freed: list[list[Buffer]] = [[] for _ in order]
        for buffer, k in last.items():
            freed[k].append(buffer)
        return tuple(map(tuple, freed))

    def in_flight(self, device: int) -> int:
        """The most residuals that a device holds at once: microbatches of its stages between forward and the end of backward.

        A device whose share is cut into v chunks counts each of them, so v make one microbatch through the device's share.
        """
        held = peak = 0
        for task, freed in zip(self.orders[device], self.frees[device], strict=True):
            held += sum(b.what == "residual" for b in self.makes(task))
            peak = max(peak, held)
            held -= sum(b.what == "residual" for b in freed)
        return peak
