"""What of a program does not depend on the mesh: its rules, fusion charges, clusters and their fold."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar import costs
from autopar.costs import Charges
from autopar.intraop.clusters import Cluster, find_clusters, is_elementwise
from autopar.intraop.fold import Folded, fold, unfolded
from autopar.intraop.labels import Pieces
from autopar.intraop.restrict import Limits, limits_of
from autopar.ir.graph import ROOT, Graph
from autopar.ir.restriction import Restriction
from autopar.ir.rule import ShardingRule
from autopar.ir.same import Memo


@dataclass(frozen=True, eq=False)
class Shape:
    """What of a program does not depend on the mesh: rules, fusion charges, clusters and their fold.

    `carried` pairs input and output positions of one piece of state; `limits` says which choices a restriction leaves. `flight` is how many
    microbatches a pipeline stage has in flight, each of which keeps what backward reads of forward; `streamed` are the values that come
    to it or leave it microbatch by microbatch, and never stand there whole, with the seconds that each byte of one device takes on its way.
    """

    graph: Graph
    rules: tuple[ShardingRule, ...]
    carried: tuple[tuple[int, int], ...]
    charges: Charges
    clusters: tuple[Cluster, ...]
    folded: Folded
    donated: bool = True
    limits: Limits | None = None
    flight: int = 1
    streamed: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def memo(self) -> Memo:
        """What was found out about it."""
        return Memo()

    @cached_property
    def kept(self) -> frozenset[int]:
        """The values that each microbatch in flight keeps: made in its forward, or come from another stage, and read in its backward."""
        if self.flight == 1:
            return frozenset()
        late = {o for op in self.graph.ops if op.phase == "backward" and op.region != ROOT for o in op.inputs}
        early = (op for op in self.graph.ops if (op.phase == "forward" and op.region != ROOT) or op.primitive == "loop_slice")
        return frozenset(r for op in early for r in op.results if r in late) - self.graph.free

    @cached_property
    def cluster_of(self) -> dict[int, int]:
        """Op index -> cluster; ops that depend on no input have none."""
        return {i: c for c, cluster in enumerate(self.clusters) for i in cluster.ops}

    @cached_property
    def member_input(self) -> dict[int, tuple[int, int]]:
        """Input value that lies with a cluster -> (cluster, position among its inputs)."""
        return {v: (c, n) for c, cluster in enumerate(self.clusters) for n, v in enumerate(cluster.inputs)}

    @cached_property
    def position(self) -> dict[int, int]:
        """Op index -> its position in its cluster."""
        return {i: j for cluster in self.clusters for j, i in enumerate(cluster.ops)}


def shape_of(
    graph: Graph,
    rules: Sequence[ShardingRule],
    carried: Sequence[tuple[int, int]],
    pinned: Mapping[int, Hashable] | None = None,
    folding: bool = True,
    donated: bool = True,
    restriction: Restriction | None = None,
    batch: Sequence[int] | None = None,
    flight: int = 1,
    known: Mapping[int, tuple[Pieces, ...]] | None = None,
    streamed: Mapping[int, float] | None = None,
) -> Shape:
    """Cluster and fold a graph. `pinned` marks graph inputs that must not be folded with others, by value; `batch` are the positions of
    inputs that hold the batch, where they are told; `flight`, `known` and `streamed` are those of a pipeline stage."""
    charges = costs.fusion_charges(graph, [is_elementwise(r) for r in rules])
    clusters = find_clusters(graph, rules, carried, frozenset(v for v, pin in (pinned or {}).items() if pin))
    tied = {i: o for i, o in carried}
    limits = limits_of(restriction, graph, rules, carried, batch, known)
    counted = limits.labels.dims if limits else ()
    marks: dict[int, Hashable] = {v: (n in tied, (pinned or {}).get(v), counted and counted[v]) for n, v in enumerate(graph.inputs)}
    folded = fold(graph, clusters, charges, marks, tags=limits.tag if limits else None) if folding else unfolded(clusters)
    return Shape(graph, tuple(rules), tuple(carried), charges, clusters, folded, donated, limits, flight, streamed or {})
