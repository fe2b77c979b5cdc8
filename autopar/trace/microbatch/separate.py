"""How a step splits into microbatches: the batch factor cut over an axis of time.

The same rules that cut a dimension over devices cut the batch over microbatches that run one after the other. An op whose batch factor
is cut runs once per microbatch on its part. What is *partial* over the axis is added up as the microbatches run, and what needs the
sum comes after them. What does not depend on the batch runs once. All constants stay those of the whole batch, so the sums are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import BOUNDARY, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding
from autopar.trace.microbatch.flow import ROUNDS, Flow
from autopar.trace.microbatch.strategies import producing, time_mesh


@dataclass(frozen=True)
class Separation:
    """Which ops run once per microbatch, and how (`inside`), which once before, and which once after. Some run in two of these places.

    `made` says how each value lies over `AXIS` where it is made inside.
    """

    count: int
    inside: Mapping[int, Strategy]
    before: frozenset[int]
    after: frozenset[int]
    made: Mapping[int, TensorSharding]

    @property
    def mesh(self) -> LogicalMesh:
        return time_mesh(self.count)


def separate(graph: Graph, rules: Sequence[ShardingRule], batch: Collection[int], count: int) -> Separation:
    """Split `graph` into `count` microbatches along the first dimension of the inputs `batch` (positions among the inputs).

    Raises `MicrobatchError`, naming the line, where examples of a batch meet before the gradient is done: there no microbatch can go
    on without the others.
    """
    early: set[int] = set()
    resolved: set[int] = set()
    for _ in range(ROUNDS):
        flow = Flow(graph, rules, count, frozenset(graph.inputs[k] for k in batch), early, resolved)
        flow.run()
        more_early, more_resolved = flow.wanted_early() - early, flow.added_up() - resolved
        if not more_early and not more_resolved:
            break
        early |= more_early
        resolved |= more_resolved
    flow.check()
    return _Places(flow).separation()


@dataclass
class _Places:
    """From the outputs back: where each op has to run."""

    flow: Flow
    inside: dict[int, Strategy] = field(default_factory=dict)
    before: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    parts: dict[int, set[TensorSharding]] = field(default_factory=dict)
    """Value -> the forms in which microbatches read it."""
    early: set[int] = field(default_factory=set)
    """Values that are read before the microbatches."""
    late: set[int] = field(default_factory=set)
    """Values that are read after them."""

    def separation(self) -> Separation:
        flow = self.flow
        self.late.update(flow.graph.output_values)
        for first, stop in reversed(flow.units):
            self._op(first) if stop == first + 1 else self._loop(first, stop)
        made = {}
        for i, strategy in self.inside.items():
            for k, r in enumerate(flow.graph.ops[i].results):
                made[r] = result_sharding(flow.rules[i], strategy, k)
        return Separation(flow.count, self.inside, frozenset(self.before), frozenset(self.after), made)

    def _op(self, i: int) -> None:
        flow, op = self.flow, self.flow.graph.ops[i]
        read_early, read_late = any(r in self.early for r in op.results), any(r in self.late for r in op.results)
        parts = {f for r in op.results for f in self.parts.get(r, ())}
        known_early = any(r in flow.early for r in op.results) and bool(parts or read_late)
        if read_early or known_early:
            self._before(i)
            read_late = False
        if flow.is_late(i):
            if read_late or (op.effects and i not in self.before):
                self._after(i)
            return
        if flow.is_inside(i):
            if not known_early and (read_late or any(not f.is_replicated for f in parts)):
                self._within(i, flow.strategy[i])
            return
        whole = {f for f in parts if f.is_replicated}
        if parts - whole and self._pulled_in(i, parts - whole, bool(whole) or read_early or read_late):
            parts = whole
        if parts and not flow.caught.isdisjoint(op.inputs):
            self._within(i, flow.strategy[i])
        elif parts or read_early:
            self._before(i)
        elif read_late or op.effects:
            self._after(i)

    def _pulled_in(self, i: int, parts: Collection[TensorSharding], elsewhere: bool) -> bool:
        """Make just the parts that microbatches read, where that is possible and nobody else reads the whole."""
        flow, op = self.flow, self.flow.graph.ops[i]
        if len(parts) > 1 or len(op.results) > 1 or op.effects or (elsewhere and op.results[0] not in flow.graph.free):
            return False
        strategy = producing(flow.rules[i], 0, next(iter(parts)), flow.mesh)
        if strategy is None:
            return False
        self._within(i, strategy)
        return True

    def _within(self, i: int, strategy: Strategy) -> None:
        self.inside[i] = strategy
        for k, o in enumerate(self.flow.graph.ops[i].operands):
            if isinstance(o, int):
                self._part(o, operand_sharding(self.flow.rules[i], strategy, k))

    def _part(self, value: int, form: TensorSharding) -> None:
        """A microbatch reads a value so; what is whole and needed partial is read whole."""
        seen = self.flow.form[value]
        if form.partial and (seen is None or not seen.partial):
            form = TensorSharding.replicated(len(form.dims))
        self.parts.setdefault(value, set()).add(form)

    def _before(self, i: int) -> None:
        self.before.add(i)
        self.early.update(self.flow.graph.ops[i].inputs)

    def _after(self, i: int) -> None:
        self.after.add(i)
        self.late.update(self.flow.graph.ops[i].inputs)

    def _loop(self, first: int, stop: int) -> None:
        flow, ops = self.flow, self.flow.graph.ops
        results = [r for i in range(first, stop) for r in ops[i].results]
        read_inside, read_early = any(r in self.parts for r in results), any(r in self.early for r in results)
        read_late = any(r in self.late for r in results) or any(ops[i].effects for i in range(first, stop))
        if not (read_inside or read_early or read_late):
            return
        if any(flow.is_inside(i) for i in range(first, stop)):
            for i in range(stop - 1, first - 1, -1):
                self._within(i, self._narrowed(i))
        else:
            place = self._before if not flow.is_late(first) and (read_inside or read_early) else self._after
            for i in range(first, stop):
                place(i)

    def _narrowed(self, i: int) -> Strategy:
        """The strategy of an op of a loop that runs per microbatch: what is read in parts alone is made in parts."""
        flow, op = self.flow, self.flow.graph.ops[i]
        parts = {f for r in op.results for f in self.parts.get(r, ())}
        strategy = flow.strategy[i]
        if strategy.is_whole and len(parts) == 1 and len(op.results) == 1 and op.primitive not in BOUNDARY:
            form = next(iter(parts))
            if not form.is_replicated and op.results[0] not in self.late:
                return producing(flow.rules[i], 0, form, flow.mesh) or strategy
        return strategy
