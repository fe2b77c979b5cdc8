"""Which cluster a published row was measured on, from what its author calls the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cost_models
from cost_models import Cluster, TwoLevel

# Words of the name, in order of precedence, and the preset that they mean.
PRESETS = (
    *(("gb200", "gb200-nvl72"), ("b300", "b300-sxm"), ("b200", "b200-sxm"), ("h200", "h200-sxm"), ("h100", "h100-sxm")),
    *(("a100-40", "a100-40"), ("a100-sxm4-40", "a100-40"), ("p4d", "a100-40"), ("a100", "a100-80")),
    *(("dgx-2", "v100-dgx2"), ("v100-32gb", "v100-dgx2"), ("v100", "v100-p3")),
    *(("mi300x", "mi300x"), ("l4", "l4"), ("rtx 4090", "rtx4090")),
    *(("v7x", "v7x"), ("v6e", "v6e"), ("v5p", "v5p"), ("v5e", "v5e"), ("v5 lite", "v5e"), ("v4", "v4"), ("v3", "v3")),
)
_NICS = re.compile(r"\b(\d+)\s*x\s*(?:(?!large)\w+\s+)?(\d+)\s*Gb(?:/s|it|ps)?\b")  # bits: memory is in GB
_SHAPE = re.compile(r"\b(\d+(?:x\d+)+)\b")
_COUNT = re.compile(r"(v\d[a-z]*)-(\d+)\b")
_NAMED_BY_CORES = ("v2", "v3", "v4", "v5p")
"""Slices of these are named by cores, two of which are a chip."""


def preset_of(hardware: str) -> str | None:
    """The preset that a machine's name means, or None."""
    text = hardware.lower()
    return next((preset for word, preset in PRESETS if re.search(rf"(?<![a-z0-9]){re.escape(word)}", text)), None)


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """The cluster of a row with the columns `hardware`, `nodes` and `devices`. Raises `ValueError` that says what is missing.

    Network interfaces that the name tells, as in `4x100Gb EFA`, replace the preset's. A TPU's shape is the one in its name, in chips, or
    `devices` chips.
    """
    preset = preset_of(row["hardware"])
    if preset is None:
        raise ValueError("no preset for this machine")
    if "TPU" in row["hardware"]:
        return cost_models.load_cluster(f"{preset}:{_tpu_shape(row)}")
    if not row["devices"]:
        raise ValueError("the number of devices is not given")
    devices, nodes = int(row["devices"]), int(row["nodes"] or 1)
    return with_nics(cost_models.load_cluster(f"{preset}:{nodes}x{devices // nodes}"), row["hardware"])


def _tpu_shape(row: Mapping[str, Any]) -> str:
    shape, count = _SHAPE.search(row["hardware"]), _COUNT.search(row["hardware"].lower())
    if shape:
        return shape[1]
    if "multi-slice" in row["hardware"] or not (count or row["devices"]):
        raise ValueError("the number of chips is not given")
    if row["devices"] or not count:
        return row["devices"]
    return str(int(count[2]) // (2 if count[1] in _NAMED_BY_CORES else 1))


def with_nics(cluster: Cluster, hardware: str) -> Cluster:
    """The cluster with as many network interfaces of such a rate as the name tells of each node, if it does."""
    found, topology = _NICS.search(hardware), cluster.topology
    if not found or not isinstance(topology, TwoLevel):
        return cluster
    nics, rate = int(found[1]), float(found[2]) * 1e9 / 8
    per_node = topology.max_per_node or topology.shape[1]
    network = replace(topology.network, bytes_per_s=nics * rate / per_node)
    return replace(cluster, topology=replace(topology, network=network, devices_per_nic=max(1.0, per_node / nics)))
