"""The predicted step, op by op: when each op and each move between shardings runs, and what one device holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.costs import Charges, Pricer
from autopar.intraop.price import op_seconds, value_shardings
from autopar.ir.graph import Constant, Graph
from autopar.ir.plan import Plan, PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding

COPIES = "local copies"
Form = tuple[int, TensorSharding, int]
"""A value, how it lies, and its generation."""


@dataclass(frozen=True)
class Span:
    """Something that runs: `start_s` after the step begins, on a `track` such as `forward` or `collectives over x`."""

    name: str
    track: str
    start_s: float
    seconds: float
    details: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Spans in order, one after the other, since all communication counts as exposed; and (seconds, bytes held by one device) points.

    The spans' seconds add up to the predicted step. Bytes are those of inputs, of values that leave a fusion, and of converted forms,
    each from where it is made to its last use.
    """

    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.spans)


@dataclass
class _Walk:
    """The program read as emission runs it: a form is made by its move just before its first use."""

    graph: Graph
    rules: Sequence[ShardingRule]
    plan: ShardingPlan
    order: list[tuple[int, PlannedMove | None]]
    first: dict[Form, int]
    last: dict[Form, int]

    def run(self) -> None:
        made = value_shardings(self.graph, self.rules, self.plan)
        moves = {(m.value, m.target, m.generation): m for m in self.plan.moves}
        for v in self.graph.inputs:
            self.first[v, made[v], 0] = -1
        for i, op in enumerate(self.graph.ops):
            for k, o in enumerate(op.operands):
                if not isinstance(o, Constant):
                    self._read((o, operand_sharding(self.rules[i], self.plan.strategies[i], k), self.plan.generation(i, k)), i, moves)
            self.order.append((i, None))
            for r in op.results:
                self.first[r, made[r], 0] = i
        end = len(self.graph.ops)
        for k, o in enumerate(self.graph.outputs):
            if not isinstance(o, Constant):
                self._read((o, self.plan.outputs[k], self.plan.generation(end, k)), end, moves)

    def _read(self, form: Form, i: int, moves: dict[Form, PlannedMove]) -> None:
        if form not in self.first:
            m = moves[form]
            self._read((m.value, m.source, m.source_generation), i, moves)
            self.order.append((i, m))
            self.first[form] = i
        self.last[form] = max(self.last.get(form, -1), self.graph.reach(form[0], i)[1])


def timeline(
    plan: Plan, graph: Graph, rules: Sequence[ShardingRule], charges: Charges, pricer: Pricer, carried: Sequence[tuple[int, int]] = ()
) -> Timeline:
    """The predicted step of a plan for `graph`, which has what the plan makes again. `carried` pairs inputs and outputs of the state."""
    walk = _Walk(graph, rules, plan.sharding, [], {}, {})
    walk.run()
    held = _held(walk, charges, pricer, carried)
    words = {c.id: (c.kind, c.purpose, c.nbytes, c.dtype) for c in plan.collectives}
    spans: list[Span] = []
    memory: list[tuple[float, int]] = []
    now = 0.0
    for i, m in walk.order:
        span = _op_span(walk, charges, pricer, i, now) if m is None else _move_span(graph, pricer, m, words, now)
        if m is None:
            memory.append((now, held[i]))
        if span.seconds:
            spans.append(span)
            now += span.seconds
    return Timeline(tuple(spans), (*memory, (now, held[-1])))


def _op_span(walk: _Walk, charges: Charges, pricer: Pricer, i: int, now: float) -> Span:
    op, strategy = walk.graph.ops[i], walk.plan.strategies[i]
    seconds = op_seconds(walk.graph, walk.rules, walk.plan, pricer, charges, i)
    if i in charges.heads:
        seconds += pricer.cluster.launch_seconds * walk.graph.times[i]
    details = (("op", i), ("scope", op.scope), ("source", op.source), ("cut", str(strategy)), ("times", walk.graph.times[i]))
    return Span(op.primitive, "made again" if op.again else op.phase, now, seconds, details)


def _move_span(graph: Graph, pricer: Pricer, m: PlannedMove, words: dict[str, Any], now: float) -> Span:
    times = graph.value_times(m.value)
    seconds = 0.0 if m.value in graph.free else times * pricer.move(m.move, m.source, graph.avals[m.value])
    change = ("sharding", f"{m.source} -> {m.target}")
    if not m.move.communicates:
        return Span(m.move.kind, COPIES, now, seconds, (change,))
    kind, purpose, nbytes, dtype = words[m.id]
    details = (("id", m.id), ("purpose", purpose), ("bytes", nbytes), ("dtype", dtype), ("times", times), change)
    return Span(f"{kind} {m.id}", f"collectives over {'+'.join(m.move.axes)}", now, seconds, details)


def _held(walk: _Walk, charges: Charges, pricer: Pricer, carried: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes on one device at each op, and at the end."""
    graph, end = walk.graph, len(walk.graph.ops)
    change = [0] * (end + 2)
    state = {o: graph.inputs[n] for n, k in carried if isinstance(o := graph.outputs[k], int)}
    for form, first in walk.first.items():
        value, sharding, _ = form
        p = graph.producer.get(value)
        in_memory = p is None or graph.ops[p].results.index(value) in charges.writes[p] or first != p
        if value in graph.free or not in_memory:
            continue
        last = end if first < 0 else walk.last.get(form, first)
        if first == p and value in state and all(u <= p for u, _ in graph.uses.get(state[value], ())):
            last = first  # written over the old state
        nbytes = sharding.local_bytes(graph.avals[value], pricer.mesh, pricer.as_written)
        change[max(first, 0)] += nbytes
        change[min(last, end) + 1] -= nbytes
    held, total = [], 0
    for c in change[:-1]:
        total += c
        held.append(total)
    return held
