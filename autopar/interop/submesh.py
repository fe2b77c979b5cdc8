"""Submeshes of a two-level cluster: which device counts a stage may have, and where stages of such counts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import MeshError


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """`nodes` whole nodes, or, with `nodes` 1, `devices` of one node. `devices` is per node."""

    nodes: int
    devices: int

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices}"


def submeshes(nodes: int, devices: int, every_count: bool = False) -> tuple[Submesh, ...]:
    """The submeshes that stages on a cluster of `nodes` with `devices` each may have, from small to large (Zheng et al. 2022, section 5.2).

    Powers of two that divide a node, and whole nodes: powers of two of them and all of them, or with `every_count` any number. Each size
    inside a node divides the next one, so whatever sizes add up to the cluster tile it too (`place`). Raises `MeshError` for
    counts below 1.
    """
    if nodes < 1 or devices < 1:
        raise MeshError(f"a cluster needs at least one node and one device in each, not {nodes} and {devices}.")
    inside = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0 and 2**k < devices]
    counts = range(1, nodes + 1) if every_count else sorted({*(2**k for k in range(nodes.bit_length())), nodes})
    return (*(Submesh(1, size) for size in inside), *(Submesh(count, devices) for count in counts))


def place(stages: Sequence[Submesh], nodes: int, devices: int) -> tuple[int, ...]:
    """The first device of each stage, devices being numbered node by node. No stage that is smaller than a node reaches across two.

    The largest come first. Stages of one size keep their order, so that neighbours in the pipeline are neighbours in the cluster. Raises
    `MeshError` for stages that do not fill the cluster.
    """
    if sum(stage.size for stage in stages) != nodes * devices:
        sizes = ", ".join(map(str, stages))
        raise MeshError(f"stages on {sizes} do not fill {nodes} nodes of {devices} devices; let their sizes add up to {nodes * devices}.")
    first = [0] * len(stages)
    at = 0
    for s in sorted(range(len(stages)), key=lambda s: -stages[s].size):
        if at % devices + stages[s].devices > devices:
            raise MeshError(f"stage {s} on {stages[s]} does not fit beside the others in nodes of {devices}; use sizes of `submeshes`.")
        first[s] = at
        at += stages[s].size
    return tuple(first)
