"""Collectives of a plan that are one to the compiler because a cast between them does nothing."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from autopar.ir.dtypes import accumulation_dtype
from autopar.ir.graph import Graph, Op
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding, result_sharding

_Form = tuple[int, TensorSharding, int]
_Array = tuple[Hashable, frozenset[int]]


def merging_casts(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> set[int]:
    """The casts that make collectives of a plan one to the compiler.

    Narrow partial sums are held in float32. A cast of partial sums from bfloat16 to float32 does nothing: both values are one array, and
    collectives that move them alike are one. Where the cast takes reduced values instead, nothing is left to merge.

    Partial max and min count as one array, too: CPU compilers reduce them in float32.
    """
    arrays = _Arrays(graph, rules, plan)
    for value in graph.inputs:
        arrays.moves(value)
    for i, op in enumerate(graph.ops):
        arrays.op(i, op)
    return arrays.merging


@dataclass
class _Arrays:
    """`arrays` maps a form to the number of its local array and the casts that this array has come through; `made` maps what is done
    to arrays to the first form that it made, and the casts before.
    """

    graph: Graph
    rules: Sequence[ShardingRule]
    plan: ShardingPlan
    arrays: dict[_Form, _Array] = field(default_factory=dict)
    made: dict[Hashable, tuple[_Form, frozenset[int]]] = field(default_factory=dict)
    merging: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)

    def of(self, form: _Form) -> _Array:
        if form not in self.arrays:
            self.arrays[form] = next(self.numbers), frozenset()
        return self.arrays[form]

    def op(self, i: int, op: Op) -> None:
        """Number what an op makes, and the forms that its results are moved to."""
        rule, strategy = self.rules[i], self.plan.strategies[i]
        read = [self._read(i, k) for k in range(len(op.operands))]
        casts = frozenset(cast for _, through in read for cast in through)
        for k, r in enumerate(op.results):
            form = (r, result_sharding(rule, strategy, k), 0)
            dtype = accumulation_dtype(self.graph.avals[r].dtype)
            if form[1].partial and _casts(self.graph, op, dtype):
                self.arrays[form] = read[0][0], casts | {i}
            elif form[1].is_sum and not op.effects and not op.subgraphs:
                self._make(form, (op.primitive, op.params, strategy, dtype, k, *(n for n, _ in read)), casts)
            self.moves(r)

    def _read(self, i: int, k: int) -> _Array:
        operand = self.graph.ops[i].operands[k]
        if not isinstance(operand, int):
            return operand.text, frozenset()
        return self.of((operand, operand_sharding(self.rules[i], self.plan.strategies[i], k), self.plan.generation(i, k)))

    def moves(self, value: int) -> None:
        """Number the forms that the moves of a value make, and note the casts between collectives that are one."""
        for m in self.plan.moves_of.get(value, ()):
            if m.gate < 0:
                self._move(m)

    def _move(self, m: PlannedMove) -> None:
        number, casts = self.of((m.value, m.source, m.source_generation))
        key = (number, m.move)
        if key in self.made and m.move.communicates:
            self.merging |= casts | self.made[key][1]
        self._make((m.value, m.target, m.generation), key, casts)

    def _make(self, form: _Form, key: Hashable, casts: frozenset[int]) -> None:
        """Number a form: while partial it is the same array as what else `key` makes, else it is rounded to its own dtype."""
        first = self.made.setdefault(key, (form, casts))[0]
        if form[1].partial:
            self.arrays[form] = next(self.numbers) if first == form else self.of(first)[0], casts


def _casts(graph: Graph, op: Op, dtype: str) -> bool:
    """Whether the op casts from a dtype whose sums are held in `dtype`."""
    return op.primitive == "convert_element_type" and accumulation_dtype(graph.aval(op.operands[0]).dtype) == dtype
