"""A case in pipeline stages: what each stage takes and holds, put together from the parts of its model, in the order of its schedule.

A part (`parts`) is planned on a stage's submesh with few layers and two microbatches; a stage is so many layers, with the embedding if it
is the first and the head if it is the last. What the row says of stages, microbatches and schedule goes to `autopar.schedule.simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.schedule import Simulation, StageCost, Transfer, build, simulate
from benchmarks.fidelity.case import Case, Share, Software
from benchmarks.fidelity.parts import Part, rerun
from benchmarks.fidelity.timing import Work
from cost_models import Cluster


class Stage(NamedTuple):
    """One stage on one device: forward and backward of a microbatch and the end of a step, seconds of what it gives to the next stage
    and to the one before, and bytes."""

    forward: Work
    backward: Work
    update: Work
    sends_s: float
    returns_s: float
    fixed_bytes: float
    kept_bytes: float
    busy_bytes: float
    updating_bytes: float


@dataclass(frozen=True)
class Piped:
    """A predicted step in pipeline stages, before any efficiency is fitted. `waits`: a device does nothing while it sends."""

    stages: tuple[Stage, ...]
    devices: int
    schedule: str
    microbatches: int
    waits: bool

    def step_s(self, efficiency: float = 1.0) -> float:
        """Seconds of a step when compute runs at `efficiency` times what the device's figures say."""
        return self.simulation(efficiency).makespan_s

    def simulation(self, efficiency: float) -> Simulation:
        """The step in time."""
        costs = [self._cost(stage, efficiency) for stage in self.stages]
        pairs = enumerate(zip(self.stages, self.stages[1:], strict=False))
        hops = [Transfer(n, n + 1, here.sends_s, there.returns_s) for n, (here, there) in pairs if not self.waits]
        chunks = len(self.stages) // self.devices
        return simulate(build(self.schedule, self.devices, self.microbatches, chunks), costs, hops)

    def _cost(self, stage: Stage, efficiency: float) -> StageCost:
        sends, returns = (stage.sends_s, stage.returns_s) if self.waits else (0.0, 0.0)
        forward, backward = stage.forward.seconds(efficiency) + sends, stage.backward.seconds(efficiency) + returns
        update = stage.update.seconds(efficiency)
        return StageCost(forward, backward, update_s=update, residual_bytes=stage.kept_bytes, fixed_bytes=stage.fixed_bytes)

    @cached_property
    def peak_bytes(self) -> float:
        """Bytes on the device that holds most: what its stages keep, and the most that one of them needs beyond while it runs."""
        found, step = [], self.simulation(1.0)
        for d in range(self.devices):
            mine = self.stages[d :: self.devices]
            fixed = sum(s.fixed_bytes for s in mine)
            running = step.peak_bytes(d) + max(s.busy_bytes for s in mine)
            found.append(max(running, fixed + max(s.updating_bytes for s in mine)))
        return max(found)


def pipe(case: Case, cluster: Cluster, software: Software, parts: Mapping[Share, Sequence[Part]]) -> Piped:
    """The step of a case, given the parts of its model on each kind of submesh: the first, one for each layer or all layers alike, the
    last."""
    shares = case.layout.shares
    devices = len(shares) // case.layout.interleave
    first, stages, begin = _firsts(shares[:devices]), [], 0
    for n, share in enumerate(shares):
        mine = _members(parts[share.submesh], begin, share.layers, n == 0, n == len(shares) - 1)
        begin += share.layers
        after = _hop(cluster, mine[-1].gives_bytes, shares, first, n, n + 1) if n + 1 < len(shares) else 0.0
        before = _hop(cluster, _gives(parts[share.submesh], begin - share.layers), shares, first, n, n - 1) if n else 0.0
        passes = Work(cluster.compute_seconds(0.0, software.update_bytes * sum(part.parameters for part in mine), "float32", False))
        stages.append(_stage(mine, after, before, passes, rerun(mine, software.again(case))))
    return Piped(tuple(stages), devices, case.layout.schedule, case.layout.microbatches, software.waits_sends)


def _firsts(shares: Sequence[Share]) -> list[int]:
    """The first device of each submesh."""
    found = [0]
    for share in shares:
        found.append(found[-1] + share.devices)
    return found


def _members(parts: Sequence[Part], begin: int, layers: int, is_first: bool, is_last: bool) -> list[Part]:
    inner = parts[1:-1]
    mine = [inner[k if len(inner) > 1 else 0] for k in range(begin, begin + layers)]
    return [*parts[:1] * is_first, *mine, *parts[-1:] * is_last]


def _gives(parts: Sequence[Part], begin: int) -> float:
    """Bytes that come into a layer."""
    return parts[begin].gives_bytes if len(parts) > 3 else parts[1].gives_bytes


def _hop(cluster: Cluster, nbytes: float, shares: Sequence[Share], first: Sequence[int], a: int, b: int) -> float:
    """Seconds in which a microbatch's activations, or their cotangents, go from stage `a` to stage `b`, whole `nbytes`.

    Devices that hold the same send a part each, which the receiving ones gather among themselves: scatter and gather (Narayanan et al.
    2021, section 4.1), local all-gather (Zheng et al. 2022, section 6).
    """
    there, here = b % (len(first) - 1), a % (len(first) - 1)
    many = max(shares[a].devices, shares[b].devices)
    flows = [(first[here] + k * shares[a].devices // many, first[there] + k * shares[b].devices // many) for k in range(many)]
    seconds = cluster.transfer_seconds(nbytes / many, flows)
    tensor = shares[b].tensor
    gathers = tensor > 1 and not shares[b].sequence
    return seconds + (cluster.collective_seconds("all_gather", nbytes / shares[b].devices, ((tensor, 1),)) if gathers else 0.0)


def _stage(mine: Sequence[Part], after: float, before: float, passes: Work, again: Work) -> Stage:
    """A stage of these parts. `passes` are those of the end of the step beyond one, `again` is what backward repeats."""
    return Stage(
        sum((part.forward for part in mine), Work()),
        sum((part.backward for part in mine), again),
        sum((part.update for part in mine), passes),
        after,
        before,
        sum(part.fixed_bytes for part in mine),
        sum(part.kept_bytes for part in mine),
        max(part.busy_bytes for part in mine),
        max(part.updating_bytes for part in mine),
    )
