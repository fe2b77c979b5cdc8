"""Fold: clusters that look alike, themselves and around them, become one class with a multiplicity.

Colour refinement: a cluster's first colour is everything that its price depends on; each round adds the colours of what it
reads and of who reads it. Members of one class take one strategy, which is a legal restriction of the unfolded programme.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from autopar.costs import Charges
from autopar.intraop.clusters import Cluster
from autopar.ir.graph import BOUNDARY, Constant, Graph, Op


@dataclass(frozen=True)
class Folded:
    """`class_of[c]` for each cluster; the members of each class in program order, the first one being its representative."""

    class_of: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


def unfolded(clusters: Sequence[Cluster]) -> Folded:
    """Each cluster its own class."""
    return Folded(tuple(range(len(clusters))), tuple((c,) for c in range(len(clusters))))


def fold(
    graph: Graph,
    clusters: Sequence[Cluster],
    charges: Charges,
    marks: dict[int, Hashable],
    rounds: int = 2,
    tags: Callable[[int], Hashable] | None = None,
) -> Folded:
    """Classes of equal clusters. `marks` holds what else tells graph inputs apart (role, pins), by value, `tags` what tells ops apart."""
    cluster_of = {i: c for c, cluster in enumerate(clusters) for i in cluster.ops}
    member = {v: c for c, cluster in enumerate(clusters) for v in cluster.inputs}
    colours = _dense(
        [(_signature(graph, cluster, charges, marks), tuple(map(tags, cluster.ops)) if tags else ()) for cluster in clusters]
    )
    around = [_neighbours(graph, cluster, cluster_of, member, marks) for cluster in clusters]
    for _ in range(rounds):
        refined = [
            (
                colours[c],
                tuple((place, key if isinstance(key, tuple) else colours[key]) for place, key in reads),
                tuple(sorted((place, colours[user], k) for place, user, k in readers)),
            )
            for c, (reads, readers) in enumerate(around)
        ]
        new = _dense(refined)
        if len(set(new)) == len(set(colours)):
            break
        colours = new
    return _group(colours)


def _dense(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(k, len(numbers)) for k in keys]


def _group(colours: Sequence[int]) -> Folded:
    members: dict[int, list[int]] = {}
    for c, colour in enumerate(colours):
        members.setdefault(colour, []).append(c)
    order = {colour: n for n, colour in enumerate(members)}
    return Folded(tuple(order[c] for c in colours), tuple(tuple(m) for m in members.values()))


def _signature(graph: Graph, cluster: Cluster, charges: Charges, marks: dict[int, Hashable]) -> Hashable:
    """Everything inside a cluster that strategies and prices depend on, by position."""
    inside = {r: (j, k) for j, i in enumerate(cluster.ops) for k, r in enumerate(graph.ops[i].results)}
    inputs = {v: n for n, v in enumerate(cluster.inputs)}
    rows = []
    for i in cluster.ops:
        op = graph.ops[i]
        operands = tuple(
            o.text if isinstance(o, Constant) else inside.get(o) or ("in", inputs[o]) if o in inside or o in inputs else _outer(graph, o)
            for o in op.operands
        )
        results = tuple((graph.avals[r].shape, graph.avals[r].dtype, r in graph.output_values) for r in op.results)
        rows.append((op.primitive, _params(op), operands, results, op.phase, op.again, charges.reads[i], charges.writes[i], graph.times[i]))
    key = (cluster.linear, tuple(rows), tuple((graph.avals[v], marks.get(v)) for v in cluster.inputs))
    try:
        return hash(key), key if len(rows) < 200 else len(rows)
    except TypeError:
        return repr(key)


def _params(op: Op) -> Hashable:
    """What an op is told; a port's number in its loop tells equal ports apart in name alone."""
    return op.params if op.primitive not in BOUNDARY else tuple(p for p in op.params if p[0] != "position")


def _outer(graph: Graph, value: int) -> Hashable:
    aval = graph.avals[value]
    return (aval.shape, aval.dtype, value in graph.free)


def _neighbours(
    graph: Graph, cluster: Cluster, cluster_of: dict[int, int], member: dict[int, int], marks: dict[int, Hashable]
) -> tuple[list[tuple[tuple[int, int], int | tuple[Hashable, ...]]], list[tuple[tuple[int, int], int, int]]]:
    """What a cluster reads from outside, by place, and who reads it: cluster numbers, or marks for graph inputs."""
    mine = set(cluster.ops)
    reads: list[tuple[tuple[int, int], int | tuple[Hashable, ...]]] = []
    readers: list[tuple[tuple[int, int], int, int]] = []
    for j, i in enumerate(cluster.ops):
        op = graph.ops[i]
        for k, o in enumerate(op.operands):
            if isinstance(o, Constant) or o in graph.free:
                continue
            p = graph.producer.get(o)
            if p is None:
                if o not in cluster.inputs:
                    reads.append(((j, k), ("input", graph.avals[o].shape, graph.avals[o].dtype, marks.get(o))))
            elif p not in mine:
                reads.append(((j, k), cluster_of[p]))
        for r, value in enumerate(op.results):
            for u, k in graph.uses.get(value, ()):
                if u not in mine and u in cluster_of:
                    readers.append(((j, r), cluster_of[u], k))
    return reads, readers
