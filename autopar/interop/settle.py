"""What stages give each other lies the same at both ends: plans of stages are brought in line where a value crosses between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.interop.split import COTANGENT, FORWARD, WEIGHT, StageGraph
from autopar.intraop.connect import made, needs, number
from autopar.intraop.reshard import Price, cheapest
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.check import check_plan
from autopar.ir.graph import BOUNDARY, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding


@dataclass(frozen=True, eq=False)
class Planned:
    """A stage with its plan; `graph` is the stage's own, with what is made again."""

    stage: StageGraph
    graph: Graph
    rules: tuple[ShardingRule, ...]
    plan: ShardingPlan
    price: Price


def settle(stages: Sequence[Planned], alike: Sequence[int] | None = None) -> tuple[ShardingPlan, ...]:
    """The plans of all stages, each value that crosses sent as its reader takes it. `alike[n]` is the first stage that is as stage n is,
    and whose neighbours are as those of n: the two get one plan.

    A value of each microbatch is converted inside of the loop, at its sender. Where the two stages' logical meshes differ it goes as the
    sender has it, and lies as the reader wants it when it arrives.
    """
    editors = [_Editor(planned) for planned in stages]
    wanted: dict[tuple[int, int, int], tuple[TensorSharding, LogicalMesh]] = {}
    for n, editor in enumerate(editors):
        for port in editor.planned.stage.receives:
            if port.when == "each":
                wanted[port.other, n, port.value] = editor.receive(port.position), editor.plan.mesh
    for n, editor in enumerate(editors):
        for port in editor.planned.stage.sends:
            if port.when == "each":
                form, mesh = wanted[n, port.other, port.value]
                editor.send(port.position, form if mesh == editor.plan.mesh else None)
            elif port.when == "before":
                editor.pass_on(port.position)
    first = range(len(stages)) if alike is None else alike
    finished = {n: editors[n].finished() for n in sorted(set(first))}
    return tuple(finished[n] for n in first)


@dataclass
class _Editor:
    """Changes the ports of one stage's plan."""

    planned: Planned
    strategies: list[Strategy] = field(default_factory=list)
    inputs: list[TensorSharding] = field(default_factory=list)
    outputs: list[TensorSharding] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    """Values whose moves are found anew."""

    def __post_init__(self) -> None:
        plan = self.plan
        self.strategies, self.inputs, self.outputs = list(plan.strategies), list(plan.inputs), list(plan.outputs)
        self.rules = self.planned.rules

    @property
    def plan(self) -> ShardingPlan:
        return self.planned.plan

    def receive(self, position: int) -> TensorSharding:
        """The form in which the stage takes a value of each microbatch, which comes in so from now on."""
        graph = self.planned.graph
        stacked = graph.inputs[position]
        (i, _), *_ = graph.uses[stacked]
        form = result_sharding(self.rules[i], self.strategies[i], 0).without_partial()
        self._lies(i, operand=None, result=form)
        self.inputs[position] = operand_sharding(self.rules[i], self.strategies[i], 0)
        self.changed.update((stacked, graph.ops[i].results[0]))
        return form

    def send(self, position: int, form: TensorSharding | None) -> None:
        """A value of each microbatch goes out in this form, or as it comes but for what is partial."""
        graph = self.planned.graph
        stacked = graph.outputs[position]
        assert isinstance(stacked, int)
        i = graph.producer[stacked]
        now = operand_sharding(self.rules[i], self.strategies[i], 0)
        self._lies(i, operand=form or now.without_partial(), result=None)
        self.outputs[position] = result_sharding(self.rules[i], self.strategies[i], 0)
        self.changed.update((stacked, *graph.ops[i].inputs))

    def pass_on(self, position: int) -> None:
        """State goes to another stage as it lies here."""
        graph = self.planned.graph
        value = graph.outputs[position]
        assert isinstance(value, int)
        self.outputs[position] = self.inputs[graph.inputs.index(value)]
        self.changed.add(value)

    def _lies(self, i: int, operand: TensorSharding | None, result: TensorSharding | None) -> None:
        """Op i works with its operand or its result in this form."""
        rule = self.rules[i]
        for s in enumerate_strategies(rule, self.plan.mesh):
            if s.passes:
                continue
            if operand in (None, operand_sharding(rule, s, 0)) and result in (None, result_sharding(rule, s, 0)):
                self.strategies[i] = s
                return
        raise AssertionError(f"no strategy of {rule} has {operand} or {result}")

    def finished(self) -> ShardingPlan:
        p, plan = self.planned, self.plan
        origin = made(p.graph, self.rules, self.strategies, self.inputs)
        wanted = needs(p.graph, self.rules, self.strategies, self.outputs)
        moves = [m for m in plan.moves if m.value not in self.changed]
        dropped = {m.value for m in plan.moves} & self.changed
        regenerated = frozenset(r for r in plan.regenerated if self._operand(r[0], r[1]) not in self.changed)
        for value in sorted(self.changed):
            kept = [m for m in plan.moves if m.value == value] if value in dropped else []
            moves.extend(self._moves(value, origin[value], [t for _, _, t in wanted.get(value, ())], kept))
        settled = replace(
            plan,
            strategies=tuple(self.strategies),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            moves=number(moves),
            regenerated=regenerated,
        )
        return check_plan(p.graph, self.rules, _made_again(p.graph, self.rules, settled))

    def _operand(self, i: int, k: int) -> int:
        graph = self.planned.graph
        o = graph.outputs[k] if i == len(graph.ops) else graph.ops[i].operands[k]
        return o if isinstance(o, int) else -1

    def _moves(
        self, value: int, origin: TensorSharding, targets: Sequence[TensorSharding], before: Sequence[PlannedMove]
    ) -> list[PlannedMove]:
        """Moves from where a value comes into being to all forms in which it is read, by the planned ways where those still begin there."""
        graph, mesh = self.planned.graph, self.plan.mesh
        forms, moves = [origin], list[PlannedMove]()
        for m in (m for m in before if not m.generation and not m.source_generation):
            if m.source in forms and m.target not in forms and m.target in targets:
                forms.append(m.target)
                moves.append(replace(m, gate=-1))
        for target in targets:
            if target in forms:
                continue
            here, path = cheapest([(s, 0.0) for s in forms], target, graph.avals[value], mesh, self.planned.price)
            for move, there in zip(path.moves, path.shardings, strict=True):
                if there not in forms:
                    forms.append(there)
                    moves.append(PlannedMove(value, move, here, there))
                here = there
        return moves


def _made_again(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> ShardingPlan:
    """The plan in which backward converts for itself what no microbatch changes, such as weights that are kept in parts.

    Else each microbatch in flight would keep the converted form from its forward on.
    """
    late = [i for i, op in enumerate(graph.ops) if op.part in (COTANGENT, WEIGHT) and op.primitive not in BOUNDARY]
    early = {i for i, op in enumerate(graph.ops) if op.part == FORWARD}
    read = {
        (o, operand_sharding(rules[i], plan.strategies[i], k))
        for i in early
        for k, o in enumerate(graph.ops[i].operands)
        if isinstance(o, int) and not plan.generation(i, k)
    }
    moves = {(m.value, m.target): m for m in plan.moves if not m.generation}
    again: dict[tuple[int, TensorSharding], int] = {}
    added: list[PlannedMove] = []
    regenerated = set(plan.regenerated)
    for i in late:
        for k, o in enumerate(graph.ops[i].operands):
            if not isinstance(o, int) or o not in graph.fixed_inside or plan.generation(i, k):
                continue
            form = (o, operand_sharding(rules[i], plan.strategies[i], k))
            if form in moves and form in read:
                generation = 1 + max([m.generation for m in plan.moves if m.value == o] + [0])
                for m in _way(form, moves):
                    if (o, m.target) not in again:
                        source = again.get((o, m.source), 0)
                        again[o, m.target] = generation
                        added.append(replace(m, generation=generation, source_generation=source, gate=-1))
                regenerated.add((i, k, again[form]))
    return replace(plan, moves=number((*plan.moves, *added)), regenerated=frozenset(regenerated))


def _way(form: tuple[int, TensorSharding], moves: Mapping[tuple[int, TensorSharding], PlannedMove]) -> list[PlannedMove]:
    """The moves that lead to a form, in order."""
    found: list[PlannedMove] = []
    value, sharding = form
    while (m := moves.get((value, sharding))) is not None:
        found.insert(0, m)
        sharding = m.source
    return found
