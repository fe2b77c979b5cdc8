"""`autopar profile`: the devices at hand measured, as a profile that plans can use."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import cost_models
from autopar.api.clusters import preset_of_devices
from autopar.errors import ClusterError, UsageError
from cost_models import Cluster
from cost_models.profile import cache, session
from cost_models.profile.questions import questions


def profile(
    out: str | os.PathLike[str],
    *,
    budget_s: float = 60.0,
    links: str | None = None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> session.Outcome:
    """Measure the devices that JAX sees for `budget_s` seconds and write `out`, a TOML profile; what it holds already is not asked again.

    `links` is a preset, or `PRESET:SHAPE`, whose links stand in for those that are not here: one device measured, the rest as given.
    Raises `ClusterError` for devices that no preset describes where `links` is not given, and for a file that is not theirs; `UsageError`
    in a program of several processes, whose clocks would stop the measuring at different points.
    """
    if jax.process_count() > 1:
        raise UsageError("a profile is measured by one process, on its own devices; start it without jax.distributed on one node.")
    devices = jax.devices()
    try:
        start = start_cluster(devices, links)
        dims = start.topology.dims if start.num_devices == len(devices) else (len(devices),)
        asked = tuple(questions(devices[0].platform, dims))
        sitting = session.Session(Path(out), start, whereabouts(devices, links), asked)
        from cost_models.profile.bench import Bench  # jitted programs; only a profile needs them

        return session.measure(sitting, Bench(devices).ask, budget_s, progress)
    except cost_models.ClusterError as error:
        raise ClusterError(str(error)) from None


def start_cluster(devices: Sequence[Any], links: str | None) -> Cluster:
    """What is known of the devices beforehand: how they are joined, and every figure that will not be measured."""
    try:
        own = cost_models.load_cluster(preset_of_devices(devices), measure=False)
    except ClusterError:
        if links is None:
            raise
        own = cost_models.load_cluster(links)
    name = own.device.name if devices[0].platform == "cpu" else devices[0].device_kind
    device = replace(own.device, name=name, memory_bytes=memory_of(devices, own))
    return replace(cost_models.load_cluster(links, measure=False) if links else own, device=device)


def memory_of(devices: Sequence[Any], own: Cluster) -> int:
    """Bytes of one device: the machine's share of a simulated one; of others what the preset says, or else the runtime."""
    if devices[0].platform == "cpu":
        return cache.memory_bytes() // len(devices)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    return max(own.device.memory_bytes, limit)


def whereabouts(devices: Sequence[Any], links: str | None) -> dict[str, Any]:
    """What tells these devices from others, for the profile."""
    found = {"platform": devices[0].platform, "device_kind": devices[0].device_kind, "devices": len(devices)}
    if devices[0].platform == "cpu":
        found["device_kind"] = f"{platform.machine()} with {cache.cores()} cores"
    return {**found, "processes": jax.process_count(), "jax": jax.__version__, "links": links or ""}
