"""A case planned and priced: `autopar.manual` on the zoo's model, with few layers, and on from there in a straight line.

Layers are alike, so time and memory of a step grow by the same for each: two plans of few layers tell both, and a published model of a
hundred layers costs no more than one of ten. `tests/unit/test_fidelity.py` holds the line to a whole plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optax

import autopar
from autopar import models
from autopar.api.plans import Plan, plan_traced, timed_trace
from autopar.costs import is_matmul
from autopar.intraop.connect import fed_by_state
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.held import backend_of, temporaries
from autopar.runtime.program import planned
from benchmarks.fidelity.case import SOFTWARE, Case, Share, Software, Unmapped
from benchmarks.fidelity.kernels import of_norms
from benchmarks.fidelity.mixed import master_weights
from benchmarks.fidelity.parts import Part, average, parts_of, rerun, step_compute_s, timed
from benchmarks.fidelity.pipeline import Piped, pipe
from benchmarks.fidelity.timing import Work
from benchmarks.machines import cluster_of, preset_of
from benchmarks.programs import keeps_gradients
from cost_models import Cluster, ClusterError, load_cluster
from cost_models.overlap import exposed_seconds

UNBOUND = 10**15
"""Bytes: plans are taken as published, whether we think that they fit or not."""


AMOUNTS = ("compute_s", "waited_s", "beside_s", "peak_bytes")


@dataclass(frozen=True)
class Price:
    """A predicted step on one device, before any efficiency is fitted: seconds of compute, of communication that it waits for and of
    communication that may run beside it, and bytes at the peak."""

    compute_s: float
    waited_s: float
    beside_s: float
    peak_bytes: float

    def step_s(self, efficiency: float = 1.0) -> float:
        """Seconds of a step when compute runs at `efficiency` times what the device's figures say."""
        compute = self.compute_s / efficiency
        return compute + self.waited_s + exposed_seconds(self.beside_s, compute)


def price(case: Case) -> Price | Piped:
    """The price of a case. Raises `Unmapped` where its machine or plan is unknown to us."""
    try:
        cluster = machine(case)
    except (ValueError, ClusterError) as error:
        raise Unmapped(str(error)) from error
    if not case.layout.counts:
        return _priced(case, cluster)
    return _fastest(case, cluster)


def _fastest(case: Case, cluster: Cluster) -> Price | Piped:
    """The fastest of a case's numbers of microbatches, of those that fit if any do. Raises `Unmapped` where none can be planned."""
    found, refused = [], Unmapped("no number of microbatches is given")
    for n in case.layout.counts:
        try:
            found.append(_priced(replace(case, layout=replace(case.layout, microbatches=n, counts=())), cluster))
        except Unmapped as error:
            refused = error
    if not found:
        raise refused
    room = cluster.device.usable_bytes()
    return min([one for one in found if one.peak_bytes <= room] or found, key=lambda one: one.step_s())


def _priced(case: Case, cluster: Cluster) -> Price | Piped:
    """The price of a case whose number of microbatches is known."""
    software = SOFTWARE[case.software]
    if case.layout.shares:
        kinds = dict.fromkeys(share.submesh for share in case.layout.shares)
        return pipe(case, cluster, software, {kind: model_parts(case, cluster, software, kind) for kind in kinds})
    if not case.model.layers:
        return _price(case, cluster, software, None)
    if case.layer:
        return _less(*(_price(case, cluster, software, layers) for layers in (2, 1)))
    few, more = (2, 4) if case.model.name.startswith("moe") else (1, 2)
    if case.model.layers <= more:
        return _price(case, cluster, software, case.model.layers)
    low, high = (_price(case, cluster, software, layers) for layers in (few, more))
    return _further(low, high, (case.model.layers - few) / (more - few))


def machine(case: Case) -> Cluster:
    """The cluster that a case ran on."""
    nodes = max(1, case.devices // case.per_node)
    if case.machine.startswith("TPU"):
        return _slices(case, nodes)
    return cluster_of({"hardware": case.machine, "nodes": str(nodes), "devices": str(case.devices)})


def _slices(case: Case, count: int) -> Cluster:
    """So many equal slices of a TPU, each in the shape that holds its chips."""
    preset = preset_of(case.machine)
    one = load_cluster(f"{preset}:{case.per_node}").shape[1:]
    return load_cluster(f"{preset}:{'x'.join(map(str, (count, *one)))}")


def _further(low: Price, high: Price, times: float) -> Price:
    """`low`, and `times` more of what `high` has more."""

    slope = _less(high, low)
    return replace(low, **{name: getattr(low, name) + times * getattr(slope, name) for name in AMOUNTS})


def _less(more: Price, fewer: Price) -> Price:
    """What `more` has more."""
    return replace(more, **{name: getattr(more, name) - getattr(fewer, name) for name in AMOUNTS})


def _price(case: Case, cluster: Cluster, software: Software, layers: int | None) -> Price:
    """The price of a case with so many layers."""
    times = case.layout.microbatches if software.gathers_each or case.layout.free else 1
    if times > 1:
        case = replace(case, batch=case.batch // times, layout=replace(case.layout, microbatches=1))
    plan = planned_case(case, cluster, software, layers)
    bare = planned_case(_bare(case), cluster, software, layers) if software.again(case) else plan
    compute_s, again = bare.data.predicted.compute_s, Work()
    if software.again(case) or software.kernels:
        parts = parts_of(bare, cluster, begins(case, layers), software.kernels, case.layout.sequence_parallel)
        passes = software.update_bytes * sum(part.parameters for part in parts)
        if software.kernels:
            compute_s = step_compute_s(parts, case.layout.microbatches) + cluster.compute_seconds(0.0, passes, "float32", False)
        again = rerun(parts, software.again(case))
    moved = communication(bare, case.layout.zero == 3, software.kernels and not case.layout.sequence_parallel)
    shares = (software.decomposes, software.overlaps, software.overlaps and software.hides_replicas)
    beside = sum(share * took for share, took in zip(shares, moved, strict=True))
    compute, waited = compute_s + case.layout.microbatches * again.compute_s, sum(moved) + case.layout.microbatches * again.waited_s
    return Price(times * compute, times * (waited - beside), times * beside, _held(plan, cluster))


def _held(plan: Plan, cluster: Cluster) -> float:
    """Bytes on one device at the peak."""
    assert plan._traced is not None
    backend, predicted = backend_of(cluster.device.name), plan.data.predicted
    return predicted.argument_bytes + (temporaries(plan.data, plan._traced, backend) if backend else predicted.temp_bytes)


def _bare(case: Case) -> Case:
    """The case with nothing made again."""
    return replace(case, layout=replace(case.layout, remat="none"))


def begins(case: Case, layers: int | None) -> list[str]:
    """The scopes with which the parts of a case's model begin, `layers` deep: its layers, two of a mixture of experts being one, or blocks;
    and its head."""
    family = case.model.name.partition("-")[0]
    if family == "wresnet":
        counts = dict(case.model.changes)["stages"]
        return [*(f"stage_{n}_block_{k}" for n, count in enumerate(counts) for k in range(count)), "head"]
    first, step = {"gpt": ("layer", 1), "llama3": ("layer", 1), "moe": ("attention_norm", 2)}[family]
    return [*(f"{first}_{n}" for n in range(0, layers or 0, step)), "norm"]


def model_parts(case: Case, cluster: Cluster, software: Software, share: Share) -> tuple[Part, ...]:
    """The parts of a case's model on a stage's submesh: what comes before its layers, these (one for all, where they are alike), and the
    rest. Time is that of a plan with nothing made again where the software runs forward again as it stands."""
    few = {"gpt": 2, "moe": 4, "wresnet": None}[case.model.name.partition("-")[0]]
    part, cluster = staged_case(case, share), _submesh(cluster, share.devices)

    def found_in(case: Case) -> tuple[Part, ...]:
        plan = planned_case(case, cluster, software, few)
        return parts_of(plan, cluster, begins(case, few), software.kernels, case.layout.sequence_parallel)

    found = found_in(part)
    if software.again(case):
        found = tuple(timed(one, other) for one, other in zip(found, found_in(_bare(part)), strict=True))
    return (found[0], average(found[1:-1]), found[-1]) if few else found


def staged_case(case: Case, share: Share) -> Case:
    """The case whose step is two microbatches of a pipeline's on one stage's submesh, or one where the model mixes examples.

    Each stage has embeddings of its own: where they are tied, the first and the last hold a copy each. That these add up their gradients is
    not priced.
    """
    experts, mixes = case.model.name.startswith("moe"), share.free or case.model.name.startswith("wresnet")
    times = 1 if mixes else min(2, case.layout.microbatches)
    wide = {"expert": share.data, "data": 1} if experts else {"data": share.data}
    layout = replace(case.layout, **wide, tensor=share.tensor, free=share.free, shares=(), interleave=1, microbatches=times, bound=False)
    tied = (("tied", False),) if case.model.name.startswith("gpt") else ()
    model = replace(case.model, changes=tuple((dict(case.model.changes) | dict(tied)).items()))
    return replace(case, model=model, layout=layout, batch=case.batch // case.layout.microbatches * times, devices=share.devices)


def _submesh(cluster: Cluster, devices: int) -> Cluster:
    """So many devices that stand together."""
    per_node = min(devices, cluster.shape[-1])
    if devices % per_node:
        raise Unmapped(f"{devices} devices are no whole number of nodes of {per_node}")
    return cluster.submesh(devices // per_node, per_node)


def planned_case(case: Case, cluster: Cluster, software: Software, layers: int | None) -> Plan:
    """The plan of a case, with the model `layers` deep. Raises `Unmapped` where it cannot be made."""
    changes = dict(case.model.changes) | ({"layers": layers} if layers else {}) | ({"fused": True} if software.fused else {})
    step, args = models.build(case.model.name, batch=case.batch, dtype=case.dtype, **_precision(case, software), **changes)
    layout = case.layout
    if software.fused:
        cluster = replace(cluster, device=replace(cluster.device, fused_efficiency=software.fused))
    options = autopar.Options(memory_bytes=UNBOUND, reduce_dtype="as_written", accumulate_dtype="as_written", time_limit_s=60.0, gap=1e-3)
    try:
        if layout.free:
            return _free(step, args, cluster, case, options)
        return autopar.manual(step, args, cluster, options=options, **_named(case))
    except autopar.AutoparError as error:
        raise Unmapped(f"it cannot be planned: {_PLACE.sub('', str(error))}") from error


_PLACE = re.compile(r"\S*/(?=autopar/)")
"""Where the package lies, in the names of its files."""

_KEEPS = keeps_gradients()
_PLAIN = optax.adamw(1e-3)
_MASTER = master_weights(optax.adamw(1e-3))


def _precision(case: Case, software: Software) -> dict[str, Any]:
    """How the model holds its parameters, and its optimiser.

    Alpa's mixtures of experts have all in 16 bits: their published peaks, activations included, are 9.4 bytes for each parameter.
    """
    if case.layer:
        return {"optimizer": _KEEPS, "param_dtype": case.dtype if software.master else "float32"}
    if case.model.name.startswith("moe"):
        return {"optimizer": _PLAIN, "param_dtype": case.dtype}
    if software.master and case.dtype != "float32":
        return {"optimizer": _MASTER, "param_dtype": case.dtype}
    return {}


def _named(case: Case) -> dict[str, Any]:
    """The arguments of `autopar.manual`."""
    names = ("data", "replica", "tensor", "expert", "context", "zero", "remat", "sequence_parallel", "microbatches")
    return {name: getattr(case.layout, name) for name in names}


def _free(step: Any, args: Sequence[Any], cluster: Cluster, case: Case, options: autopar.Options) -> Plan:
    """The programme's own choice on the published logical mesh."""
    sizes = [n for n in (case.layout.data, case.layout.tensor) if n > 1] or [1]
    mesh = LogicalMesh(("x", "y")[: len(sizes)], tuple(sizes))
    if case.layout.bound:
        options = replace(options, memory_bytes=None, memory_fraction=1.0)
    asked = replace(options, microbatches=case.layout.microbatches, remat=case.layout.remat)
    traced, took = timed_trace(step, args, {}, asked, mesh.by_name)
    return plan_traced(traced, cluster, (mesh,), asked, trace_s=took, least=False)


class Moved(NamedTuple):
    """Seconds of collectives: those that layers wait for, and those that none waits for, by whether they cross `replica` axes."""

    awaited: float
    within: float
    between: float


def communication(plan: Plan, again: bool, whole_norms: bool = False) -> Moved:
    """Where the seconds of a plan's collectives go. No layer waits for gathers of state and for sums of gradients.

    Parameters that are kept in parts are gathered for forward and, not being kept whole, `again` for backward. `whole_norms`: those that
    the plan cuts are not.
    """
    assert plan._traced is not None
    program = planned(plan._traced, plan.data)
    graph = program.graph
    state = fed_by_state(graph, program.roles.carried) | set(graph.inputs)
    needed = _awaited(graph)
    seconds: Mapping[str, float] = {c.id: c.seconds for c in plan.data.collectives}
    within = between = 0.0
    for move in plan.data.sharding.moves:
        took = seconds.pop(move.id, 0.0)
        if whole_norms and of_norms(graph, move):
            continue
        if move.value in state:
            within += (2 if again else 1) * took
        elif move.value not in needed:
            within, between = (within, between + took) if "replica" in move.move.axes else (within + took, between)
        else:
            seconds[move.id] = took
    return Moved(sum(seconds.values()), within, between)


def _awaited(graph: Graph) -> set[int]:
    """The values that some matmul of forward or backward still needs."""
    found: set[int] = set()
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if (is_matmul(op) and op.phase != "update") or any(r in found for r in op.results):
            found.update(op.inputs)
    return found
