"""Invariants of graphs and plans, checked where each is made."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import CheckError, PlanError
from autopar.ir.graph import Constant, Graph
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import check_strategy, operand_sharding, result_sharding

_DIMENSIONS = {"all_gather": ("dim",), "slice": ("dim",), "all_to_all": ("dim", "to_dim"), "reduce_scatter": ("to_dim",)}
"""Kind of move -> what names a dimension in it."""


def check_graph(graph: Graph) -> Graph:
    """The graph itself, when every value is defined once and before its uses. Raises `CheckError`."""
    defined = set(graph.inputs)
    for i, op in enumerate(graph.ops):
        for o in op.inputs:
            if o not in defined:
                raise CheckError(f"op {i} `{op.primitive}` reads value {o} before it is made.")
        for r in op.results:
            if r in defined:
                raise CheckError(f"op {i} `{op.primitive}` makes value {r} a second time.")
            defined.add(r)
    for k, out in enumerate(graph.outputs):
        if not isinstance(out, Constant) and out not in defined:
            raise CheckError(f"output {k} is value {out}, which nothing makes.")
    return graph


def check_plan(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> ShardingPlan:
    """The plan itself, when strategies obey their rules, moves apply, and every use finds its form. Raises `PlanError`."""
    if len(plan.strategies) != len(graph.ops) or len(plan.inputs) != len(graph.inputs) or len(plan.outputs) != len(graph.outputs):
        raise PlanError("the plan has another number of ops, inputs or outputs than the program: it belongs to another program.")
    for k, (v, s) in enumerate(zip(graph.inputs, plan.inputs, strict=True)):
        if s.partial or len(s.dims) != graph.avals[v].ndim or not s.fits(graph.avals[v].shape, plan.mesh):
            raise PlanError(f"input {k} of shape {graph.avals[v].shape} cannot lie as {s} on mesh ({plan.mesh}).")
    forms: set[tuple[int, TensorSharding, int]] = {(v, s, 0) for v, s in zip(graph.inputs, plan.inputs, strict=True)}
    for i, op in enumerate(graph.ops):
        check_strategy(rules[i], plan.strategies[i], plan.mesh)
        forms.update((r, result_sharding(rules[i], plan.strategies[i], k), 0) for k, r in enumerate(op.results))
    _check_moves(graph, plan, forms)
    _check_carries(graph, rules, plan)
    for i, op in enumerate(graph.ops):
        for k, o in enumerate(op.operands):
            if isinstance(o, int):
                needed = operand_sharding(rules[i], plan.strategies[i], k)
                _check_form(forms, (o, needed, plan.generation(i, k)), f"op {i} `{op.primitive}` at {op.source}")
    for k, o in enumerate(graph.outputs):
        if isinstance(o, int):
            _check_form(forms, (o, plan.outputs[k], plan.generation(len(graph.ops), k)), f"output {k}")
        if plan.outputs[k].partial:
            raise PlanError(f"output {k} would leave the step as a partial value: {plan.outputs[k]}.")
    return plan


def _check_carries(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> None:
    for i, j in graph.goes_round:
        begins, next_one = result_sharding(rules[i], plan.strategies[i], 0), operand_sharding(rules[j], plan.strategies[j], 0)
        if begins != next_one:
            raise PlanError(f"the loop at {graph.ops[i].source} carries a value as {begins}, and goes round with it as {next_one}.")


def _check_moves(graph: Graph, plan: ShardingPlan, forms: set[tuple[int, TensorSharding, int]]) -> None:
    for m in plan.moves:
        _check_places(graph, m)
        if m.move.apply(m.source) != m.target:
            raise PlanError(f"{m.move} takes {m.source} to {m.move.apply(m.source)}, not to {m.target} as the plan says.")
        if not m.target.fits(graph.avals[m.value].shape, plan.mesh):
            raise PlanError(f"{m.target} does not fit a value of shape {graph.avals[m.value].shape} on mesh ({plan.mesh}).")
    waiting = list(plan.moves)
    while waiting:
        later, ready = [], 0
        for m in waiting:
            if (m.value, m.source, m.source_generation) in forms:
                forms.add((m.value, m.target, m.generation))
                ready += 1
            else:
                later.append(m)
        if not ready:  # their sources are not made, or by each other alone
            m = later[0]
            _check_form(forms, (m.value, m.source, m.source_generation), f"{m.move} of value {m.value}")
        waiting = later


def _check_places(graph: Graph, m: PlannedMove) -> None:
    """Value, gate and dimensions of a move exist."""
    if not 0 <= m.value < len(graph.avals) or not -1 <= m.gate < len(graph.ops):
        raise PlanError(f"{m.move} of value {m.value} with gate {m.gate}: the program has no such value or op.")
    shape, used = graph.avals[m.value].shape, [getattr(m.move, name) for name in _DIMENSIONS.get(m.move.kind, ())]
    if not all(0 <= d < len(shape) for d in used) or any(len(s.dims) != len(shape) for s in (m.source, m.target)):
        raise PlanError(f"{m.move} from {m.source} to {m.target} does not fit a value of shape {shape}.")


def _check_form(forms: set[tuple[int, TensorSharding, int]], form: tuple[int, TensorSharding, int], where: str) -> None:
    if form not in forms:
        raise PlanError(f"{where} needs value {form[0]} as {form[1]} (generation {form[2]}), which nothing makes.")
