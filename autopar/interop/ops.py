"""A program as arrays, which is all that finding layers needs of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar import costs
from autopar.intraop.connect import fed_by_state
from autopar.ir.graph import Constant, Graph, Phase
from autopar.ir.problem import Floats, Ints


@dataclass(frozen=True, eq=False)
class Ops:
    """Ops in program order over values.

    Per op: `phase`, `cost` (FLOPs or seconds), `classes` (equal for ops that do the same to equal shapes), `reads`, the values that it
    reads, and `joined`, whether it must stand in one layer with the forward op before it, as inside a loop. Per value: `made`, the op
    that makes it or -1 for inputs, and `nbytes`, 0 for what each stage has or makes by itself: inputs, state, what follows from it, masks.
    `weights` are the bytes of state and of what follows from it and constants alone, 0 for all else.
    """

    phase: tuple[Phase, ...]
    cost: Floats
    classes: Ints
    reads: tuple[tuple[int, ...], ...]
    joined: tuple[bool, ...]
    made: Ints
    nbytes: Floats
    weights: Floats

    @property
    def forward(self) -> Ints:
        """The forward ops, in order."""
        return np.array([i for i, phase in enumerate(self.phase) if phase == "forward"], np.int64)

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """The values that each op makes."""
        found: list[list[int]] = [[] for _ in self.phase]
        for value in np.flatnonzero(self.made >= 0):
            found[self.made[value]].append(int(value))
        return tuple(map(tuple, found))


def ops_of(graph: Graph, carried: Sequence[tuple[int, int]]) -> Ops:
    """The arrays of a graph, with FLOPs as costs. `carried` pairs input and output positions of one piece of state."""
    sizes = np.array([float(aval.nbytes) for aval in graph.avals])
    inputs = frozenset(graph.inputs)
    known = fed_by_state(graph, carried)
    fixed = known | graph.free | inputs
    state = {graph.inputs[i] for i, _ in carried}
    for op in graph.ops:
        if not state.isdisjoint(op.inputs):
            state.update(known.intersection(op.results))
    work = [costs.flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results]) for op in graph.ops]
    made = np.full(len(graph.avals), -1)
    for value, i in graph.producer.items():
        made[value] = i
    inside = {i for first, last in graph.spans.values() for i in range(first + 1, last + 1)}
    return Ops(
        tuple(op.phase for op in graph.ops),
        np.array(work, float) * np.array(graph.times, float),
        _classes(graph),
        tuple(op.inputs for op in graph.ops),
        tuple(i in inside for i in range(len(graph.ops))),
        made,
        np.where([v in fixed for v in range(len(sizes))], 0.0, sizes),
        np.where([v in state for v in range(len(sizes))], sizes, 0.0),
    )


def _classes(graph: Graph) -> Ints:
    """A number for each op's signature: what it does, to which shapes, how often."""
    numbers: dict[Hashable, int] = {}
    outputs = graph.output_values
    found = []
    for i, op in enumerate(graph.ops):
        operands = tuple((o.text, o.aval) if isinstance(o, Constant) else graph.avals[o] for o in op.operands)
        results = tuple((graph.avals[r], r in outputs) for r in op.results)
        key = (op.primitive, repr(op.params), operands, results, op.phase, op.again, graph.times[i])
        found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, np.int64)
