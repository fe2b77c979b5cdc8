"""A plan with nothing left for a compiler to rewrite: what it would merge, fold away or never run is not planned.

Equal values are one already (`trace.simplify`), so two moves of a plan are one to the compiler only where two forms of a value are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.intraop.connect import made, needs, number
from autopar.ir.graph import Graph
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding

_Form = tuple[TensorSharding, int]


def canonicalise(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> ShardingPlan:
    """The same strategies with moves in canonical order, each needed.

    Calling a value a partial max (or min, and, or) changes no bit of it. It is called so last, where it is used: before, the value
    and its partial twin could be moved alike, two collectives that are one to the compiler.
    """
    origin = made(graph, rules, plan.strategies, plan.inputs)
    wanted = _wanted(graph, rules, plan)
    moves: list[PlannedMove] = []
    for value, old in plan.moves_of.items():
        forms = _Forms({(origin[value], 0)})
        for m in old:
            forms.add(m)
        moves.extend(_used(forms.moves, wanted[value]))
    return replace(plan, moves=number(moves))


def _wanted(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> dict[int, set[_Form]]:
    """Value -> the forms that ops and outputs read."""
    uses = needs(graph, rules, plan.strategies, plan.outputs)
    return {value: {(s, plan.generation(i, k)) for i, k, s in of} for value, of in uses.items()}


@dataclass
class _Forms:
    """The forms of one value, and the moves that make them."""

    there: set[_Form]
    moves: list[PlannedMove] = field(default_factory=list)
    twins: dict[_Form, PlannedMove] = field(default_factory=dict)

    def add(self, m: PlannedMove) -> None:
        """Add a move; one that starts from a mere renaming starts from what was renamed instead, and renames after."""
        if (m.target, m.generation) in self.there:
            return
        renames = m.move.kind == "to_partial" and m.move.reduction != "sum"
        twin = None if renames else self.twins.get((m.source, m.source_generation))
        if twin is not None and not set(twin.move.axes) & set(m.move.axes) and m.gate < 0 and m.generation == twin.generation:
            between = m.move.apply(twin.source)
            self.add(replace(m, source=twin.source, target=between, source_generation=twin.source_generation))
            m = replace(m, move=twin.move, source=between, source_generation=m.generation)
        self.there.add((m.target, m.generation))
        self.moves.append(m)
        if m.move.kind == "to_partial" and m.move.reduction != "sum":
            self.twins[m.target, m.generation] = m


def _used(moves: Sequence[PlannedMove], wanted: set[_Form]) -> list[PlannedMove]:
    """The moves that lead to a form that is read."""
    wanted, kept = set(wanted), []
    for m in reversed(moves):
        if (m.target, m.generation) in wanted:
            wanted.add((m.source, m.source_generation))
            kept.append(m)
    return kept[::-1]
