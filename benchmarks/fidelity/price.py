"""A case planned and priced: `autopar.manual` on the zoo's model, with few layers, and on from there in a straight line.

Layers are alike, so time and memory of a step grow by the same for each: two plans of few layers tell both, and a published model of a
hundred layers costs no more than one of ten. `tests/unit/test_fidelity.py` holds the line to a whole plan.
"""

from __future__ import annotations

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
from benchmarks.fidelity.case import SOFTWARE, Case, Software, Unmapped
from benchmarks.fidelity.mixed import master_weights
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


def price(case: Case) -> Price:
    """The price of a case. Raises `Unmapped` where its machine or plan is unknown to us."""
    software = SOFTWARE[case.software]
    try:
        cluster = machine(case)
    except (ValueError, ClusterError) as error:
        raise Unmapped(str(error)) from error
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
    predicted, moved = plan.data.predicted, communication(plan, case.layout.zero == 3)
    shares = (software.decomposes, software.overlaps, software.overlaps and software.hides_replicas)
    beside = sum(share * took for share, took in zip(shares, moved, strict=True))
    assert plan._traced is not None
    backend = backend_of(cluster.device.name)
    held = temporaries(plan.data, plan._traced, backend) if backend else predicted.temp_bytes
    return Price(times * predicted.compute_s, times * (sum(moved) - beside), times * beside, predicted.argument_bytes + held)


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
        raise Unmapped(f"it cannot be planned: {error}") from error


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
    names = ("data", "replica", "tensor", "pipeline", "expert", "context", "zero", "remat", "sequence_parallel", "microbatches")
    return {name: getattr(case.layout, name) for name in names}


def _free(step: Any, args: Sequence[Any], cluster: Cluster, case: Case, options: autopar.Options) -> Plan:
    """The programme's own choice on the published logical mesh, under the machine's memory."""
    sizes = [n for n in (case.layout.data, case.layout.tensor) if n > 1] or [1]
    mesh = LogicalMesh(("x", "y")[: len(sizes)], tuple(sizes))
    asked = replace(options, memory_bytes=None, memory_fraction=1.0, microbatches=case.layout.microbatches, remat=case.layout.remat)
    traced, took = timed_trace(step, args, {}, asked, mesh.by_name)
    return plan_traced(traced, cluster, (mesh,), asked, trace_s=took, least=False)


class Moved(NamedTuple):
    """Seconds of collectives: those that layers wait for, and those that none waits for, by whether they cross `replica` axes."""

    awaited: float
    within: float
    between: float


def communication(plan: Plan, again: bool) -> Moved:
    """Where the seconds of a plan's collectives go. No layer waits for gathers of state and for sums of gradients.

    Parameters that are kept in parts are gathered for forward and, not being kept whole, `again` for backward.
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
