"""From a candidate in pipeline stages to the plan as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from autopar import costs, rules as rule_table
from autopar.compiler.candidate import Candidate
from autopar.compiler.compilation import fingerprint_of, plain_options
from autopar.compiler.predict import peak_rate
from autopar.interop.home import home_of, spread_over
from autopar.intraop.price import collectives, whole_ops
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Collective, Leaf, Part, Plan, Predicted, ShardingPlan, Solve, Stage, Timings, WholeOp
from autopar.ir.serialize import plain
from autopar.ir.sharding import TensorSharding
from autopar.trace.parts import Parts


def plan_of(found: Candidate, seconds: float) -> Plan:
    """The plan of a candidate, which took so many seconds to find."""
    c = found.c
    inputs, outputs = _leaves(found)
    solves = [s.chosen.solve for s in found.solved]
    sharding = ShardingPlan(_mesh(found), (), tuple(leaf.sharding for leaf in inputs), tuple(leaf.sharding for leaf in outputs))
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
        (*c.traced.roles.notes, *found.staged.whole.pieces.notes, *_moved(found, inputs)),
        jax.__version__,
        stages=found.stages,
        layers=found.cut.begins,
        microbatches=found.schedule.num_microbatches,
        schedule=found.schedule.name,
        remat=c.options.remat if recomputed else "none",
        scans=found.staged.whole.pieces.borders,
    )


def _leaves(found: Candidate) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """The inputs and outputs of the step as the user has them; those of its rewritten graph come in parts, and have others' constants."""
    graph, whole = found.c.traced.graph, found.staged.whole
    state = {i for i, _ in found.c.traced.roles.carried}
    taken: dict[int, tuple[int, TensorSharding]] = {}
    made: dict[int, tuple[int, TensorSharding]] = {}
    for n, solved in enumerate(found.solved):
        plan = found.plans[n]
        count = len(solved.stage.leaves)
        constants = solved.graph.num_constants
        lies = [*plan.inputs[: count - constants], *plan.inputs[len(plan.inputs) - constants :]]
        for k, sharding in zip(solved.stage.leaves, lies, strict=True):
            taken.setdefault(k, (n, sharding))
        made.update({k: (n, sharding) for k, sharding in zip(solved.stage.results, plan.outputs, strict=False)})
    own = _own_positions(found)
    inputs = []
    for k, v in enumerate(graph.inputs):
        nowhere = 0, TensorSharding.replicated(graph.avals[v].ndim)
        inputs.append(_leaf(graph, k, state, *taken.get(own.get(k, -1), nowhere)))
    outputs = []
    for k, o in enumerate(graph.outputs):
        n, sharding = made[k]
        outputs.append(Leaf(graph.output_names[k], graph.aval(o).shape, graph.aval(o).dtype, "output", sharding, n))
    inputs = [_in_parts(found, leaf, whole.pieces.inputs.get(k), taken) for k, leaf in enumerate(inputs)]
    outputs = [_in_parts(found, leaf, whole.pieces.outputs.get(k), made) for k, leaf in enumerate(outputs)]
    return tuple(inputs), tuple(outputs)


def _own_positions(found: Candidate) -> dict[int, int]:
    """Position of an input of the step -> where it stands among those of the rewritten step: constants by what they are."""
    graph, whole = found.c.traced.graph, found.staged.whole
    first, there = len(graph.inputs) - graph.num_constants, len(whole.graph.inputs) - whole.graph.num_constants
    known = {id(x): there + n for n, x in enumerate(whole.program.constants)}
    constants = {first + n: known.get(id(x), -1) for n, x in enumerate(found.c.traced.program.constants)}
    return {k: k for k in range(first)} | constants


def _in_parts(found: Candidate, leaf: Leaf, parts: Parts | None, where: Mapping[int, tuple[int, TensorSharding]]) -> Leaf:
    """A leaf that stages have in parts."""
    if parts is None:
        return leaf
    nowhere = 0, TensorSharding.replicated(len(leaf.shape))
    placed = [
        Part(n, parts.dimension, *span, sharding)
        for (n, sharding), span in zip((where.get(p, nowhere) for p in parts.positions), parts.spans, strict=True)
    ]
    home = home_of(placed, found.schedule.device_of)
    if home is None:
        sharding = spread_over(leaf.shape, _mesh(found))
    else:
        everywhere = home.groups == tuple(range(found.schedule.num_devices))
        sharding = home.sharding if everywhere else placed[0].sharding
    return replace(leaf, sharding=sharding, parts=tuple(placed))


def _moved(found: Candidate, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """What to say of state that no array holds as its stages have it."""
    moved = [leaf for leaf in leaves if leaf.role == "state" and leaf.parts and home_of(leaf.parts, found.schedule.device_of) is None]
    if not moved:
        return ()
    return (
        f"{len(moved)} leaves, {moved[0].path} first, have unequal layers on their stages or several runs of them on one device, so each "
        "step takes them apart and puts them together. Stages with equally many layers need not, but for interleaved ones.",
    )


def _mesh(found: Candidate) -> LogicalMesh:
    """The mesh of all stages."""
    inner = found.mesh if found.mesh.num_devices > 1 else LogicalMesh((), ())
    return LogicalMesh((STAGE_AXIS, *inner.names), (found.schedule.num_devices, *inner.sizes))


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


def _leaf(graph: Graph, k: int, state: set[int], stage: int, sharding: TensorSharding) -> Leaf:
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
