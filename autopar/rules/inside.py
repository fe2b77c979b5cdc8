"""The collectives that an op itself contains under a strategy, beside those that bring its operands.

They are data, from which prices, plans and emission read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.ir.dtypes import itemsize
from autopar.ir.graph import Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import Factor, Method, ShardingRule
from autopar.ir.sharding import Axes, TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding

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


def inside(
    op: Op, rule: ShardingRule, strategy: Strategy, operands: Sequence[Aval], mesh: LogicalMesh, as_written: bool = False
) -> tuple[Inside, ...]:
    """The collectives of an op of its own, in the order in which its lowering runs them. `operands` are whole."""
    if not strategy.cuts:
        return ()
    if rule.manual:
        return tuple(_written(op.subgraphs, set(own_axes(op, strategy, mesh)), 1))
    found: list[Inside] = []
    for factor, axes in strategy.cuts:
        count = _OF_METHOD.get(rule.method[factor])
        if count is not None and axes:
            found += count(op, axes, Part(operands[0], operand_sharding(rule, strategy, 0), factor_dim(rule, factor), mesh, as_written))
    return tuple(found)


@dataclass(frozen=True)
class Part:
    """One device's part of an op's first operand, of which dimension `dim` is cut by a method of its own."""

    aval: Aval
    sharding: TensorSharding
    dim: int
    mesh: LogicalMesh
    as_written: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sharding.local_shape(self.aval.shape, self.mesh)

    @property
    def dtype(self) -> str:
        """As it is held: wider, where it is a partial sum of narrow floats."""
        return self.sharding.local_dtype(self.aval.dtype, self.as_written)

    def gathered(self, axes: Axes, dtype: str) -> Inside:
        """A gather of one element along `dim`, and all that there is along the others."""
        size = prod(n for d, n in enumerate(self.shape) if d != self.dim)
        return Inside("all_gather", axes, size * itemsize(dtype), dtype)


def factor_dim(rule: ShardingRule, factor: Factor) -> int:
    """The dimension of the first operand that has a factor."""
    return next(d for d, dim in enumerate(rule.operands[0]) if factor in dim)


def _prefix(op: Op, axes: Axes, part: Part) -> list[Inside]:
    """The totals of all blocks."""
    return [part.gathered(axes, part.dtype)]


def _arg_pair(op: Op, axes: Axes, part: Part) -> list[Inside]:
    """The extremes of all blocks, and their places."""
    return [part.gathered(axes, part.dtype), part.gathered(axes, str(op.param("index_dtype")))]


_OF_METHOD: dict[Method, Callable[[Op, Axes, Part], list[Inside]]] = {"prefix": _prefix, "arg_pair": _arg_pair}


def own_axes(op: Op, strategy: Strategy, mesh: LogicalMesh) -> Axes:
    """The axes of a `shard_map` that are those of the mesh under a strategy: the ones that it cuts, and ones that no spec names."""
    if not strategy.cuts:
        return ()
    named = {a for dims in (*op.param("in_dims"), *op.param("out_dims")) for d in dims for a in d}
    there = [a for a, n in op.param("axis_sizes") if n > 1 and mesh.by_name.get(a) == n]
    return tuple(a for a in there if strategy.axes(a) or a not in named)


def numbered(
    graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, as_written: bool = False
) -> Mapping[int, tuple[tuple[str, Inside], ...]]:
    """Op -> its own collectives with their ids, which follow those of the plan's moves."""
    found: dict[int, tuple[tuple[str, Inside], ...]] = {}
    count = sum(bool(m.id) for m in plan.moves)
    for i, (op, strategy) in enumerate(zip(graph.ops, plan.strategies, strict=True)):
        mine = inside(op, rules[i], strategy, [graph.aval(o) for o in op.operands], plan.mesh, as_written) if strategy.cuts else ()
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
