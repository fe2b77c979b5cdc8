"""From points to a cluster: each curve is fitted, and what was not measured is taken from the cluster given as a start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cost_models.cluster import Cluster
from cost_models.collective import KINDS
from cost_models.curve import Curve
from cost_models.device import Device
from cost_models.fit import Sample, fit_curve, fit_figures
from cost_models.groups import Axes
from cost_models.link import Link
from cost_models.measured import Base, Measured
from cost_models.profile.questions import shape_of
from cost_models.shared import SharedMemory
from cost_models.switch import TwoLevel
from cost_models.torus import Torus

Points = Mapping[str, Mapping[str, Sample]]
"""Samples by curve, then by what was asked for (`Question.at`)."""

Observed = tuple[str, float, Axes, float]
"""Kind, bytes, group and seconds of a collective."""

_DIRECT = ("all_to_all", "permute")
_LEAST = 2
_LARGE = 16
_POLYNOMIAL_FLOPS = 64


@dataclass(frozen=True)
class Accuracy:
    """How far the fitted cluster is from the points of one curve: relative errors of its prices."""

    curve: str
    points: int
    median_error: float
    worst_error: float
    spread: float
    """Median spread of the repeats, which no fit can undo."""


def fitted(points: Points, start: Cluster) -> Cluster:
    """The cluster that explains the points best; `start` gives the way its devices are joined, and every figure that has no points."""
    device = fit_device(points, start.device)
    base = start.topology.base if isinstance(start.topology, Measured) else start.topology
    observed = observations(points)
    if not observed:
        return replace(start, device=device, topology=base)
    found = tuple((kind, group, fit_curve(each)) for (kind, group), each in curves_of(points).items() if len(each) > _LEAST)
    sent = _sizes(points.get("transfer", {}))
    topology = Measured(fit_base(observed, base), base.dims, found, fit_curve(sent) if len(sent) > _LEAST else None)
    return replace(start, device=device, topology=topology)


def fit_device(points: Points, start: Device) -> Device:
    """Rates as measured, so efficiencies of 1. `half_flops` is the middle of what the dtypes ask for."""
    launch = next((sample.seconds for sample in points.get("launch", {}).values()), start.launch_seconds)
    peaks, halves = dict(start.peak_flops), []
    for curve, samples in points.items():
        if curve.startswith("matmul ") and samples:
            fit = fit_curve([(shape_of(at).flops, _beyond(sample.seconds, launch)) for at, sample in samples.items()], fixed=False)
            per_flop, per_root = fit.terms[0]
            if per_flop > 0:
                peaks[curve.split(" ")[1]] = 1 / per_flop
                halves.append((per_root / per_flop) ** 1.5)
    measured = {"matmul_efficiency": 1.0, "half_flops": median(halves), "dtype_efficiency": ()} if halves else {}
    memory = _memory_rate(points, launch)
    vector = [int(at) / 4 * _POLYNOMIAL_FLOPS / s.seconds for at, s in points.get("vector float32", {}).items()]
    return replace(
        start,
        peak_flops=tuple(sorted(peaks.items())),
        vector_flops=max(vector, default=start.vector_flops),
        memory_bytes_per_s=memory or start.memory_bytes_per_s,
        memory_efficiency=1.0 if memory else start.memory_efficiency,
        launch_seconds=launch,
        **measured,
    )


def _memory_rate(points: Points, launch: float) -> float:
    """Bytes/s, read and written, of large element-wise passes, which no cache holds; 0 where none was measured."""
    sizes = [(size, _beyond(seconds, launch)) for size, seconds in _sizes(points.get("memory", {}))]
    sizes = [each for each in sizes if each[0] * _LARGE >= sizes[-1][0]]
    return 2 / fit_curve(sizes, ramp=False, fixed=False).terms[0][0] if sizes else 0.0


def _beyond(seconds: float, launch: float) -> float:
    """What an op takes beside its launch, which prices add; a tenth at least, as both were measured with noise."""
    return max(seconds - launch, 0.1 * seconds)


def curves_of(points: Points) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """`(bytes, seconds)` by collective and group."""
    found = {}
    for curve, samples in points.items():
        if curve.startswith("collective "):
            _, kind, group = curve.split(" ")
            found[kind, group] = _sizes(samples)
    return found


def observations(points: Points) -> list[Observed]:
    """Kind, bytes, group and seconds of every collective that was measured."""
    every = curves_of(points)
    return [(kind, size, (_axis(group),), seconds) for (kind, group), sizes in every.items() for size, seconds in sizes]


def _axis(group: str) -> tuple[int, int]:
    size, stride = group.split(":")
    return int(size), int(stride)


def _sizes(samples: Mapping[str, Sample]) -> list[tuple[float, float]]:
    return sorted((float(at), sample.seconds) for at, sample in samples.items())


def fit_base(observed: Sequence[Observed], base: Base) -> Base:
    """The topology's own figures fitted to all collectives together, for groups and shapes that were not measured."""
    if isinstance(base, SharedMemory):
        return _fit_shared(observed, base)
    for wanted, names in _figures(base):
        mine = [each for each in observed if wanted(each)]
        start = {name: value for name, value in ((name, _get(base, name)) for name in names) if value > 0}
        if len(mine) > len(start) and start:
            base = _fit_named(mine, base, start)
    return base


def _fit_named(observed: Sequence[Observed], base: Base, start: Mapping[str, float]) -> Base:
    def predict(figures: Mapping[str, float]) -> list[float]:
        topology = _with(base, figures)
        return [topology.seconds(kind, nbytes, axes) for kind, nbytes, axes, _ in observed]

    return _with(base, fit_figures(start, predict, [seconds for *_, seconds in observed]))


def _figures(base: Base) -> list[tuple[Callable[[Observed], bool], tuple[str, ...]]]:
    """Which collectives tell which figures, in the order in which they are fitted."""
    link = ("link.bytes_per_s", "link.call_seconds", "link.latency_seconds", "link.half_bytes")
    network = ("network.bytes_per_s", "network.latency_seconds", "network.half_bytes")
    if isinstance(base, TwoLevel):
        per_node = base.shape[1]
        switch = ("switch_reduce_bytes_per_s",) if base.switch_reduce_bytes_per_s else ()
        direct = ("all_to_all_efficiency", "point_efficiency", "direct_call_seconds")
        return [
            (lambda each: _span(each) <= per_node and each[0] not in _DIRECT, (*link, *switch)),
            (lambda each: _span(each) <= per_node and each[0] in _DIRECT, direct),
            (lambda each: _span(each) > per_node, network),
        ]
    if isinstance(base, Torus):
        slices, cores = network if base.shape[0] > 1 else (), ("core_bytes_per_s",) if base.cores > 1 else ()
        return [(lambda each: True, (*link, *slices, *cores))]
    return []


def _span(each: Observed) -> int:
    """Devices from a group's first to its last, and the gap after it."""
    (size, stride), *_ = each[2]
    return size * stride


def _get(base: Base, name: str) -> float:
    table, _, figure = name.rpartition(".")
    return float(getattr(getattr(base, table) if table else base, figure))


def _with(base: Base, figures: Mapping[str, float]) -> Base:
    """The topology with figures of its own and of its links replaced."""
    own = {name: value for name, value in figures.items() if "." not in name}
    links: dict[str, Link] = {}
    for name, value in figures.items():
        table, _, figure = name.rpartition(".")
        if table:
            links[table] = replace(links.get(table, getattr(base, table)), **{figure: value})
    return replace(base, **own, **links)  # type: ignore[arg-type]


def _fit_shared(observed: Sequence[Observed], base: SharedMemory) -> SharedMemory:
    """A fixed cost and a rate per kind, from groups of every size."""
    calls, rates = dict(base.call_seconds), dict(base.bytes_per_s)
    for kind in KINDS:
        mine = [(size * (axes[0][0] if kind == "all_gather" else 1), seconds) for each, size, axes, seconds in observed if each == kind]
        if len(mine) < _LEAST:
            continue
        curve = fit_curve(mine, ramp=False)
        slope = curve.terms[0][0] or 0.1 * max(seconds for _, seconds in mine) / max(size for size, _ in mine)
        calls[kind], rates[kind] = max(curve.fixed, 1e-7), 1 / slope
    return replace(base, call_seconds=tuple(sorted(calls.items())), bytes_per_s=tuple(sorted(rates.items())))


def accuracy(points: Points, cluster: Cluster) -> list[Accuracy]:
    """Per curve, how far the cluster's prices are from the points. A chain's launch and its program's call are not part of a price."""
    found = []
    for curve, samples in points.items():
        pairs = [(predict(curve, at, cluster), sample.seconds) for at, sample in samples.items()]
        errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
        if errors:
            found.append(Accuracy(curve, len(errors), median(errors), max(errors), median(s.spread for s in samples.values())))
    return found


def predict(curve: str, at: str, cluster: Cluster) -> float:
    """What the cluster's prices say to one question, in seconds."""
    what, *rest = curve.split(" ")
    if what == "launch":
        return cluster.launch_seconds
    if what == "memory":
        return cluster.launch_seconds + cluster.compute_seconds(0.0, 2 * float(at), "float32", False)
    if what == "vector":
        work = float(at) / 4 * _POLYNOMIAL_FLOPS
        return cluster.launch_seconds + cluster.compute_seconds(work, 2 * float(at), rest[0], False)
    if what == "matmul":
        shape = shape_of(at)
        return cluster.launch_seconds + cluster.compute_seconds(shape.flops, 0.0, rest[0], True, shape)
    if what == "collective":
        return cluster.collective_seconds(rest[0], float(at), (_axis(rest[1]),))
    half = cluster.num_devices // 2
    return cluster.transfer_seconds(float(at), [(device, half + device) for device in range(half)])


def curve_of(points: Points, name: str) -> Curve | None:
    """The fit through the points of one curve; None where there are none. Sizes are FLOPs for matmuls and bytes for others."""
    samples = points.get(name, {})
    if not samples or name == "launch":
        return None
    size = (lambda at: shape_of(at).flops) if name.startswith("matmul ") else float
    return fit_curve([(size(at), sample.seconds) for at, sample in samples.items()])
