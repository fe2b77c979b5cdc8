"""From strategies per op to a whole `ShardingPlan`: conversions found one value at a time, sharing what is already made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.intraop.reshard import Price, cheapest
from autopar.ir.graph import BOUNDARY, GATE, ROOT, Constant, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding


def needs(
    graph: Graph, rules: Sequence[ShardingRule], strategies: Sequence[Strategy], outputs: Sequence[TensorSharding]
) -> dict[int, list[tuple[int, int, TensorSharding]]]:
    """Value -> its uses in program order, as (op index, operand position, sharding needed). Outputs are uses of op n."""
    found: dict[int, list[tuple[int, int, TensorSharding]]] = {}
    for i, op in enumerate(graph.ops):
        for k, o in enumerate(op.operands):
            if not isinstance(o, Constant):
                found.setdefault(o, []).append((i, k, operand_sharding(rules[i], strategies[i], k)))
    for k, o in enumerate(graph.outputs):
        if not isinstance(o, Constant):
            found.setdefault(o, []).append((len(graph.ops), k, outputs[k]))
    return found


def made(
    graph: Graph, rules: Sequence[ShardingRule], strategies: Sequence[Strategy], inputs: Sequence[TensorSharding]
) -> dict[int, TensorSharding]:
    """Value -> the sharding in which it comes into being."""
    found = dict(zip(graph.inputs, inputs, strict=True))
    for i, op in enumerate(graph.ops):
        for k, r in enumerate(op.results):
            found[r] = result_sharding(rules[i], strategies[i], k)
    return found


@dataclass
class _Forms:
    """The forms of one value made so far, and the moves that made them."""

    shardings: list[TensorSharding]
    moves: list[PlannedMove] = field(default_factory=list)


def connect(
    graph: Graph,
    rules: Sequence[ShardingRule],
    mesh: LogicalMesh,
    strategies: Sequence[Strategy],
    inputs: Sequence[TensorSharding],
    outputs: Sequence[TensorSharding],
    price: Price,
) -> ShardingPlan:
    """A plan with these strategies: each use takes its operand from the cheapest form already there.

    This is greedy in the order of uses; the integer programme finds the best tree instead. What no input feeds is never communicated.
    """
    origin = made(graph, rules, strategies, inputs)
    moves: list[PlannedMove] = []
    for value, uses in needs(graph, rules, strategies, outputs).items():
        forms = _Forms([origin[value]])
        for _, _, target in uses:
            _reach(forms, value, target, graph, mesh, _locally(price) if value in graph.free else price)
        held = value in graph.fixed_inside  # or a compiler would move it before the loop
        moves.extend(replace(m, gate=uses[0][0]) if held and m.source == origin[value] else m for m in forms.moves)
    return ShardingPlan(mesh, tuple(strategies), tuple(inputs), tuple(outputs), number(moves))


def _locally(price: Price) -> Price:
    """Every part is there already: compilers fold collectives on constants away."""
    return lambda move, source, aval: inf if move.communicates else price(move, source, aval)


def _reach(forms: _Forms, value: int, target: TensorSharding, graph: Graph, mesh: LogicalMesh, price: Price) -> None:
    if target in forms.shardings:
        return
    here, path = cheapest([(s, 0.0) for s in forms.shardings], target, graph.avals[value], mesh, price)
    for move, there in zip(path.moves, path.shardings, strict=True):
        if there not in forms.shardings:
            forms.shardings.append(there)
            forms.moves.append(PlannedMove(value, move, here, there))
        here = there


def number(moves: Sequence[PlannedMove]) -> tuple[PlannedMove, ...]:
    """Moves with ids `c0`, `c1`, ... on those that communicate."""
    named, count = [], 0
    for m in moves:
        name = f"c{count}" if m.move.communicates else ""
        count += m.move.communicates
        named.append(PlannedMove(m.value, m.move, m.source, m.target, name, m.generation, m.source_generation, m.gate))
    return tuple(named)


def fed_by_state(graph: Graph, carried: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Values that depend on state and constants only: compilers gather them at the start of the program unless held back."""
    state = {graph.inputs[i] for i, _ in carried} | set(graph.inputs[len(graph.inputs) - graph.num_constants :])
    known = set(state)
    for op in graph.ops:
        outside = op.region == ROOT and op.primitive not in BOUNDARY and op.primitive != GATE  # nothing leaves a loop to run before it
        if outside and op.inputs and all(o in known or o in graph.free for o in op.inputs):
            known.update(op.results)
    return frozenset(known)
