"""Which primitives ran by which method, on operands that came by which conversion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autopar.intraop.forced import is_free, sums_constants
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.graph import Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.strategy import Strategy, operand_sharding

ARRIVALS = ("direct", "partial", "slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "to_partial")
Pair = tuple[str, str]
Ran = Counter[tuple[str, str, str]]


def methods(rule: ShardingRule, strategy: Strategy) -> set[str]:
    """How an op runs: `whole`; by the methods of its cut factors, where plain ones are `parallel`, `reduced` or `new`; by what passes."""
    found = {f"pass {rule.passes[p].kind}" for _, p in strategy.passes}
    for factor, _ in strategy.cuts:
        method: str = rule.method[factor]
        if method == "plain":
            method = "parallel" if factor in rule.in_results else f"reduced {rule.reduction(factor)}"
            method = method if factor in rule.in_operands else "new"
        found.add(method)
    return found or {"whole"}


def ran(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> Ran:
    """(primitive, method, arrival) of every operand of every op; an op without operands counts as `direct`."""
    last = {(m.value, m.target, m.generation): m.move.kind for m in plan.moves}
    found: Ran = Counter()
    for i, op in enumerate(graph.ops):
        arrivals = set()
        for k, o in enumerate(op.operands):
            if isinstance(o, int):
                needed = operand_sharding(rules[i], plan.strategies[i], k)
                arrivals.add(last.get((o, needed, plan.generation(i, k)), "partial" if needed.partial else "direct"))
        found.update((op.primitive, method, a) for method in methods(rules[i], plan.strategies[i]) for a in arrivals or {"direct"})
    return found


def possible(graph: Graph, rules: Sequence[ShardingRule], mesh: LogicalMesh) -> set[Pair]:
    """(primitive, method) of every strategy that a forced plan may pick; `whole` where there is nothing else.

    What takes a loop's carried value as it lies has no choice of its own.
    """
    bound = {j for _, j in graph.goes_round}
    free = [(op, rule) for i, (op, rule) in enumerate(zip(graph.ops, rules, strict=True)) if i not in bound and not is_free(graph, op)]
    found = {pair for op, rule in free for pair in _possible(graph, op, rule, mesh)}
    cut = {primitive for primitive, method in found if method != "whole"}
    return {(primitive, method) for primitive, method in found if method != "whole" or primitive not in cut}


def _possible(graph: Graph, op: Op, rule: ShardingRule, mesh: LogicalMesh) -> Iterable[Pair]:
    for strategy in enumerate_strategies(rule, mesh):
        if not sums_constants(graph, op, rule, strategy):
            yield from ((op.primitive, method) for method in methods(rule, strategy))


def missing(seen: Ran, wanted: set[Pair]) -> list[Pair]:
    """Pairs that never ran."""
    return sorted(wanted - {(primitive, method) for primitive, method, _ in seen})


def table(seen: Ran) -> str:
    """Primitive and method by row, arrivals by column, with how often each ran."""
    rows: dict[Pair, Counter[str]] = {}
    for (primitive, method, arrival), count in seen.items():
        rows.setdefault((primitive, method), Counter())[arrival] += count
    lines = [f"{'primitive':30}{'method':16}" + "".join(f"{a:>15}" for a in ARRIVALS)]
    for (primitive, method), counts in sorted(rows.items()):
        lines.append(f"{primitive:30}{method:16}" + "".join(f"{counts[a] or '-':>15}" for a in ARRIVALS))
    return "\n".join(lines)
