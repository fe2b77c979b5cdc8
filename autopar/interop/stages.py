"""What the dynamic programme is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.errors import UsageError
from autopar.interop.submesh import Submesh
from autopar.schedule import build
from autopar.schedule.costs import StageCost, Transfer
from autopar.schedule.formulas import Flight, Formula
from autopar.schedule.simulate import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run some layers on a submesh: a logical shape, shardings, what is made again. Bytes are those of one device.

    `backward_s` is all of backward per microbatch, `weight_s` the part of it that makes gradients of weights; `update_s` is once per step:
    gradient reductions and the optimiser. `residual_bytes` per microbatch in flight, `fixed_bytes` all the time (parameters, optimiser,
    accumulators, and what one microbatch needs while it runs). `update_bytes` is all that is there while weights are updated, when no
    microbatch is in flight. `label` is the caller's.
    """

    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0
    update_s: float = 0.0
    fixed_bytes: float = 0.0
    residual_bytes: float = 0.0
    label: Any = None
    update_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """Between two submeshes: seconds per byte of the whole value, and of a message."""

    seconds_per_byte: float
    latency_s: float = 0.0


Oracle = Callable[[int, int, Submesh, int], Sequence[Choice]]
"""(first layer, layer after the last, submesh, microbatches) -> ways to run them; none where there are none."""



@dataclass(frozen=True)
class Grid:
    """The cluster as stages see it: `nodes` of `devices` each, all of which a plan uses.

    `link(a, b)` joins a stage on submesh a to the next one on submesh b. `memory_bytes` is what stages may fill of a device, or None.
    `parts(submesh)` says in how many parts what crosses a border lies there; without it, in as many as there are devices.
    """

    nodes: int
    devices: int
    submeshes: tuple[Submesh, ...]
    link: Callable[[Submesh, Submesh], Link]
    memory_bytes: float | None = None
    parts: Callable[[Submesh], float] = lambda submesh: submesh.size

    def __post_init__(self) -> None:
        if not self.submeshes or (self.memory_bytes is not None and not self.memory_bytes > 0):
            raise UsageError(f"a grid needs submeshes and memory, not {self.submeshes} and {self.memory_bytes} bytes.")

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices


@dataclass(frozen=True)
class Chain:
    """Layers in order. `classes[k]` is equal for layers that cost the same: ranges of equal classes are priced once.

    `forward_bytes[k]` is what crosses the border before layer k in a step, over all microbatches, and `backward_bytes[k]` its cotangents.
    A value that is read far behind counts at every border between: stages pass it on. Both have an entry more than there are
    layers; the first and the last are 0.
    """

    classes: tuple[Hashable, ...]
    forward_bytes: tuple[float, ...]
    backward_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name, values in (("forward_bytes", self.forward_bytes), ("backward_bytes", self.backward_bytes)):
            if len(values) != len(self.classes) + 1 or not all(np.isfinite(values)) or min(values) < 0 or values[0] or values[-1]:
                raise UsageError(
                    f"{name} of a chain of {len(self.classes)} layers must be {len(self.classes) + 1} numbers that are not negative, "
                    f"the first and the last 0, not {values!r}."
                )
        if not self.classes:
            raise UsageError("a chain needs at least one layer.")

    @property
    def num_layers(self) -> int:
        return len(self.classes)


def crossings(num_layers: int, values: Iterable[tuple[int, int, float]]) -> tuple[float, ...]:
    """Bytes across each border, for `Chain`, of values as (layer that makes it, last layer that reads it, bytes)."""
    steps = np.zeros(num_layers + 2)
    for made, read, nbytes in values:
        if read > made:
            steps[made + 1] += nbytes
            steps[read + 1] -= nbytes
    return (0.0, *np.maximum(np.cumsum(steps)[1:num_layers], 0.0).tolist(), 0.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start` to `stop - 1` on a submesh. `nbytes` bounds what stands on one of its devices under the schedule."""

    start: int
    stop: int
    submesh: Submesh
    choice: Choice
    flight: Flight
    nbytes: float


@dataclass(frozen=True)
class StagePlan:
    """The best stages found for one schedule and number of microbatches.

    `seconds` is the schedule's closed form, which is the least over all plans up to the relative `gap` that was asked for. `hops[s]` leads
    from stage s to the next; transfers in it are per microbatch.
    """

    stages: tuple[Stage, ...]
    hops: tuple[Transfer, ...]
    formula: Formula
    seconds: float

    @property
    def schedule(self) -> str:
        return self.formula.name

    @property
    def microbatches(self) -> int:
        return self.formula.microbatches

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first layer, layer after the last) of each stage of the schedule, as data flows.

        Interleaving deals each device's share out in chunks: stage `c * devices + d` is chunk c of device d. A share is priced as if it
        were in one piece, which is right where all layers but the first and the last are of one class, and else an estimate.
        """
        v, at, found = self.formula.chunks, 0, []
        for stage in self.stages * v:
            found.append((at, at + (stage.stop - stage.start) // v))
            at = found[-1][1]
        return tuple(found)

    @cached_property
    def simulation(self) -> Simulation:
        """The plan in time. Interleaved stages run as equal chunks, and what the last device gives back crosses the dearest hop."""
        v, n = self.formula.chunks, len(self.stages)
        schedule = build(self.formula.name, n, self.microbatches, v)
        costs = [stage_cost(stage, v) for stage in self.stages] * v
        around = _dearest(self.hops)
        hops = [self.hops[a % n] if a % n < n - 1 else around for a in range(n * v - 1)]
        return simulate(schedule, costs, [replace(hop, source=a, target=a + 1) for a, hop in enumerate(hops)])


def stage_cost(stage: Stage, chunks: int = 1) -> StageCost:
    """A stage, or one of the equal chunks of which it is made, as a simulation takes it."""
    choice = stage.choice
    return StageCost(
        choice.forward_s / chunks,
        choice.backward_s / chunks,
        (choice.backward_s - choice.weight_s) / chunks,
        choice.weight_s / chunks,
        choice.update_s / chunks,
        choice.residual_bytes / chunks,
        fixed_bytes=choice.fixed_bytes / chunks,
    )


def _dearest(hops: Sequence[Transfer]) -> Transfer:
    """A hop with the largest of every number."""
    names = ("forward_s", "backward_s", "latency_s", "forward_bytes", "backward_bytes", "forward_sent_bytes", "backward_sent_bytes")
    return Transfer(0, 1, **{name: max((getattr(hop, name) for hop in hops), default=0.0) for name in names})
