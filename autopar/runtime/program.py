"""The program that a plan is for: the traced one as so many microbatches, with what is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jax

from autopar import rules
from autopar.emit.localise import localise
from autopar.emit.lower import lower
from autopar.emit.place import Place
from autopar.errors import MicrobatchError, PlanError
from autopar.interop import Layers, layers_at, ops_of
from autopar.interop.apart import summed_apart
from autopar.interop.split import StageGraph, microbatch_loop, split
from autopar.ir.check import check_plan
from autopar.ir.graph import Aval, Constant, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan
from autopar.ir.rule import ShardingRule
from autopar.ir.strategy import Strategy
from autopar.rules import local_function
from autopar.trace import compat
from autopar.trace.microbatch import Separation, divide, separate
from autopar.trace.program import Equation
from autopar.trace.recompute import recompute, repeatable
from autopar.trace.roles import batch_groups
from autopar.trace.trace import Traced
from autopar.trace.unstack import unstack


def planned(traced: Traced, plan: Plan) -> Traced:
    """The program whose ops a plan's strategies are for. Raises `PlanError` where the plan asks for what its program does not allow."""
    options = plan.options
    batch, dtype = tuple(options.get("batch_argnums", ())), str(options.get("accumulate_dtype", "float32"))
    return _planned(traced, plan.microbatches, batch, dtype, plan.recomputed)


@lru_cache(maxsize=4)
def _planned(traced: Traced, count: int, batch: tuple[int, ...], dtype: str, recomputed: tuple[int, ...]) -> Traced:
    try:
        traced = in_microbatches(traced, count, batch, dtype)
    except MicrobatchError as error:
        raise PlanError(f"the plan is for {count} microbatches, which its program does not allow: {error}") from error
    strange = set(recomputed).difference(repeatable(traced.graph))
    if strange:
        raise PlanError(f"the plan makes value {min(strange)} again, which its program does not allow.")
    return replace(traced, graph=recompute(traced.graph, recomputed)) if recomputed else traced


def in_microbatches(traced: Traced, count: int, batch_argnums: Sequence[int] = (), accumulate_dtype: str = "float32") -> Traced:
    """The program that runs the step as `count` microbatches, one after the other, and gives what it gives for the whole batch.

    Raises `MicrobatchError` where that cannot be.
    """
    return traced if count == 1 else _divided(traced, count, batch_argnums, accumulate_dtype)


def _divided(traced: Traced, count: int, batch_argnums: Sequence[int], accumulate_dtype: str) -> Traced:
    """The same as a loop, be it of one microbatch."""
    groups = batch_groups(traced.signature, traced.roles, traced.graph, batch_argnums)
    if not groups:
        raise MicrobatchError(
            "no argument of the step looks like a batch, so it cannot run in microbatches: state comes back, and of the rest none has "
            "leaves that share their first dimension. Name the batch with `batch_argnums`, or use microbatches=1."
        )
    graph = traced.graph
    found = tuple(_rule_over_time(op, graph) for op in graph.ops)
    parts = _separated(graph, found, groups, count)
    divided = divide(graph, traced.program, found, parts, _lower, accumulate_dtype == "as_written")
    return replace(traced, graph=divided.graph, program=divided.program)


def _rule_over_time(op: Op, graph: Graph) -> ShardingRule:
    """The rule of an op; a loop that begins with a literal may add up from there, where the literal counts in the first microbatch."""
    begins = op.primitive == "loop_carry" and isinstance(op.operands[0], Constant)
    return rules.rule_for(replace(op, operands=op.results) if begins else op, graph.aval)


def _separated(graph: Graph, found: Sequence[ShardingRule], groups: Sequence[Sequence[int]], count: int) -> Separation:
    """What runs where if the batch is cut: the first of the `groups` of inputs that can be. Raises `MicrobatchError` for the likeliest."""
    refused: list[MicrobatchError] = []
    for batch in groups:
        size = graph.avals[graph.inputs[batch[0]]].shape[0]
        try:
            if size % count:
                raise MicrobatchError(f"a batch of {size} does not divide into {count} microbatches. Use a number that divides it.")
            return separate(graph, found, batch, count)
        except MicrobatchError as error:
            refused.append(error)
    raise refused[0]


def in_pieces(traced: Traced, cut: Callable[[int], Sequence[int]], batch_argnums: Sequence[int] = ()) -> Traced:
    """The step whose scans over layers run in pieces between the borders `cut(length)`."""
    state = sorted({i for i, _ in traced.roles.carried})
    every = range(len(traced.graph.inputs) - traced.graph.num_constants)
    groups = batch_groups(traced.signature, traced.roles, traced.graph, batch_argnums)
    found = traced
    for weights in (state, *([k for k in every if k not in batch] for batch in groups)):
        found = unstack(traced, lambda length: tuple(cut(length)), weights, localise)
        if found.pieces.borders or found.pieces.notes:
            break
    return found


@dataclass(frozen=True, eq=False)
class Staged:
    """A step in pipeline stages: the whole of it as a loop over microbatches, and each stage's share."""

    whole: Traced
    stages: tuple[StageGraph, ...]

    def constants(self, stage: int) -> tuple[Any, ...]:
        """The closed-over constants that a stage reads."""
        graph = self.whole.graph
        first = len(graph.inputs) - graph.num_constants
        return tuple(self.whole.program.constants[k - first] for k in self.stages[stage].leaves if k >= first)


@dataclass(frozen=True, eq=False)
class Layered:
    """A step as a loop over microbatches whose ops know their layers."""

    traced: Traced
    layers: Layers

    def staged(self, stage_of: Sequence[int], schedule: str) -> Staged:
        """The stages of layers that are told which stage they belong to, for a schedule."""
        loop = microbatch_loop(self.traced.graph)
        graph = summed_apart(self.traced.graph, loop, stage_of)
        return Staged(replace(self.traced, graph=graph), split(graph, loop, self.traced.roles.carried, stage_of, schedule == "zero_bubble"))


def in_layers(
    traced: Traced, layers: Layers, count: int, batch_argnums: Sequence[int] = (), accumulate_dtype: str = "float32"
) -> Layered:
    """The step as a loop over `count` microbatches, its ops marked with their layers. Raises `MicrobatchError`."""
    marked = tuple(replace(op, part=layer) for op, layer in zip(traced.graph.ops, layers.layer_of, strict=True))
    whole = replace(traced, graph=replace(traced.graph, ops=marked))
    return Layered(_divided(whole, count, batch_argnums, accumulate_dtype), layers)


def staged(traced: Traced, plan: Plan) -> Staged:
    """The stages that a plan is for. Raises `PlanError` where the plan asks for what its program does not allow."""
    options = plan.options
    if any(len(cut) < 2 or cut[0] or any(a >= b for a, b in pairwise(cut)) for cut in plan.scans):
        raise PlanError(f"the plan cuts scans at {plan.scans}: borders begin at 0 and grow.")
    borders = {cut[-1]: cut for cut in plan.scans}
    try:
        traced = in_pieces(traced, lambda length: borders.get(length, (0, length)), options.get("batch_argnums", ()))
        ops = ops_of(traced.graph, traced.roles.carried)
        layers = layers_at(ops, plan.layers)
        layered = in_layers(traced, layers, plan.microbatches, options.get("batch_argnums", ()), str(options.get("accumulate_dtype", "")))
    except (MicrobatchError, IndexError) as error:
        raise PlanError(f"the plan cuts its program where that cannot be cut: {error}") from error
    stage_of = [s for s, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
    if len(stage_of) != len(plan.layers) + 1:
        raise PlanError(f"the plan's stages hold {len(stage_of)} layers of {len(plan.layers) + 1}.")
    return layered.staged(stage_of, plan.schedule)


def planned_stages(traced: Traced, plan: Plan) -> tuple[Staged, tuple[tuple[Graph, tuple[ShardingRule, ...]], ...]]:
    """The stages that a plan is for, and by stage the graph that is planned, with what is made again, and its rules.

    Raises `PlanError` where the plan does not fit them.
    """
    program = staged(traced, plan)
    found = []
    for stage, data in zip(program.stages, plan.stages, strict=True):
        graph = recompute(stage.graph, data.recomputed)
        mine = tuple(rules.rule_for(op, graph.aval) for op in graph.ops)
        check_plan(graph, mine, data.sharding)
        found.append((graph, mine))
    return program, tuple(found)


def _lower(
    op: Op,
    equation: Equation,
    rule: ShardingRule,
    strategy: Strategy,
    avals_in: tuple[Aval, ...],
    avals_out: tuple[Aval, ...],
    operands: Sequence[Any],
    mesh: LogicalMesh,
    index: Any,
    as_written: bool,
) -> Sequence[Any]:
    """One op on one microbatch, as it would run on one device of an axis of that many. A user's closed function stays closed."""
    place = Place(mesh, lambda axes: index)
    params = dict(equation.equation.params)

    def run(*xs: Any) -> Sequence[Any]:
        bind = lambda params, values: compat.bind(equation.equation, values, params)  # noqa: E731
        return lower(bind, op, params, rule, strategy, avals_in, avals_out, xs, place, as_written=as_written)

    if op.primitive in ("jit", "pjit") and local_function(op, avals_in, avals_out) is not None:
        run.__name__ = str(op.param("name"))
        return jax.jit(run)(*operands)
    return run(*operands)
