"""Sizes, FLOPs and fusion of IR objects, and their price in seconds on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import log2, prod
from typing import Any

from autopar.ir.dtypes import itemsize
from autopar.ir.graph import BOUNDARY, GATE, MATMULS, Aval, Constant, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.same import Memo
from autopar.ir.sharding import Move, TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding
from autopar.rules.inside import Inside, inside
from cost_models import Shape

# Ops that move only the part of their operand that they touch: positions of operands whose whole size is not read.
_TOUCHED = {"gather": (0,), "dynamic_slice": (0,), "dynamic_update_slice": (0,), "scatter-add": (0,), "scatter": (0,), "scatter_add": (0,)}
_TOUCHED |= {"loop_slice": (0,)}
_KERNELS = frozenset({"jit", "pjit", "pallas_call"})
"""Ops that are kept closed: one kernel, whatever is in it."""
_TRANSCENDENTAL = frozenset("exp exp2 log log1p log2 expm1 tanh logistic erf erf_inv erfc pow sin cos tan cbrt lgamma".split())
_SHAPE_ONLY = frozenset({"reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy", "stop_gradient", "optimization_barrier"})
_SHAPE_ONLY |= BOUNDARY | {GATE}
_PASSED_ON = BOUNDARY - {"loop_slice", "loop_stack"}
_FUSED_SHAPES = frozenset(
    {"broadcast_in_dim", "iota", "transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "select_n"}
)
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin", "reduce_precision"}
)
_NOT_FUSED = frozenset({"dot_general", "conv_general_dilated", "gather", "scatter-add", "sort", "cumsum", "concatenate", "top_k"})


def flops(op: Op, operands: Sequence[Aval], results: Sequence[Aval]) -> float:
    """Floating-point operations of an op on whole arrays; 2 per multiply-add, bodies of loops times their length."""
    if op.subgraphs:
        inner = sum(graph_flops(g) for g in op.subgraphs)
        return inner * (op.param("length") or op.param("parts") or 1)
    if op.primitive == "dot_general":
        (contract, _), _ = op.param("dimension_numbers")
        return 2.0 * results[0].size * prod(operands[0].shape[d] for d in contract)
    if op.primitive == "conv_general_dilated":
        return 2.0 * results[0].size * _kernel_size(op, operands[1])
    if op.primitive in _SHAPE_ONLY or op.primitive in ("broadcast_in_dim", "transpose", "slice", "concatenate", "pad", "iota", "rev"):
        return 0.0
    if op.primitive == "sort":
        n = operands[0].size
        return n * max(1.0, log2(max(2, operands[0].shape[op.param("dimension", -1)])))
    weight = 8.0 if op.primitive in _TRANSCENDENTAL else 1.0
    return weight * max((a.size for a in (*operands, *results)), default=0)


def is_matmul(op: Op) -> bool:
    """Whether an op multiplies matrices, itself or in the body that it keeps closed."""
    return op.primitive in MATMULS or any(is_matmul(inner) for graph in op.subgraphs for inner in graph.ops)


def _kernel_size(op: Op, kernel: Aval) -> int:
    """Multiply-adds per output element of a convolution."""
    numbers = dict(op.param("dimension_numbers"))
    out_feature = numbers["rhs_spec"][0]
    return prod(n for d, n in enumerate(kernel.shape) if d != out_feature)


def matmul_shape(op: Op, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Shape | None:
    """A matmul's or convolution's local shapes as `batch` times `(m k), (k n) -> (m n)`; None for other ops and ragged batches.

    A convolution is the matmul that libraries make of it: output pixels by output features by kernel elements, a batch for each group.
    """
    if op.primitive == "dot_general":
        (contract, _), (batch, _) = op.param("dimension_numbers")
        lhs, rhs = operands[0], operands[1]
        b, k = prod(lhs[d] for d in batch), prod(lhs[d] for d in contract)
        return Shape(b, prod(lhs) // max(b * k, 1), prod(rhs) // max(b * k, 1), k)
    if op.primitive == "conv_general_dilated":
        numbers = dict(op.param("dimension_numbers"))
        lhs_spec, rhs_spec = numbers["lhs_spec"], numbers["rhs_spec"]
        features = operands[1][rhs_spec[0]]
        groups = max(1, operands[0][lhs_spec[1]] // max(1, operands[1][rhs_spec[1]]))
        pixels, window = prod(results[0]) // max(1, features), prod(operands[1]) // max(1, features)
        return Shape(groups, pixels, max(1, features // groups), window)
    if op.primitive == "ragged_dot":
        return Shape(1, operands[0][0], operands[1][2], operands[0][1])
    return None


def graph_flops(graph: Graph) -> float:
    """FLOPs of all ops of a graph, those of loop bodies as often as they run."""
    work = (flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results]) for op in graph.ops)
    return sum(n * w for n, w in zip(graph.times, work, strict=True))


def is_fusible(op: Op, elementwise: bool) -> bool:
    """Whether a compiler fuses this op with its neighbours: element-wise ops, broadcasts, casts, cheap shape changes."""
    opaque = op.primitive in _NOT_FUSED or op.primitive in BOUNDARY or op.subgraphs
    return (elementwise or op.primitive in _FUSED_SHAPES) and not opaque


def is_reduction(op: Op) -> bool:
    """Ops that fuse with what feeds them but not with what they feed."""
    return op.primitive in _REDUCTIONS


@dataclass(frozen=True)
class Charges:
    """What of each op is read from and written to memory: operand and result positions, per op index.

    A fusion group pays once for each value that enters it (at the op that reads it first) and once for each that leaves it. `heads` are the
    ops with which a kernel begins, `launches` how often one is launched per step.
    """

    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    launches: int = 0
    heads: frozenset[int] = frozenset()


def fusion_charges(graph: Graph, elementwise: Sequence[bool]) -> Charges:
    """Partition the ops into fusion groups, and charge each group's border.

    The partition is fixed before anything is chosen, so that every formulation pays the same.
    """
    parent = list(range(len(graph.ops)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    fusible = [is_fusible(op, e) for op, e in zip(graph.ops, elementwise, strict=True)]
    level = _levels(graph, fusible)
    for i, op in enumerate(graph.ops):
        if fusible[i] or is_reduction(op):
            for o in op.inputs:
                p = graph.producer.get(o)
                if p is None or not fusible[p] or level[p] != level[i]:
                    continue
                if (graph.ops[p].phase, graph.ops[p].region) == (op.phase, op.region):
                    parent[find(i)] = find(p)
    groups = tuple(find(i) for i in range(len(graph.ops)))
    reads, writes = [], []
    entered: set[tuple[int, int]] = set()
    for i, op in enumerate(graph.ops):
        mine = []
        for k, operand in enumerate(op.operands):
            if isinstance(operand, Constant) or operand in graph.free or (groups[i], operand) in entered:
                continue
            p = graph.producer.get(operand)
            if p is None or groups[p] != groups[i] or not fusible[p]:
                entered.add((groups[i], operand))
                mine.append(k)
        reads.append(tuple(mine))
        writes.append(tuple(k for k, r in enumerate(op.results) if _leaves(graph, r, groups, i, fusible)))
    heads = frozenset(i for i in groups if graph.ops[i].primitive not in _PASSED_ON)
    return Charges(tuple(reads), tuple(writes), groups, sum(graph.times[i] for i in heads), heads)


def _levels(graph: Graph, fusible: Sequence[bool]) -> list[int]:
    """Ops that may be in one fusion by what lies between them: the longest way to each, counted in ops that do not fuse.

    What two ops of one level have between them is of that level too, so no fusion waits for itself. An op that only spreads or casts one
    value belongs to its first reader, where a compiler writes it anew rather than keep it.
    """
    level = [0] * len(graph.ops)
    for i, op in enumerate(graph.ops):
        for o in op.inputs:
            p = graph.producer.get(o)
            if p is not None:
                level[i] = max(level[i], level[p] + (not (fusible[p] and fusible[i] or fusible[p] and is_reduction(op))))
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        readers = [u for r in op.results for u, _ in graph.uses.get(r, ())]
        large = [o for o in op.inputs if o not in graph.free and graph.avals[o].size > 1]
        if fusible[i] and len(large) <= 1 and readers and all(fusible[u] or is_reduction(graph.ops[u]) for u in readers):
            level[i] = max(level[i], min(level[u] for u in readers))
    return level


def _leaves(graph: Graph, value: int, groups: Sequence[int], i: int, fusible: Sequence[bool]) -> bool:
    if value in graph.free or value in graph.fixed_inside:
        return False
    if not fusible[i] or value in graph.output_values:
        return True
    return any(groups[u] != groups[i] for u, _ in graph.uses.get(value, ()))


@lru_cache(maxsize=8)
def pricer_of(cluster: Any, mesh: LogicalMesh, as_written: bool = False) -> Pricer:
    """The prices on a logical mesh of a cluster, with what was found out when they were last asked for."""
    return Pricer(cluster, mesh, as_written)


@dataclass(frozen=True, eq=False)
class Pricer:
    """Prices on one logical mesh of one cluster, in seconds. `cluster` is a `cost_models.Cluster`."""

    cluster: Any
    mesh: LogicalMesh
    as_written: bool = False

    @cached_property
    def memo(self) -> Memo:
        """What was found out about ops and values on this mesh."""
        return Memo()

    @cached_property
    def _moves(self) -> dict[Any, float]:
        return {}

    def move(self, move: Move, source: TensorSharding, aval: Aval) -> float:
        """Seconds of one conversion step of a value that lies as `source`: the collective, or a local copy."""
        key = (move, source, aval)
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = self._move(move, source, aval)
        return found

    def _move(self, move: Move, source: TensorSharding, aval: Aval) -> float:
        nbytes = source.local_bytes(aval, self.mesh, self.as_written)
        if move.communicates:
            return self.cluster.collective_seconds(move.kind, nbytes, self.mesh.groups(move.axes))
        if move.kind == "to_partial":
            return _PARTIAL_SECONDS
        target = move.apply(source).local_bytes(aval, self.mesh, self.as_written)
        return self.cluster.compute_seconds(0.0, 2 * target, aval.dtype, False) * _SLICE_SHARE

    def move_bytes(self, source: TensorSharding, aval: Aval) -> int:
        """Bytes of a collective's operand on one device."""
        return source.local_bytes(aval, self.mesh, self.as_written)

    def op(
        self,
        op: Op,
        rule: ShardingRule,
        strategy: Strategy,
        operands: Sequence[Aval],
        results: Sequence[Aval],
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> float:
        """Seconds of one op on its local shapes, reading and writing the charged operands and results, its own collectives included."""
        if op.primitive in _PASSED_ON:
            return 0.0
        return self._work(op, rule, strategy, operands, results, reads, writes) + self.inside(op, rule, strategy, operands)

    def inside(self, op: Op, rule: ShardingRule, strategy: Strategy, operands: Sequence[Aval]) -> float:
        """Seconds of the collectives that one op itself contains."""
        return sum(map(self.within, inside(op, rule, strategy, operands, self.mesh, self.as_written)))

    def within(self, own: Inside) -> float:
        """Seconds of one collective of an op's own, as often as it runs."""
        return own.times * float(self.cluster.collective_seconds(own.kind, own.nbytes, self.mesh.groups(own.axes)))

    def _work(
        self,
        op: Op,
        rule: ShardingRule,
        strategy: Strategy,
        operands: Sequence[Aval],
        results: Sequence[Aval],
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> float:
        divisor = self.mesh.size(a for _, axes in strategy.cuts for a in axes)
        touched = _TOUCHED.get(op.primitive, ())
        nbytes = sum(
            operand_sharding(rule, strategy, k).local_bytes(operands[k], self.mesh, self.as_written) for k in reads if k not in touched
        )
        written = [result_sharding(rule, strategy, k).local_bytes(results[k], self.mesh, self.as_written) for k in writes]
        nbytes += sum(written) * (2 if touched else 1)
        if op.primitive in ("scatter-add", "scatter", "scatter_add", "dynamic_update_slice"):
            nbytes = sum(written) + 2 * sum(
                operand_sharding(rule, strategy, k).local_bytes(operands[k], self.mesh, self.as_written) for k in reads if k not in touched
            )
        if op.primitive == "loop_stack":
            nbytes = 2 * operand_sharding(rule, strategy, 0).local_bytes(operands[0], self.mesh, self.as_written)
        dtype = operands[0].dtype if operands else results[0].dtype if results else "float32"
        work = flops(op, operands, results) / divisor
        if not is_matmul(op):
            return self.cluster.compute_seconds(work, nbytes, dtype, False)
        if op.primitive in _KERNELS:
            return self.cluster.fused_seconds(work, nbytes, dtype)
        return self.cluster.compute_seconds(work, nbytes, dtype, True, self._shape(op, rule, strategy, operands, results))

    def _shape(self, op: Op, rule: ShardingRule, strategy: Strategy, operands: Sequence[Aval], results: Sequence[Aval]) -> Shape | None:
        """The local matmul, for devices on which its shape counts."""
        if self.cluster.device.tiling is None:
            return None
        here = [operand_sharding(rule, strategy, k).local_shape(a.shape, self.mesh) for k, a in enumerate(operands[:2])]
        there = [result_sharding(rule, strategy, k).local_shape(a.shape, self.mesh) for k, a in enumerate(results[:1])]
        return matmul_shape(op, here, there)

    def memory_seconds(self, nbytes: float, work: float, dtype: str) -> float:
        """Seconds of memory-bound work: bytes moved, and vector FLOPs."""
        return self.cluster.compute_seconds(work, nbytes, dtype, False)


# Slices of a value that is there anyway are mostly fused into what uses them; a share of the copy keeps ties honest.
_SLICE_SHARE = 0.25
# Making a replicated value partial is a fused select; its token price says: not without need.
_PARTIAL_SECONDS = 1e-9


@cache
def bytes_of(aval: Aval) -> int:
    """Bytes of a whole value."""
    return aval.size * itemsize(aval.dtype)


def summary(graph: Graph) -> Mapping[str, float]:
    """FLOPs by primitive, largest first."""
    found: dict[str, float] = {}
    for op, times in zip(graph.ops, graph.times, strict=True):
        work = times * flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results])
        found[op.primitive] = found.get(op.primitive, 0.0) + work
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))
