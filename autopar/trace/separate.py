"""How a step splits into microbatches: the batch factor cut over an axis of time.

The same rules that cut a dimension over devices cut the batch over microbatches that run one after the other. An op whose batch factor
is cut runs once per microbatch on its part. What is *partial* over the axis is added up as the microbatches run, and what needs the
sum comes after them. What does not depend on the batch runs once. All constants stay those of the whole batch, so the sums are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import MicrobatchError
from autopar.ir.graph import BOUNDARY, ROOT, Graph, Operand
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, is_legal, operand_sharding, result_sharding
from autopar.trace.order import units

AXIS = "microbatch"
METHODS = frozenset({"plain", "offset", "bits", "masked_sum", "scatter"})
"""Methods of factors that one microbatch can run by itself, knowing its number."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
ROUNDS = 64

Form = TensorSharding | None
"""How a value lies over the axis of time; None for one that is known only after all microbatches."""


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


def time_mesh(count: int) -> LogicalMesh:
    """The axis of time as a mesh of its own."""
    return LogicalMesh((AXIS,), (count,))


def separate(graph: Graph, rules: Sequence[ShardingRule], batch: Collection[int], count: int) -> Separation:
    """Split `graph` into `count` microbatches along the first dimension of the inputs `batch` (positions among the inputs).

    Raises `MicrobatchError`, naming the line, where examples of a batch meet before the gradient is done: there no microbatch can go
    on without the others.
    """
    early: set[int] = set()
    resolved: set[int] = set()
    for _ in range(ROUNDS):
        flow = _Flow(graph, rules, count, frozenset(graph.inputs[k] for k in batch), early, resolved)
        flow.run()
        more_early, more_resolved = flow.wanted_early() - early, flow.added_up() - resolved
        if not more_early and not more_resolved:
            break
        early |= more_early
        resolved |= more_resolved
    flow.check()
    return _Places(flow).separation()


@dataclass
class _Flow:
    """From the inputs on: how each value lies over the axis of time, and with which strategy its op runs."""

    graph: Graph
    rules: Sequence[ShardingRule]
    count: int
    batch: frozenset[int]
    early: Collection[int]
    resolved: Collection[int]
    form: dict[int, Form] = field(default_factory=dict)
    made: dict[int, TensorSharding] = field(default_factory=dict)
    strategy: dict[int, Strategy] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    """Values of a loop of which nothing is known yet but what comes in."""

    def run(self) -> None:
        for v in self.graph.inputs:
            self.form[v] = self._first_dimension(v) if v in self.batch else self._whole(v)
        for first, stop in self.units:
            self._unit(first, stop)

    @cached_property
    def mesh(self) -> LogicalMesh:
        return time_mesh(self.count)

    @cached_property
    def units(self) -> list[tuple[int, int]]:
        """Ops that run in one place, as ranges: an op by itself, or an outermost loop or branch with all that belongs to it."""
        found, first = [], 0
        for unit in units(self.graph):
            found.append((first, first + len(unit)))
            first += len(unit)
        return found

    def is_late(self, i: int) -> bool:
        """Whether an op runs after the microbatches."""
        return i not in self.strategy

    def is_inside(self, i: int) -> bool:
        """Whether an op differs from microbatch to microbatch."""
        return i in self.strategy and not self.strategy[i].is_whole

    def seen(self, operand: Operand) -> Form:
        """How readers see an operand; literals are whole."""
        return self.form[operand] if isinstance(operand, int) else TensorSharding.replicated(operand.aval.ndim)

    def outer_operands(self, first: int, stop: int) -> list[int]:
        """The values from before a unit that it reads."""
        own = {r for i in range(first, stop) for r in self.graph.ops[i].results}
        return [o for i in range(first, stop) for o in self.graph.ops[i].inputs if o not in own]

    def _whole(self, value: int) -> TensorSharding:
        return TensorSharding.replicated(self.graph.avals[value].ndim)

    def _first_dimension(self, value: int) -> TensorSharding:
        return TensorSharding(((AXIS,), *((),) * (self.graph.avals[value].ndim - 1)))

    def _unit(self, first: int, stop: int) -> None:
        fits = self._loop(first, stop) if stop > first + 1 else self._op(first)
        if not fits:
            for i in range(first, stop):
                self.strategy.pop(i, None)
                self.form.update(dict.fromkeys(self.graph.ops[i].results))
        for i in range(first, stop):
            for r in self.graph.ops[i].results:
                if r in self.early:
                    self.form[r] = self._whole(r)
                elif r in self.resolved:
                    self.form[r] = None

    def _op(self, i: int) -> bool:
        """Run one op on what its operands are; whether there is a strategy for it."""
        op = self.graph.ops[i]
        joins = range(len(op.operands)) if op.primitive in BOUNDARY else [k for k, o in enumerate(op.operands) if o in self.unknown]
        found = strategy_for(self.rules[i], [self.seen(o) for o in op.operands], self.mesh, joins)
        if found is None or (op.effects and not found.is_whole) or not self._stays_small(i, found):
            return False
        self._give(i, found)
        unknown = found.is_whole and any(o in self.unknown for o in op.operands)
        (self.unknown.update if unknown else self.unknown.difference_update)(op.results)
        return True

    def _give(self, i: int, strategy: Strategy) -> None:
        self.strategy[i] = strategy
        for k, r in enumerate(self.graph.ops[i].results):
            self.form[r] = self.made[r] = result_sharding(self.rules[i], strategy, k)

    def _stays_small(self, i: int, strategy: Strategy) -> bool:
        """Whether no partial value grows, which would be more to add up."""
        op = self.graph.ops[i]
        if not strategy.passes or op.primitive in BOUNDARY or op.region != ROOT:
            return True
        sizes = [self.graph.avals[o].size for o in op.inputs]
        return all(self.graph.avals[r].size <= max(sizes) for r in op.results)

    def _loop(self, first: int, stop: int) -> bool:
        """Run a loop or branch until what goes round lies as it came in."""
        rounds = {i: j for i, j in self.graph.goes_round if first <= i < stop and self.graph.ops[j].primitive == "loop_exit"}
        carried: dict[int, TensorSharding] = {}
        settled = False
        for _ in range(ROUNDS):
            if not all(self._op_of_loop(i, carried, settled) for i in range(first, stop)):
                return False
            changed = False
            for i, j in rounds.items():
                begins, ends = self.form[self.graph.ops[i].results[0]], self.seen(self.graph.ops[j].operands[0])
                if begins is None or ends is None:
                    return False
                if begins.is_replicated and not ends.is_replicated:
                    carried[i], changed = ends, True
                elif begins != ends and not ends.is_replicated:
                    return False
                else:
                    carried.setdefault(i, begins)
            if not changed and settled:
                return all(self._leave(i, j) for i, j in rounds.items())
            settled = not changed
        return False

    def _op_of_loop(self, i: int, carried: Mapping[int, TensorSharding], settled: bool) -> bool:
        """Run an op of a loop; what it carries lies as its iterations leave it. Until that is `settled`, whole may become anything."""
        wanted = carried.get(i)
        if wanted is None or wanted.is_replicated:
            fits = self._op(i)
            if fits and self.graph.ops[i].primitive == "loop_carry" and self.strategy[i].is_whole:
                (self.unknown.difference_update if settled else self.unknown.update)(self.graph.ops[i].results)
            return fits
        begins = self.seen(self.graph.ops[i].operands[0])
        fits = begins is not None and (begins.is_replicated or begins == wanted)
        found = strategy_for(self.rules[i], [wanted], self.mesh) if fits else None
        if found is None:
            return False
        self._give(i, found)
        return True

    def _leave(self, i: int, j: int) -> bool:
        """What goes round comes out as it is carried."""
        form = self.form[self.graph.ops[i].results[0]]
        found = strategy_for(self.rules[j], [form], self.mesh)
        if found is None:
            return False
        self._give(j, found)
        return True

    def added_up(self) -> set[int]:
        """Partial values that one reader needs whole: they are added up there, and all their readers read the sum."""
        found = set()
        for v, form in self.form.items():
            if form is None or not form.partial or self.graph.home(v) != ROOT:
                continue
            readers = [i for i, _ in self.graph.uses.get(v, ())]
            late = v in self.graph.output_values or any(self.is_late(i) for i in readers)
            if late and any(not self.is_late(i) for i in readers):
                found.add(v)
        return found

    def wanted_early(self) -> set[int]:
        """Late values for want of which a unit is late that could run per microbatch, and that are cheap to know beforehand."""
        found: set[int] = set()
        for first, stop in self.units:
            if not self.is_late(first):
                continue
            outer = self.outer_operands(first, stop)
            forms = [self.form[o] for o in outer]
            if any(f is not None and any(f.dims) for f in forms):
                found.update(o for o, f in zip(outer, forms, strict=True) if (f is None or f.partial) and o in self._light)
        return found

    @cached_property
    def _light(self) -> frozenset[int]:
        """Values that take no matrix product, loop, branch or effect to compute."""
        found = set(self.graph.inputs)
        for op in self.graph.ops:
            heavy = op.primitive in PRODUCTS or op.region != ROOT or op.primitive in BOUNDARY or op.effects or op.subgraphs
            if not heavy and found.issuperset(op.inputs):
                found.update(op.results)
        return frozenset(found)

    def check(self) -> None:
        """Raise `MicrobatchError` where backward, or a matrix product, works on a whole batch after the microbatches."""
        blamed: dict[int, int] = {}
        for first, stop in self.units:
            if not self.is_late(first):
                continue
            mixing = self._mixing(first, stop, blamed)
            if mixing is None:
                continue
            ops = self.graph.ops[first:stop]
            if any(op.phase == "backward" or op.primitive in PRODUCTS for op in ops):
                raise _mixed(self.graph, mixing, self.count)
            blamed.update((r, mixing) for i in range(first, stop) for r in self._spread(i, blamed))

    def _mixing(self, first: int, stop: int, blamed: Mapping[int, int]) -> int | None:
        """The op by which examples meet, if a late unit works on a batch of them."""
        outer = self.outer_operands(first, stop)
        known = [blamed[o] for o in outer if o in blamed]
        if known:
            return min(known)
        return first if any((f := self.form[o]) is not None and any(f.dims) for o in outer) else None

    def _spread(self, i: int, blamed: Mapping[int, int]) -> list[int]:
        """The results of a late op that hold examples of a batch."""
        op, rule = self.graph.ops[i], self.rules[i]
        factors: set[str] = set()
        for k, o in enumerate(op.operands):
            form = self.seen(o)
            held = isinstance(o, int) and o in blamed
            for d, dim in enumerate(rule.operands[k] if k < len(rule.operands) else ()):
                if held or (form is not None and form.dims[d]):
                    factors.update(dim)
        spread = [r for k, r in enumerate(op.results) if any(factors.intersection(dim) for dim in rule.results[k])]
        return spread if op.region == ROOT else list(op.results)


def _mixed(graph: Graph, i: int, count: int) -> MicrobatchError:
    op = graph.ops[i]
    where = op.source or op.scope or "an unknown line"
    return MicrobatchError(
        f"the step cannot run as {count} microbatches: at {where}, `{op.primitive}` needs the whole batch at once (as batch norm and "
        "contrastive losses do), and the gradient depends on it. Use microbatches=1, or compute per example what is computed over the "
        "batch there."
    )


def strategy_for(rule: ShardingRule, forms: Sequence[Form], mesh: LogicalMesh, joins: Collection[int] = ()) -> Strategy | None:
    """The strategy of an op whose operands lie as `forms` say, whole ones being cut as needed; None where there is none.

    Whole operands at the positions `joins` may meet partial ones, and then count once.
    """
    if any(f is None for f in forms):
        return None
    cut = {(k, d) for k, f in enumerate(forms) for d, axes in enumerate(f.dims if f else ()) if axes}
    partial = {k: f.partial[0][1] for k, f in enumerate(forms) if f and f.partial}
    if not cut and not partial:
        return WHOLE
    options: Iterable[Strategy] = ()
    if not partial:
        majors = {_major(rule, k, d) for k, d in cut}
        options = [Strategy(((f, (AXIS,)),)) for f in majors if f is not None and rule.method.get(f) in METHODS]
    elif not cut:
        options = [
            Strategy((), ((AXIS, n),))
            for n, p in enumerate(rule.passes)
            if set(partial.values()) == {p.kind} and set(partial) <= set(p.operands) <= {*partial, *joins}
        ]
    needed = {k for k, _ in cut} | set(partial)
    fitting = (s for s in options if is_legal(rule, s, mesh) and all(operand_sharding(rule, s, k) == forms[k] for k in needed))
    return next(fitting, None)


def _major(rule: ShardingRule, operand: int, d: int) -> str | None:
    """The factor by which a dimension is cut into blocks."""
    return next((f for f in rule.operands[operand][d] if rule.size[f] > 1), None)


def producing(rule: ShardingRule, result: int, form: TensorSharding, mesh: LogicalMesh) -> Strategy | None:
    """The strategy by which an op on whole operands gives a result cut so."""
    d = next(d for d, axes in enumerate(form.dims) if axes)
    factor = next((f for f in rule.results[result][d] if rule.size[f] > 1), None)
    if factor is None or rule.method.get(factor) not in METHODS:
        return None
    found = Strategy(((factor, (AXIS,)),))
    return found if is_legal(rule, found, mesh) and result_sharding(rule, found, result) == form else None


@dataclass
class _Places:
    """From the outputs back: where each op has to run."""

    flow: _Flow
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
        if parts or read_early:
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
