"""Random legal plans: any strategy for any op, as a test of everything behind the choice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from autopar import costs
from autopar.intraop.connect import connect
from autopar.intraop.reshard import Price, border_shardings
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.graph import Constant, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, operand_sharding, result_sharding


def random_plan(
    graph: Graph,
    rules: Sequence[ShardingRule],
    mesh: LogicalMesh,
    carried: Sequence[tuple[int, int]],
    price: Price,
    seed: int,
    whole_share: float = 0.15,
    stay_share: float = 0.5,
) -> ShardingPlan:
    """A random legal plan, the same for the same seed.

    Each op runs whole with probability `whole_share`, else takes a random strategy that uses at least one axis; with probability
    `stay_share` one of those that keep its operands as they came, so that partial sums pass on. State comes out as it goes in.
    """
    random = Random(seed)
    inputs = [random.choice(border_shardings(graph.avals[v], mesh)) for v in graph.inputs]
    place = dict(zip(graph.inputs, inputs, strict=True))
    strategies: list[Strategy] = []
    for i, op in enumerate(graph.ops):
        strategy = WHOLE
        if not _is_free(graph, i) and random.random() >= whole_share:
            strategy = _pick(graph, i, rules[i], mesh, place, random, stay_share)
        strategies.append(strategy)
        for k, r in enumerate(op.results):
            place[r] = result_sharding(rules[i], strategy, k)
    tied = {o: inputs[i] for i, o in carried}
    outputs = [tied.get(k) or _output(graph, o, place, mesh, random) for k, o in enumerate(graph.outputs)]
    return connect(graph, rules, mesh, strategies, inputs, outputs, price)


def _is_free(graph: Graph, i: int) -> bool:
    return all(r in graph.free for r in graph.ops[i].results) and bool(graph.ops[i].results)


def _pick(
    graph: Graph,
    i: int,
    rule: ShardingRule,
    mesh: LogicalMesh,
    place: dict[int, TensorSharding],
    random: Random,
    stay_share: float,
) -> Strategy:
    op = graph.ops[i]
    options = [s for s in enumerate_strategies(rule, mesh) if not s.is_whole and not _partial_free(graph, op.operands, rule, s)]
    if not options:
        return WHOLE
    staying = [
        s
        for s in options
        if all(
            place[o] == operand_sharding(rule, s, k) for k, o in enumerate(op.operands) if isinstance(o, int) and o not in graph.free
        )
    ]
    return random.choice(staying if staying and random.random() < stay_share else options)


def _partial_free(graph: Graph, operands: Sequence[int | Constant], rule: ShardingRule, strategy: Strategy) -> bool:
    """Whether the strategy would make a partial value of one that no input feeds: compilers fold its reduction away."""
    wanted = {k for _, p in strategy.passes for k in rule.passes[p].operands}
    return any(isinstance(operands[k], int) and operands[k] in graph.free for k in wanted)


def _output(
    graph: Graph, o: int | Constant, place: dict[int, TensorSharding], mesh: LogicalMesh, random: Random
) -> TensorSharding:
    aval = graph.aval(o)
    if isinstance(o, Constant) or o in graph.free:
        return TensorSharding.replicated(aval.ndim)
    return random.choice(border_shardings(aval, mesh))


def cut_share(graph: Graph, plan: ShardingPlan) -> float:
    """Share of the FLOPs, in [0, 1], done by ops that are cut."""
    total = cut = 0.0
    for op, strategy in zip(graph.ops, plan.strategies, strict=True):
        work = costs.flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results])
        total += work
        cut += work if strategy.cuts else 0.0
    return cut / total if total else 0.0
