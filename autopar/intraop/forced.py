"""Random legal plans: any strategy for any op, as a test of everything behind the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random

from autopar import costs
from autopar.intraop.canonical import canonicalise
from autopar.intraop.connect import connect
from autopar.intraop.merges import merging_casts
from autopar.intraop.reshard import Price, border_shardings
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.graph import Aval, Constant, Graph, Op, Operand
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, operand_sharding, result_sharding
from autopar.rules.inside import inside


@dataclass(frozen=True)
class Shares:
    """How often a random plan does what: ops that run whole, ops that take their operands as they come, heavy ops that are cut.

    An op is heavy when it does more than the mean op's share of the FLOPs.
    """

    whole: float = 0.15
    stay: float = 0.5
    heavy_cut: float = 0.85


def random_plan(
    graph: Graph,
    rules: Sequence[ShardingRule],
    mesh: LogicalMesh,
    carried: Sequence[tuple[int, int]],
    price: Price,
    seed: int,
    shares: Shares = Shares(),  # noqa: B008
) -> ShardingPlan:
    """A random legal plan, the same for the same seed.

    Each op takes a random strategy; `shares.stay` of them one that keeps its operands as they came, so that partial sums pass on.
    State comes out as it goes in. What no input feeds is made where and as it is used. A cast that would make two collectives one to
    the compiler takes reduced values.
    """
    random = Random(seed)
    inputs = [random.choice(_border_shardings(graph.avals[v], mesh)) for v in graph.inputs]
    picker = _Picker(graph, rules, mesh, random, shares, dict(zip(graph.inputs, inputs, strict=True)))
    strategies = [picker.pick(i) for i in range(len(graph.ops))]
    tied = {o: inputs[i] for i, o in carried}
    outputs = [tied.get(k) or _output(graph, o, mesh, random) for k, o in enumerate(graph.outputs)]
    _follow_users(graph, rules, mesh, strategies)
    while True:
        plan = canonicalise(graph, rules, connect(graph, rules, mesh, strategies, inputs, outputs, price))
        casts = merging_casts(graph, rules, plan)
        if not casts:
            return plan
        strategies = [replace(s, passes=()) if i in casts else s for i, s in enumerate(strategies)]


@dataclass
class _Picker:
    """Picks strategies in program order; `place` says how each value comes."""

    graph: Graph
    rules: Sequence[ShardingRule]
    mesh: LogicalMesh
    random: Random
    shares: Shares
    place: dict[int, TensorSharding]
    work: list[float] = field(default_factory=list)
    carries: dict[int, Strategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = [flops(self.graph, op) for op in self.graph.ops]
        self.mean = sum(self.work) / max(1, len(self.work))

    def pick(self, i: int) -> Strategy:
        op, rule = self.graph.ops[i], self.rules[i]
        strategy = self.carries.get(i)
        if strategy is None:
            strategy = WHOLE if is_free(self.graph, op) else self._random(i, op, rule)
        self.carries.update((j, strategy) for begin, j in self.graph.goes_round if begin == i)
        for k, r in enumerate(op.results):
            self.place[r] = result_sharding(rule, strategy, k)
        return strategy

    def _random(self, i: int, op: Op, rule: ShardingRule) -> Strategy:
        heavy = self.work[i] > self.mean
        options = [s for s in enumerate_strategies(rule, self.mesh) if not s.is_whole and not sums_constants(self.graph, op, rule, s)]
        cutting = [s for s in options if s.cuts]
        if heavy and cutting and self.random.random() < self.shares.heavy_cut:
            options = cutting
        elif not options or self.random.random() < self.shares.whole:
            return WHOLE
        staying = [s for s in options if self._stays(op, rule, s)]
        return self.random.choice(staying if staying and self.random.random() < self.shares.stay else options)

    def _stays(self, op: Op, rule: ShardingRule, strategy: Strategy) -> bool:
        values = [(k, o) for k, o in enumerate(op.operands) if isinstance(o, int) and o not in self.graph.free]
        return all(self.place[o] == operand_sharding(rule, strategy, k) for k, o in values)


@lru_cache(maxsize=10_000)
def _border_shardings(aval: Aval, mesh: LogicalMesh) -> tuple[TensorSharding, ...]:
    return border_shardings(aval, mesh)


def is_free(graph: Graph, op: Op) -> bool:
    """Whether no input feeds the op."""
    return bool(op.results) and all(r in graph.free for r in op.results)


def sums_constants(graph: Graph, op: Op, rule: ShardingRule, strategy: Strategy) -> bool:
    """Whether the strategy would make a partial value of one that no input feeds: compilers fold its reduction away."""
    wanted = {k for _, p in strategy.passes for k in rule.passes[p].operands}
    return any(isinstance(op.operands[k], int) and op.operands[k] in graph.free for k in wanted)


def _follow_users(graph: Graph, rules: Sequence[ShardingRule], mesh: LogicalMesh, strategies: list[Strategy]) -> None:
    """Ops that no input feeds are cut as their users need the result, where all need it alike."""
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if not is_free(graph, op) or len(op.results) != 1 or op.results[0] in graph.output_values:
            continue
        needed = {operand_sharding(rules[u], strategies[u], k) for u, k in graph.uses.get(op.results[0], ())}
        operands = [graph.aval(o) for o in op.operands]
        alike = [s for s in enumerate_strategies(rules[i], mesh) if {result_sharding(rules[i], s, 0)} == needed and not s.passes]
        fitting = [s for s in alike if not inside(op, rules[i], s, operands, mesh)]
        if fitting and not any(s.partial for s in needed):
            strategies[i] = fitting[0]


def _output(graph: Graph, o: Operand, mesh: LogicalMesh, random: Random) -> TensorSharding:
    aval = graph.aval(o)
    if isinstance(o, Constant) or o in graph.free:
        return TensorSharding.replicated(aval.ndim)
    return random.choice(_border_shardings(aval, mesh))


def flops(graph: Graph, op: Op) -> float:
    """FLOPs of one run of an op on whole arrays."""
    return costs.flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results])


def cut_share(graph: Graph, plan: ShardingPlan) -> float:
    """Share of the FLOPs, in [0, 1], done by ops that are cut."""
    work = [times * flops(graph, op) for times, op in zip(graph.times, graph.ops, strict=True)]
    cut = sum(w for w, strategy in zip(work, plan.strategies, strict=True) if strategy.cuts)
    return cut / sum(work) if sum(work) else 0.0
