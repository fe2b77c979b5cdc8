"""From a candidate in pipeline stages to the plan as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from autopar import costs, rules as rule_table
from autopar.compiler.candidate import Candidate
from autopar.compiler.compilation import fingerprint_of, plain_options
from autopar.compiler.predict import peak_rate
from autopar.intraop.price import collectives, whole_ops
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Collective, Leaf, Plan, Predicted, ShardingPlan, Solve, Stage, Timings, WholeOp
from autopar.ir.serialize import plain
from autopar.ir.sharding import TensorSharding


def plan_of(found: Candidate, seconds: float) -> Plan:
    """The plan of a candidate, which took so many seconds to find."""
    c = found.c
    inputs, outputs = _leaves(found)
    solves = [s.chosen.solve for s in found.solved]
    names = (STAGE_AXIS, *found.mesh.names) if found.mesh.num_devices > 1 else (STAGE_AXIS,)
    sizes = (found.schedule.num_devices, *(found.mesh.sizes if found.mesh.num_devices > 1 else ()))
    sharding = ShardingPlan(
        LogicalMesh(names, sizes), (), tuple(leaf.sharding for leaf in inputs), tuple(leaf.sharding for leaf in outputs)
    )
    recomputed = any(s.recomputed for s in found.stages)
    solve_s = sum(s.solve_s for s in found.known.values())
    enumerate_s = sum(s.enumerate_s for s in found.known.values())
    return Plan(
        fingerprint_of(c.traced),
        c.target or getattr(c.traced.function, "__name__", ""),
        plain(c.cluster.to_dict()),
        sharding,
        inputs,
        outputs,
        tuple(collective for n in range(len(found.solved)) for collective in _collectives(found, n)),
        tuple(w for n in range(len(found.solved)) for w in _whole(found, n)),
        _predicted(found),
        _together(solves, found.seconds),
        Timings(c.trace_s, enumerate_s, solve_s, max(0.0, seconds - enumerate_s - solve_s), c.trace_s + seconds),
        _split(found),
        max((s.chosen for s in found.solved), key=lambda chosen: chosen.peak_bytes).live,
        (),
        plain_options(c.options),
        tuple(c.traced.roles.notes),
        jax.__version__,
        stages=found.stages,
        layers=found.cut.begins,
        microbatches=found.schedule.num_microbatches,
        schedule=found.schedule.name,
        remat=c.options.remat if recomputed else "none",
    )


def _leaves(found: Candidate) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    graph = found.staged.whole.graph
    state = {i for i, _ in found.c.traced.roles.carried}
    first = len(graph.inputs) - graph.num_constants
    own = len(found.c.traced.graph.inputs)
    inputs: dict[int, Leaf] = {}
    outputs: dict[int, Leaf] = {}
    for n, solved in enumerate(found.solved):
        plan = found.plans[n]
        count = len(solved.stage.leaves)
        constants = solved.graph.num_constants
        lies = [*plan.inputs[: count - constants], *plan.inputs[len(plan.inputs) - constants :]]
        for k, sharding in zip(solved.stage.leaves, lies, strict=True):
            if k < own or k >= first:
                inputs.setdefault(k, _leaf(graph, k, state, sharding, n))
        for k, sharding in zip(solved.stage.results, plan.outputs, strict=False):
            aval = graph.aval(graph.outputs[k])
            outputs[k] = Leaf(graph.output_names[k], aval.shape, aval.dtype, "output", sharding, n)
    for k in range(own):
        aval = graph.avals[graph.inputs[k]]
        inputs.setdefault(k, _leaf(graph, k, state, TensorSharding.replicated(aval.ndim), 0))
    return tuple(inputs[k] for k in range(own)), tuple(outputs[k] for k in range(len(graph.outputs)))


def _collectives(found: Candidate, n: int) -> Iterator[Collective]:
    s = found.solved[n]
    for collective in collectives(s.graph, s.chosen.shape.rules, found.plans[n], found.pricer):
        yield replace(collective, stage=n)


def _whole(found: Candidate, n: int) -> Sequence[WholeOp]:
    s = found.solved[n]
    has = [rule_table.has_rule(op) for op in s.graph.ops]
    return whole_ops(s.graph, s.chosen.shape.rules, found.plans[n], found.pricer, s.chosen.shape.charges, has)


def _busiest(found: Candidate) -> int:
    return max(range(found.schedule.num_devices), key=found.simulation.busy_s)


def _split(found: Candidate) -> tuple[tuple[str, float], ...]:
    """Seconds by kind on the devices that work most."""
    kinds: dict[str, float] = {}
    for n, s in enumerate(found.solved):
        if found.schedule.device_of[n] == _busiest(found):
            for kind, seconds in s.chosen.price.by_kind:
                kinds[kind] = kinds.get(kind, 0.0) + seconds
    return tuple(sorted(kinds.items(), key=lambda item: -item[1]))


def _predicted(found: Candidate) -> Predicted:
    """Of the devices that work most; what they wait for is the bubble."""
    mine = [n for n in range(len(found.solved)) if found.schedule.device_of[n] == _busiest(found)]
    communication = sum(found.solved[n].chosen.price.communication_s for n in mine)
    busy = sum(_busy(found.stages[n], found.schedule.num_microbatches) for n in mine)
    peak, arguments = max((found.bytes(d, "peak_bytes"), found.bytes(d, "argument_bytes")) for d in range(found.schedule.num_devices))
    work = costs.graph_flops(found.c.traced.graph)
    rate = peak_rate(found.c)
    return Predicted(
        found.seconds,
        max(0.0, busy - communication),
        communication,
        communication,
        max(0.0, found.seconds - busy),
        peak,
        arguments,
        peak - arguments,
        work,
        min(1.0, work / (found.seconds * rate)) if rate and found.seconds else 0.0,
    )


def _leaf(graph: Graph, k: int, state: set[int], sharding: TensorSharding, stage: int) -> Leaf:
    aval = graph.avals[graph.inputs[k]]
    first = len(graph.inputs) - graph.num_constants
    role = "state" if k in state else "batch" if k < first else "constant"
    return Leaf(graph.input_names[k], aval.shape, aval.dtype, role, sharding, stage)


def _busy(stage: Stage, microbatches: int) -> float:
    """Seconds in which a stage works."""
    return stage.before_s + microbatches * (stage.forward_s + stage.input_s + stage.weight_s) + stage.after_s


def _together(solves: Sequence[Solve], seconds: float) -> Solve:
    """The solves of all stages as one: the bound holds for the stages as they are cut."""
    order = ("optimal", "feasible")
    worst = max(solves, key=lambda s: order.index(s.status) if s.status in order else len(order))
    gap = max(s.gap for s in solves)
    return Solve(
        worst.solver,
        worst.status,
        seconds,
        seconds * (1 - gap),
        gap,
        sum(s.variables for s in solves),
        sum(s.constraints for s in solves),
        "stages",
    )
