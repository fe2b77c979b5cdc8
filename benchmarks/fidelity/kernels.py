"""The kernels of Megatron-LM in place of those that XLA writes, as far as they are known from the program's scopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autopar.costs import is_matmul
from autopar.intraop.price import value_shardings
from autopar.ir.graph import Aval, Graph
from autopar.ir.plan import PlannedMove
from autopar.ir.sharding import TensorSharding
from benchmarks.fidelity.marked import Marked
from cost_models import Cluster

ARRAYS = {
    ("core", "forward"): 2 + 2.5,
    ("core", "backward"): 3 + 2.5,
    ("mlp", "forward"): 2,
    ("mlp", "backward"): 3,
    ("norm", "forward"): 2 + 3.5,
    ("norm", "backward"): 5 + 2.5 + 3,
}
"""Arrays that Megatron-LM's kernels read and write. Softmax with scale and mask, GELU with bias: one in and one out, in backward two in.
Dropout: one in, one out and a mask of half that size, for attention a kernel of its own, for residuals one with bias and sum, which reads
two. Norms: one in and one out; in backward two in and one out, and two in once more for the gradients of scale and bias; there residuals'
gradients are added up too."""


def of_norms(graph: Graph, m: PlannedMove) -> bool:
    """Whether a move is there for a norm that is cut along `tensor`."""
    op = graph.ops[graph.producer[m.value]] if m.value in graph.producer else None
    last = op.scope.rpartition("/")[2] if op else ""
    return op is not None and op.phase != "update" and m.move.axes == ("tensor",) and (last.endswith("norm") or last.startswith("layer_"))


def where_of(scope: str) -> str:
    """`core`, `mlp` or `norm` for ops of attention's core, of the perceptron and of norms, `` for all else."""
    last = scope.rpartition("/")[2]
    return "core" if is_core(scope) else "mlp" if "mlp" in scope.split("/") else "norm" if last.endswith("norm") else ""


def is_core(scope: str) -> bool:
    """Whether an op in this scope is attention's own work, between its projections."""
    words = scope.split("/")
    return "attention" in words and not {"query", "key", "value", "out"}.intersection(words)


@dataclass(frozen=True, eq=False)
class Kernels:
    """What stands between two matmuls of a program, as kernels that read and write arrays once. Norms and residuals are whole on every
    device along `tensor` axes, unless those cut the `sequence`.
    """

    program: Marked
    cluster: Cluster
    sequence: bool

    @cached_property
    def _between(self) -> Mapping[str, tuple[int, int]]:
        """Dimensions and elements of the largest result of forward's ops in attention's core, in the perceptron, and in norms."""
        found: dict[str, tuple[int, int]] = {}
        for op in self.program.graph.ops:
            where = where_of(op.scope)
            if where and op.phase == "forward" and (is_matmul(op) or where == "norm"):
                aval = self.program.graph.avals[op.results[0]]
                found[where] = max(found.get(where, (0, 0)), (aval.ndim, aval.size), key=lambda each: each[1])
        return found

    def holds(self, i: int) -> bool:
        """Whether an op makes or takes an array that some kernel works on between two matmuls."""
        op = self.program.graph.ops[i]
        where = where_of(op.scope)
        values = op.results if is_matmul(op) else (*op.inputs, *op.results)
        sizes = {(self.program.graph.avals[v].ndim, self.program.graph.avals[v].size) for v in values}
        found = self._between.get(where) in sizes
        if is_matmul(op) or where == "core" or op.phase == "update":
            return found and op.phase != "update" and where != "norm"
        return found or self._between.get("norm") in sizes

    @cached_property
    def _norms(self) -> frozenset[int]:
        """The first op of each norm's forward, and of its backward."""
        found: dict[tuple[str, str], int] = {}
        for i, op in enumerate(self.program.graph.ops):
            if where_of(op.scope) == "norm" and op.phase != "update" and self.holds(i):
                found.setdefault((op.scope, op.phase), i)
        return frozenset(found.values())

    def seconds(self, i: int, seconds: float) -> float:
        """Seconds of an op with the kernels that begin at it; a matmul begins those on its result. Other ops between matmuls take none."""
        op, avals = self.program.graph.ops[i], self.program.graph.avals
        if not is_matmul(op) and i not in self._norms:
            return 0.0
        where = "norm" if i in self._norms else where_of(op.scope)
        v = max((*op.results, *op.inputs), key=lambda v: avals[v].size) if where == "norm" else op.results[0]
        nbytes = ARRAYS[where, op.phase] * (self._whole_bytes(avals[v]) if where == "norm" else self._cut_bytes(v))
        once = self.cluster.compute_seconds(0.0, nbytes, avals[v].dtype, False) + self.cluster.launch_seconds
        return (seconds if is_matmul(op) else 0.0) + self.program.graph.times[i] * once

    def _cut_bytes(self, value: int) -> float:
        """Bytes of a value as it is planned, on one device."""
        aval, mesh = self.program.graph.avals[value], self.program.sharding.mesh
        return self._shardings[value].local_bytes(aval, mesh, self.program.as_written)

    def _whole_bytes(self, aval: Aval) -> float:
        """Bytes of what norms work on, in 16 bits: a part of the batch, and of the sequence where that is cut."""
        cut = prod(n for name, n in self.program.sharding.mesh.by_name.items() if name != "tensor" or self.sequence)
        return 2 * aval.size / cut

    @cached_property
    def _shardings(self) -> Mapping[int, TensorSharding]:
        return value_shardings(self.program.graph, self.program.rules, self.program.sharding)
