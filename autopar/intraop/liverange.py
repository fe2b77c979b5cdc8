"""What a compiled program holds at its peak: live ranges over the planned program, with each backend's rules of what gets a buffer.

A compiler keeps few of a program's values. Element-wise chains are made again from what is there where they are read; what a backend has
written to memory all the same is data, `BACKENDS`. Found by reading the buffers of programs compiled for TPU v5e and H100 (docs/costs.md);
`benchmarks.memory` holds them against both compilers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.costs import is_fusible, is_reduction
from autopar.intraop.clusters import is_elementwise
from autopar.intraop.connect import made, needs
from autopar.ir.graph import BOUNDARY, MATMULS, Graph, Op
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding

Form = tuple[int, TensorSharding, int]
"""A value as it lies somewhere: its number, sharding, and generation."""

_COSTLY = frozenset({"tanh", "erf", "logistic", "erfc", "erf_inv"})
_RENAMES = frozenset({"reshape", "squeeze", "expand_dims", "bitcast_convert_type", "stop_gradient", "copy"})
_SAME = frozenset({"loop_carry", "loop_exit", "loop_read"})
"""Borders of loops whose result is their operand's buffer."""


@dataclass(frozen=True)
class Backend:
    """Which values get a buffer of their own, beyond the results of matmuls, reductions, gathers, collectives and loops.

    `operands`: what matmuls read. `costly`: hyperbolic and error functions with several readers. `several`: anything with several readers.
    `packing`: bytes allocated for each that is live.
    """

    operands: bool
    costly: bool
    several: bool
    packing: float


BACKENDS: Mapping[str, Backend] = {
    "tpu": Backend(operands=False, costly=False, several=False, packing=1.12),
    "gpu": Backend(operands=True, costly=True, several=False, packing=1.02),
    "cpu": Backend(operands=True, costly=True, several=True, packing=1.0),
}
"""Packing: temporaries over their live bytes had a median of 1.12 on TPU and 1.00 to 1.02 on GPU."""


class Buffer(NamedTuple):
    """Memory of one device from op `start` to op `stop`, both counted in."""

    start: int
    stop: int
    nbytes: int


def live_bytes(
    graph: Graph,
    rules: Sequence[ShardingRule],
    plan: ShardingPlan,
    carried: Sequence[tuple[int, int]],
    backend: str,
    as_written: bool = False,
) -> int:
    """Bytes of temporaries at the peak on one device: all that is neither an argument nor written over one.

    `carried` pairs the positions of donated inputs with those of the outputs that take their place.
    """
    return int(most_at_once(buffers(graph, rules, plan, carried, backend, as_written)) * BACKENDS[backend].packing)


def buffers(
    graph: Graph,
    rules: Sequence[ShardingRule],
    plan: ShardingPlan,
    carried: Sequence[tuple[int, int]],
    backend: str,
    as_written: bool = False,
) -> tuple[Buffer, ...]:
    """The temporaries that `live_bytes` counts."""
    program = _Program(graph, rules, plan, frozenset(o for _, o in carried), BACKENDS[backend], as_written)
    return tuple(Buffer(start, max(stop, start), program.nbytes(form)) for form, start, stop in program.intervals())


def most_at_once(found: Iterable[Buffer]) -> int:
    """The largest sum of live bytes over the program."""
    change: dict[int, int] = {}
    for start, stop, nbytes in found:
        change[start] = change.get(start, 0) + nbytes
        change[stop + 1] = change.get(stop + 1, 0) - nbytes
    return max(accumulate(change[i] for i in sorted(change)), default=0)


def _is_outer(op: Op) -> bool:
    """Whether a matmul sums over nothing: compilers make it a product of broadcasts."""
    return op.primitive == "dot_general" and not op.param("dimension_numbers")[0][0]


@dataclass
class _Program:
    """The forms of a planned program: where each is made, and up to where it is read."""

    graph: Graph
    rules: Sequence[ShardingRule]
    plan: ShardingPlan
    replaced: frozenset[int]
    backend: Backend
    as_written: bool
    last: dict[Form, int] = field(default_factory=dict)

    @cached_property
    def origin(self) -> dict[int, TensorSharding]:
        """Value -> the sharding in which it is made."""
        return made(self.graph, self.rules, self.plan.strategies, self.plan.inputs)

    @cached_property
    def readers(self) -> dict[Form, list[int]]:
        """Form -> the ops that read it; the end of the program for outputs that take no input's place."""
        found: dict[Form, list[int]] = {}
        for value, uses in needs(self.graph, self.rules, self.plan.strategies, self.plan.outputs).items():
            for i, k, sharding in uses:
                if i >= len(self.graph.ops) and k in self.replaced:
                    i = self.graph.producer.get(value, 0)
                found.setdefault((value, sharding, self.plan.generation(i, k)), []).append(i)
        return found

    @cached_property
    def fusible(self) -> list[bool]:
        """Whether each op is one that compilers fuse into its readers."""
        ops = zip(self.graph.ops, self.rules, strict=True)
        return [is_fusible(op, is_elementwise(rule)) or op.primitive in _RENAMES or _is_outer(op) for op, rule in ops]

    @cached_property
    def kernels(self) -> tuple[frozenset[int], frozenset[int]]:
        """What the kernels of matmuls and reductions write, and what they make on the way: single readers' work on a result is done in
        the same kernel, as far as that does not make it larger."""
        written: set[int] = set()
        passed: set[int] = set()
        for i, op in enumerate(self.graph.ops):
            if (op.primitive not in MATMULS and not is_reduction(op)) or _is_outer(op):
                continue
            chain = self._chain(op.results[0], i)
            smallest = min(chain, key=lambda v: (self.graph.avals[v].nbytes, -chain.index(v)))
            written.add(smallest)
            passed.update(chain[: chain.index(smallest)])
        return frozenset(written), frozenset(passed)

    def _chain(self, value: int, made: int) -> list[int]:
        """A value, and what single readers make of it, one after the other."""
        chain = [value]
        while True:
            uses = self.graph.uses.get(chain[-1], ())
            if len(uses) != 1 or chain[-1] in self._moved or uses[0][0] >= len(self.graph.ops) or not self.fusible[uses[0][0]]:
                return chain
            op = self.graph.ops[uses[0][0]]
            if op.phase != self.graph.ops[made].phase or self.graph.avals[op.results[0]].size != self.graph.avals[value].size:
                return chain
            chain.append(op.results[0])

    @cached_property
    def _moved(self) -> frozenset[int]:
        """Values that some collective takes as they are."""
        return frozenset(m.value for m in self.plan.moves if m.move.communicates)

    @cached_property
    def virtual(self) -> frozenset[int]:
        """Values that are never written: readers make them from what is."""
        outputs = self.graph.output_values
        written, passed = self.kernels
        found = set(self.graph.free) | passed
        for i, op in enumerate(self.graph.ops):
            if self.fusible[i] and len(op.results) == 1 and op.results[0] not in outputs and not self._written(op):
                found.add(op.results[0])
            elif op.primitive in _SAME:
                found.update(op.results)
        return frozenset(found - written - set(self.graph.inputs))

    @cached_property
    def going_round(self) -> frozenset[int]:
        """Values that a loop writes over those that it carried before."""
        going = (self.graph.ops[j].operands[0] for _, j in self.graph.goes_round)
        return frozenset(o for o in going if isinstance(o, int))

    def _written(self, op: Op) -> bool:
        """Whether a fusible op's result is written to memory all the same."""
        result = op.results[0]
        readers = [self.graph.ops[u] for u, _ in self.graph.uses.get(result, ()) if u < len(self.graph.ops)]
        if result in self._moved or any(r.primitive in BOUNDARY or r.subgraphs or r.primitive in ("gather", "sort") for r in readers):
            return True
        if op.primitive in _RENAMES:
            return False
        if self.backend.operands and any(r.primitive in MATMULS and not _is_outer(r) for r in readers):
            return True
        several = len(readers) > 1
        if several and (self.backend.several or (self.backend.costly and op.primitive in _COSTLY)):
            return True
        roots = [o for o in op.inputs if o not in self.graph.free and self.graph.avals[o].nbytes * 2 >= self.graph.avals[result].nbytes]
        joins = len([o for o in roots if o in self.graph.producer]) > 1
        later = [r for r in readers if r.primitive not in MATMULS and not is_reduction(r)]
        return several and joins and bool(later)

    def nbytes(self, form: Form) -> int:
        """Bytes of a form on one device."""
        value, sharding, _ = form
        return sharding.local_bytes(self.graph.avals[value], self.plan.mesh, self.as_written)

    def intervals(self) -> list[tuple[Form, int, int]]:
        """Forms that are written, with the ops at which they are made and last read. Later values first: readers of what is not written
        read what it is made of."""
        found: list[tuple[Form, int, int]] = []
        for value in sorted(self.origin, reverse=True):
            p = self.graph.producer.get(value)
            for m in reversed(self.plan.moves_of.get(value, ())):
                self._move(m, p, found)
            form = (value, self.origin[value], 0)
            stop = self._last(form)
            if p is None or stop < 0:
                continue
            if value not in self.virtual:
                if value in self.going_round:
                    self._pass_on(p, p)
                    continue
                found.append((form, p + self._in_place(p, stop), stop))
                stop = p
            self._pass_on(p, stop)
        return found

    def _move(self, m: PlannedMove, p: int | None, found: list[tuple[Form, int, int]]) -> None:
        """A converted form: written if it comes from other devices, and read from its source where it is first needed."""
        form, source = (m.value, m.target, m.generation), (m.value, m.source, m.source_generation)
        stop = self._last(form)
        if stop < 0:
            return
        readers = self.readers.get(form, [stop])
        grows = self.nbytes(form) >= self.nbytes(source)
        start = min(readers) if grows or p is None else p
        if m.move.communicates:
            found.append((form, start, stop))
            stop = start
        self.last[source] = max(self.last.get(source, -1), stop)

    def _last(self, form: Form) -> int:
        """Where a form is last read."""
        reached = [self.graph.reach(form[0], i)[1] for i in self.readers.get(form, ()) if not self._lazy(i)]
        return max(self.last.get(form, -1), *reached, -1) if reached else self.last.get(form, -1)

    def _lazy(self, i: int) -> bool:
        """Whether op i only describes its result."""
        return i < len(self.graph.ops) and all(r in self.virtual for r in self.graph.ops[i].results)

    def _pass_on(self, i: int, stop: int) -> None:
        """What op i reads is read up to `stop`, if op i runs there."""
        op, rule, strategy = self.graph.ops[i], self.rules[i], self.plan.strategies[i]
        for k, o in enumerate(op.operands):
            if isinstance(o, int):
                form = (o, operand_sharding(rule, strategy, k), self.plan.generation(i, k))
                self.last[form] = max(self.last.get(form, -1), self.graph.reach(o, stop)[1])

    def _in_place(self, i: int, stop: int) -> bool:
        """Whether op i writes over an operand that dies there: the result counts from the next op on."""
        op = self.graph.ops[i]
        return stop > i and (self.fusible[i] or "scatter" in op.primitive or op.primitive == "dynamic_update_slice")
