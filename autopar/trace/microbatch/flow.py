"""From the inputs on: how each value lies over the axis of time, and which ops run per microbatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.errors import MicrobatchError
from autopar.ir.graph import BOUNDARY, MATMULS, ROOT, Graph, Operand
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, result_sharding
from autopar.trace.microbatch.strategies import AXIS, Form, strategy_for, time_mesh
from autopar.trace.order import units

ROUNDS = 64


@dataclass
class Flow:
    """From the inputs on: how each value lies over the axis of time, and with which strategy its op runs."""

    graph: Graph
    rules: Sequence[ShardingRule]
    count: int
    batch: frozenset[int]
    early: Collection[int]
    resolved: Collection[int]
    form: dict[int, Form] = field(default_factory=dict)
    strategy: dict[int, Strategy] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    """Values of a loop of which nothing is known yet but what comes in."""
    caught: set[int] = field(default_factory=set)
    """Values that are the same in every microbatch, and there in it alone: made by a loop that runs in each, or of such."""

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
        made = [r for i in range(first, stop) for r in self.graph.ops[i].results]
        inside = fits and any(self.is_inside(i) for i in range(first, stop))
        if fits and (inside if stop > first + 1 else not inside and not self.caught.isdisjoint(self.graph.ops[first].inputs)):
            self.caught.update(r for r in made if (form := self.form[r]) is not None and form.is_replicated)
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
            self.form[r] = result_sharding(self.rules[i], strategy, k)

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
            heavy = op.primitive in MATMULS or op.region != ROOT or op.primitive in BOUNDARY or op.effects or op.subgraphs
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
            if any(op.phase == "backward" or op.primitive in MATMULS for op in ops):
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
