"""The collectives that an op itself contains under a strategy, beside those that bring its operands.

They are data, from which prices, plans and emission read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.dtypes import itemsize
from autopar.ir.graph import Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import Axes
from autopar.ir.strategy import Strategy

_KINDS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "permute",
}


@dataclass(frozen=True, slots=True)
class Inside:
    """One collective of an op's own: `nbytes` is its operand's on one device, `times` how often it runs when the op runs once."""

    kind: str
    axes: Axes
    nbytes: int
    dtype: str
    times: int = 1


def inside(op: Op, rule: ShardingRule, strategy: Strategy, operands: Sequence[Aval], mesh: LogicalMesh) -> tuple[Inside, ...]:
    """The collectives of an op of its own, in the order in which its lowering runs them. `operands` are whole."""
    if not strategy.cuts:
        return ()
    if rule.manual:
        return tuple(_written(op.subgraphs, set(own_axes(op, strategy, mesh)), 1))
    return ()


def own_axes(op: Op, strategy: Strategy, mesh: LogicalMesh) -> Axes:
    """The axes of a `shard_map` that are those of the mesh under a strategy: the ones that it cuts, and ones that no spec names."""
    if not strategy.cuts:
        return ()
    named = {a for dims in (*op.param("in_dims"), *op.param("out_dims")) for d in dims for a in d}
    there = [a for a, n in op.param("axis_sizes") if n > 1 and mesh.by_name.get(a) == n]
    return tuple(a for a in there if strategy.axes(a) or a not in named)


def numbered(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> Mapping[int, tuple[tuple[str, Inside], ...]]:
    """Op -> its own collectives with their ids, which follow those of the plan's moves."""
    found: dict[int, tuple[tuple[str, Inside], ...]] = {}
    count = sum(bool(m.id) for m in plan.moves)
    for i, (op, strategy) in enumerate(zip(graph.ops, plan.strategies, strict=True)):
        mine = inside(op, rules[i], strategy, [graph.aval(o) for o in op.operands], plan.mesh) if strategy.cuts else ()
        if mine:
            found[i] = tuple((f"c{count + n}", c) for n, c in enumerate(mine))
            count += len(mine)
    return found


def _written(graphs: Sequence[Graph], axes: set[str], times: int) -> Iterator[Inside]:
    """The collectives over some of `axes` that stand in the body of a region."""
    for graph in graphs:
        for op, runs in zip(graph.ops, graph.times, strict=True):
            over = tuple(a for a in _axes(op) if a in axes)
            if over and op.primitive in _KINDS:
                for aval in map(graph.aval, op.operands):
                    yield Inside(_KINDS[op.primitive], over, aval.size * itemsize(aval.dtype), aval.dtype, times * runs)
            yield from _written(op.subgraphs, axes, times * runs * (op.param("length") or 1))


def _axes(op: Op) -> tuple[Any, ...]:
    named = op.param("axes") if op.primitive in ("psum", "pmax", "pmin") else op.param("axis_name")
    return named if isinstance(named, tuple) else (named,)
