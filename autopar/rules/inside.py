"""The collectives that an op itself contains under a strategy, beside those that bring its operands.

They are data, from which prices, plans and emission read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autopar.ir.dtypes import itemsize
from autopar.ir.graph import ROOT, Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import Method, ShardingRule
from autopar.ir.sharding import Axes
from autopar.ir.strategy import Strategy, dim_axes, operand_sharding
from autopar.rules.halo import RETURNING, filler, moved, reaches

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
    """One collective of an op's own: `nbytes` is its operand's on one device, `times` how often it runs when the op runs once.

    `border` says which part of an operand it moves, where another op that reads this operand may need the same.
    """

    kind: str
    axes: Axes
    nbytes: int
    dtype: str
    times: int = 1
    border: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """A collective of an op's own with its id. `shared`: an earlier op has it too, and it runs there alone."""

    id: str
    inside: Inside
    shared: bool = False


def inside(
    op: Op, rule: ShardingRule, strategy: Strategy, operands: Sequence[Aval], mesh: LogicalMesh, as_written: bool = False
) -> tuple[Inside, ...]:
    """The collectives of an op of its own, in the order in which its lowering runs them. `operands` are whole."""
    if not strategy.cuts:
        return ()
    if rule.manual:
        return tuple(_written(op.subgraphs, set(own_axes(op, strategy, mesh)), 1))
    methods = {rule.method[f] for f, axes in strategy.cuts if axes}
    return tuple(c for m in methods & _OF_METHOD.keys() for c in _OF_METHOD[m](_Cut(op, rule, strategy, operands, mesh, as_written)))


@dataclass(frozen=True)
class _Cut:
    """An op cut by a method of its own."""

    op: Op
    rule: ShardingRule
    strategy: Strategy
    operands: Sequence[Aval]
    mesh: LogicalMesh
    as_written: bool

    def shape(self, k: int) -> list[int]:
        """Local shape of operand k."""
        return list(operand_sharding(self.rule, self.strategy, k).local_shape(self.operands[k].shape, self.mesh))

    def dtype(self, k: int) -> str:
        """Of operand k, as it is held: wider, where it is a partial sum of narrow floats."""
        return operand_sharding(self.rule, self.strategy, k).local_dtype(self.operands[k].dtype, self.as_written)

    def gathered(self, method: Method, dtype: str) -> Inside:
        """A gather of one element along the dimension that is cut by `method`, and of all that there is along the others."""
        (dim,) = (d for d, dim in enumerate(self.rule.operands[0]) if any(self.rule.method[f] == method for f in dim))
        size = prod(n for d, n in enumerate(self.shape(0)) if d != dim)
        return Inside("all_gather", dim_axes(self.rule.operands[0][dim], self.strategy), size * itemsize(dtype), dtype)


def _prefix(cut: _Cut) -> list[Inside]:
    """The totals of all blocks."""
    return [cut.gathered("prefix", cut.dtype(0))]


def _arg_pair(cut: _Cut) -> list[Inside]:
    """The extremes of all blocks, and their places."""
    return [cut.gathered("arg_pair", cut.dtype(0)), cut.gathered("arg_pair", str(cut.op.param("index_dtype")))]


def _halo(cut: _Cut) -> list[Inside]:
    """The borders of neighbours, dimension by dimension, first from the left; then, for some ops, what goes back to them."""
    found, k = [], moved(cut.op)
    shape, dtype = cut.shape(k), cut.dtype(k)
    before: tuple[Any, ...] = ()
    for r in reaches(cut.op, cut.rule, cut.strategy, cut.mesh):
        rest = prod(n for d, n in enumerate(shape) if d != r.dim) * itemsize(dtype)
        for side, elements in (("left", r.left), ("right", r.right)):
            for hop, n in enumerate(r.hops(elements)):
                found.append(Inside("permute", r.axes, n * rest, dtype, border=(*before, r.dim, side, hop, n)))
        shape[r.dim] += r.left + r.right
        if r.left or r.right:  # what fills the ends of this dimension is in the corners of the next one
            before = (*before, (r.dim, r.left, r.right, filler(cut.op)))
    return found + (_back(cut, shape) if cut.op.primitive in RETURNING else [])


def _back(cut: _Cut, shape: list[int]) -> list[Inside]:
    found, dtype = [], cut.dtype(0)
    for r in reversed(reaches(cut.op, cut.rule, cut.strategy, cut.mesh)):
        rest = prod(n for d, n in enumerate(shape) if d != r.dim) * itemsize(dtype)
        found += [Inside("permute", r.axes, n * rest, dtype) for side in (r.left, r.right) for n in r.hops(side)]
        shape[r.dim] = r.block
    return found


_OF_METHOD: dict[Method, Callable[[_Cut], list[Inside]]] = {"prefix": _prefix, "arg_pair": _arg_pair, "halo": _halo}


def own_axes(op: Op, strategy: Strategy, mesh: LogicalMesh) -> Axes:
    """The axes of a `shard_map` that are those of the mesh under a strategy: the ones that it cuts, and ones that no spec names."""
    if not strategy.cuts:
        return ()
    named = {a for dims in (*op.param("in_dims"), *op.param("out_dims")) for d in dims for a in d}
    there = [a for a, n in op.param("axis_sizes") if n > 1 and mesh.by_name.get(a) == n]
    return tuple(a for a in there if strategy.axes(a) or a not in named)


def numbered(
    graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, as_written: bool = False
) -> Mapping[int, tuple[Named, ...]]:
    """Op -> its own collectives with their ids, which follow those of the plan's moves.

    What two ops would bring of one form of a value is brought once: a compiler sees that it is the same.
    """
    found: dict[int, tuple[Named, ...]] = {}
    count = sum(bool(m.id) for m in plan.moves)
    borders: dict[Any, tuple[str, int]] = {}
    for i, (op, strategy) in enumerate(zip(graph.ops, plan.strategies, strict=True)):
        mine = inside(op, rules[i], strategy, [graph.aval(o) for o in op.operands], plan.mesh, as_written) if strategy.cuts else ()
        names = []
        for c in mine:
            key = _border_key(graph, rules, plan, i, c)
            name, region = borders.get(key, ("", ROOT))
            shared = bool(name) and region in (ROOT, *graph.path(op.region))
            names.append(Named(name if shared else f"c{count}", c, shared))
            count += not shared
            if key is not None and not shared:
                borders[key] = names[-1].id, op.region
        if names:
            found[i] = tuple(names)
    return found


def _border_key(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, i: int, c: Inside) -> Any:
    """Equal for collectives that bring the same."""
    if not c.border:
        return None
    k = moved(graph.ops[i])
    late = graph.ops[i].part > 1  # backward of a stage runs in another program than its forward
    return graph.ops[i].operands[k], operand_sharding(rules[i], plan.strategies[i], k), plan.generation(i, k), late, c


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
