"""Repeated things of a plan as one: leaves of equal layers, collectives that do the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from autopar import costs
from autopar.ir.graph import MATMULS, Aval, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Collective, Leaf, Plan
from autopar.ir.sharding import TensorSharding

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class LeafGroup:
    """Leaves of one stage that differ in the numbers of their paths alone. `nbytes` on one device, all of them together."""

    path: str
    count: int
    role: str
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    nbytes: int
    stages: tuple[int, ...] = (0,)

    @property
    def type_text(self) -> str:
        return str(Aval(self.shape, self.dtype))


@dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one kind, over the same axes, in the same phase and stage, for the same purpose; all of it per step."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    purpose: str
    count: int
    times: int
    nbytes: int
    seconds: float
    stage: int = 0


def leaf_bytes(leaf: Leaf, mesh: LogicalMesh) -> int:
    """Bytes of a leaf on one device, of the stage that has most of it."""
    if not leaf.parts:
        return leaf.sharding.local_bytes(Aval(leaf.shape, leaf.dtype), mesh)
    found: dict[int, int] = {}
    for p in leaf.parts:
        shape = (*leaf.shape[: p.dimension], p.end - p.begin, *leaf.shape[p.dimension + 1 :])
        found[p.stage] = found.get(p.stage, 0) + p.sharding.local_bytes(Aval(shape, leaf.dtype), mesh)
    return max(found.values())


def fold_leaves(leaves: Iterable[Leaf], mesh: LogicalMesh) -> tuple[LeafGroup, ...]:
    """Leaves with equal role, type, sharding and stage folded by the numbers in their paths, in order of first appearance."""
    alike: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in leaves:
        key = (without_numbers(leaf.path), leaf.role, leaf.shape, leaf.dtype, leaf.sharding, leaf.stages)
        alike.setdefault(key, []).append(leaf)
    groups = []
    for members in alike.values():
        first = members[0]
        each = leaf_bytes(first, mesh)
        for path, count in fold_paths([m.path for m in members]):
            groups.append(LeafGroup(path, count, first.role, first.shape, first.dtype, first.sharding, count * each, first.stages))
    return tuple(groups)


def without_numbers(text: str) -> str:
    """`layers_3/w` -> `layers_*/w`."""
    return _NUMBER.sub("*", text)


def fold_paths(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Paths that differ in their numbers alone, as few patterns that stand for exactly these: (pattern, how many).

    >>> fold_paths(["h_0/w", "h_1/w", "h_2/w"])
    [('h_{0..2}/w', 3)]
    >>> fold_paths(["h_0/d_0", "h_0/d_1", "h_1/d_1"])
    [('h_0/d_{0..1}', 2), ('h_1/d_1', 1)]
    """
    numbers = [tuple(_NUMBER.findall(p)) for p in paths]
    columns = [list(dict.fromkeys(column)) for column in zip(*numbers, strict=True)]
    if prod(map(len, columns)) != len(set(numbers)):
        widest = next(i for i, column in enumerate(columns) if len(column) > 1)
        parts = [[p for p, n in zip(paths, numbers, strict=True) if n[widest] == value] for value in columns[widest]]
        return [pattern for part in parts for pattern in fold_paths(part)]
    written = iter(map(_range_text, columns))
    return [(_NUMBER.sub(lambda _: next(written), paths[0]), len(paths))]


def fold_ops(graph: Graph, ops: Iterable[int], most: int = 8) -> list[str]:
    """Where ops stand and what they are, alike places together, most FLOPs first: `h_{0..2}/mlp: 1 dot_general, 2 others`."""
    places: dict[str, Counter[str]] = {}
    work: Counter[str] = Counter()
    for i in ops:
        op = graph.ops[i]
        place = op.scope or op.source
        places.setdefault(place, Counter())[op.primitive if op.primitive in MATMULS else "others"] += 1
        work[place] += int(costs.flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results]))
    alike: dict[tuple[str, str], list[str]] = {}
    for place, counts in sorted(places.items(), key=lambda kv: -work[kv[0]]):
        what = ", ".join(f"{n} {primitive}" for primitive, n in sorted(counts.items()))
        alike.setdefault((without_numbers(place), what), []).append(place)
    return [f"{path}: {what}" for (_, what), paths in list(alike.items())[:most] for path, _ in fold_paths(sorted(paths))]


def _range_text(values: list[str]) -> str:
    if len(values) == 1:
        return values[0]
    numbers = sorted(map(int, values))
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))) and all(str(int(v)) == v for v in values):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(values)}}}"


def fold_collectives(collectives: Iterable[Collective]) -> tuple[CollectiveGroup, ...]:
    """Collectives grouped by kind, axes, phase, stage and purpose (numbers in it left out), the dearest group first."""
    alike: dict[tuple[object, ...], list[Collective]] = {}
    for c in collectives:
        alike.setdefault((c.kind, c.axes, c.phase, without_numbers(c.purpose), c.stage), []).append(c)
    groups = [
        CollectiveGroup(
            members[0].kind,
            members[0].axes,
            members[0].phase,
            members[0].purpose if len({m.purpose for m in members}) == 1 else without_numbers(members[0].purpose),
            len(members),
            sum(m.times for m in members),
            sum(step_bytes(m) for m in members),
            sum(step_seconds(m) for m in members),
            members[0].stage,
        )
        for members in alike.values()
    ]
    return tuple(sorted(groups, key=lambda g: (-g.seconds, -g.nbytes, g.kind, g.axes, g.stage)))


def step_bytes(collective: Collective) -> int:
    """Bytes that a collective moves per device and step."""
    return collective.nbytes * collective.times


def step_seconds(collective: Collective) -> float:
    """Seconds that a collective takes per step; `Collective.seconds` is for one time."""
    return collective.seconds * collective.times


def cluster_name(plan: Plan) -> str:
    """The cluster as the user wrote it."""
    return str(plan.cluster.get("name", "")) or f"{plan.mesh.num_devices} devices"


def memory_budget(plan: Plan) -> int | None:
    """Bytes that the plan may use on a device: `Options.memory_bytes`, or its `memory_fraction` of what the device lets programs have."""
    asked = plan.options.get("memory_bytes")
    if asked:
        return int(asked)
    device = plan.cluster.get("device", plan.cluster)
    if not hasattr(device, "get") or not device.get("memory_bytes"):
        return None
    there = (device["memory_bytes"] - device.get("reserved_bytes", 0)) * (1 - device.get("fragmentation", 0.0))
    return int(there * float(plan.options.get("memory_fraction") or 1.0)) or None


def number_of_stages(plan: Plan) -> int:
    """Pipeline stages; 1 where the model is not cut."""
    return max(1, len(plan.stages))
