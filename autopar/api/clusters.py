"""What a user may give as mesh or cluster, and which preset the devices at hand are."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

import cost_models
from autopar.errors import ClusterError, UsageError
from autopar.ir.mesh import LogicalMesh
from cost_models import Cluster

ClusterLike = Cluster | Mesh | str | os.PathLike[str] | None

# Words of `device_kind`, in order of precedence.
_GPUS = (
    *(("h200", "h200-sxm"), ("h100", "h100-sxm"), ("gb200", "gb200-nvl72"), ("b300", "b300-sxm"), ("b200", "b200-sxm")),
    *(("a100 40gb", "a100-40"), ("a100", "a100-80"), ("v100 sxm3", "v100-dgx2"), ("v100", "v100-p3")),
    *(("mi300x", "mi300x"), ("l4", "l4"), ("rtx 4090", "rtx4090")),
)
_TPUS = (
    *(("v5 lite", "v5e"), ("v5e", "v5e"), ("v5p", "v5p"), ("v5", "v5p")),
    *(("v6 lite", "v6e"), ("v6e", "v6e"), ("v4", "v4"), ("v3", "v3"), ("tpu7x", "v7x"), ("v7x", "v7x")),
)
_OTHER_LINKS = ("pcie", "nvl", "mig")
"""Words of GPUs that are not joined as the presets are."""


def resolve_cluster(cluster: ClusterLike) -> tuple[Cluster, tuple[LogicalMesh, ...] | None, Mesh | None]:
    """A cluster with prices, the logical mesh that a JAX mesh fixes (None: search), and that JAX mesh.

    Raises `ClusterError` for a name that no preset has, or devices that none describes.
    """
    if isinstance(cluster, Cluster):
        return cluster, None, None
    if isinstance(cluster, Mesh):
        return cluster_of_devices(list(cluster.devices.flat)), (logical_mesh(cluster),), cluster
    try:
        if cluster is None:
            return cluster_of_devices(jax.devices()), None, None
        if isinstance(cluster, (str, os.PathLike)):
            return cost_models.load_cluster(os.fspath(cluster)), None, None
    except cost_models.ClusterError as error:
        raise ClusterError(str(error)) from None
    raise UsageError(
        f"a mesh is a jax.sharding.Mesh, an autopar.Cluster, a string such as 'h100-sxm:8x8' or None, not {type(cluster).__name__}."
    )


def device_count(cluster: ClusterLike) -> int | None:
    """Devices that a cluster is made of, told without measuring any; None for those that are here. Raises `ClusterError`."""
    if isinstance(cluster, (str, os.PathLike)):
        try:
            return cost_models.load_cluster(os.fspath(cluster), measure=False).num_devices
        except cost_models.ClusterError as error:
            raise ClusterError(str(error)) from None
    return cluster.num_devices if isinstance(cluster, Cluster) else None


def logical_mesh(mesh: Mesh) -> LogicalMesh:
    """Names and sizes of a JAX mesh's axes; their types make no difference."""
    return LogicalMesh(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape))


def cluster_of_devices(devices: Sequence[Any]) -> Cluster:
    """The preset for the devices at hand, in their shape; simulated and CPU devices are `host`, measured.

    Raises `ClusterError` where no preset describes them.
    """
    return cost_models.load_cluster(preset_of_devices(devices))


def preset_of_devices(devices: Sequence[Any]) -> str:
    """`PRESET:SHAPE` for devices: by kind, GPUs by process (one for each node), TPU chips by their coordinates."""
    kind, platform = devices[0].device_kind, devices[0].platform
    if platform == "cpu":
        return f"host:{len(devices)}"
    words = re.findall(r"[a-z0-9]+", kind.lower())
    table = _TPUS if platform == "tpu" else _GPUS
    preset = next((p for wanted, p in table if set(wanted.split()) <= set(words)), None)
    if preset is None or set(words) & set(_OTHER_LINKS):
        raise ClusterError(
            f"no preset describes devices of kind {kind!r}. Pass the preset that comes closest, such as 'h100-sxm:{len(devices)}', or the "
            "path of a profile written by `autopar profile`."
        )
    return f"{preset}:{_torus(devices, preset) if platform == 'tpu' else _nodes(devices)}"


def _nodes(devices: Sequence[Any]) -> str:
    """`NODESxDEVICES`. With one device for each process, nodes cannot be told apart, and are taken to hold eight."""
    count = len(devices)
    per_process = set(Counter(d.process_index for d in devices).values())
    if len(per_process) > 1:
        return str(count)
    size = per_process.pop()
    if size == 1 and count > 1:
        size = 8 if count % 8 == 0 else count
    return f"{count // size}x{size}" if count > size else str(count)


def _torus(devices: Sequence[Any], preset: str) -> str:
    """Slices and chips along each dimension, the last one innermost in JAX's order, where the chips fill a box; else their number."""
    rank = len(cost_models.describe(preset)["default_shape"]) - 1
    chips = {(getattr(d, "slice_index", 0), *reversed(d.coords[:rank])) for d in devices}
    sizes = [len({chip[i] for chip in chips}) for i in range(rank + 1)]
    return "x".join(map(str, sizes)) if prod(sizes) == len(chips) else str(len(chips))
