"""Nodes whose devices see each other through a switch or a mesh of links, joined by a network: GPU clusters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from cost_models.collective import level_curves, ring_bytes, tree_depth
from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.groups import Axes, decompose
from cost_models.levels import across_levels, members_per_level, transfer
from cost_models.link import Link
from cost_models.rings import Counts, ring_links
from cost_models.topology import Flow, Topology


@dataclass(frozen=True)
class TwoLevel(Topology):
    """`shape = (nodes, devices per node)`. `link` is a device's inside its node, `network` a device's even share of its node's NICs.

    `switch_reduce_bytes_per_s`: an all-reduce of `n` devices inside a node may also be summed in the switch (NVLS), at `n/(n+1)` of this
    rate of operand; 0 where the switch cannot. `tree_efficiency`: part of the network's rate that a node-by-node tree reaches relative to
    a ring. `mesh`: where the node has no switch, the links between each pair of its devices (V100); groups that it does not join go over
    `host_bytes_per_s`. `group_bytes_per_s`: achieved rates of groups by size, where they are known better. `all_to_all_efficiency` and
    `point_efficiency`: parts of `link`'s rate that all-to-alls, and sends to one peer, reach; a ring keeps more channels busy. Both pay
    `direct_call_seconds` beside the link's: each pair of devices has to meet first.
    `devices_per_nic`: devices that share a NIC, which one of them alone may fill. `max_per_node` 0 means no limit.
    """

    kind = "two-level"

    shape: tuple[int, int]
    link: Link
    network: Link
    max_per_node: int = 0
    switch_reduce_bytes_per_s: float = 0.0
    tree_efficiency: float = 1.0
    all_to_all_efficiency: float = 1.0
    point_efficiency: float = 1.0
    direct_call_seconds: float = 0.0
    devices_per_nic: float = 1.0
    host_bytes_per_s: float = 0.0
    group_bytes_per_s: tuple[tuple[int, float], ...] = ()
    mesh: Counts = ()

    def __post_init__(self) -> None:
        if self.max_per_node and self.shape[1] > self.max_per_node:
            nodes = -(-prod(self.shape) // self.max_per_node)
            raise ClusterError(
                f"a node holds at most {self.max_per_node} of these devices; write the shape as {nodes}x{self.max_per_node}."
            )
        if self.mesh and (len(self.mesh) < self.shape[1] or any(len(row) != len(self.mesh) for row in self.mesh)):
            raise ClusterError(f"the mesh of links inside a node must be a square of at least {self.shape[1]} rows.")

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes."""
        return self.shape

    @cached_property
    def _group_rates(self) -> dict[int, float]:
        return dict(self.group_bytes_per_s)

    @cached_property
    def _one_link(self) -> float:
        """Achieved rate of one of a device's links, where the node has a mesh of them."""
        return self.link.rate / max(map(sum, self.mesh))

    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        nodes, inside = members = members_per_level(axes, self.shape)
        if inside * nodes == 1:
            return {}
        rate = self._rate(kind, axes, inside)
        if nodes == 1:
            found = self._inside(kind, inside, rate)
        else:
            reduced = self._reduced_inside(inside, rate)
            found = across_levels(kind, members, (self.network, self.link), self.tree_efficiency, rate, reduced)
        return {name: each.then(Curve(self.direct_call_seconds if name == "direct" else 0.0)) for name, each in found.items()}

    def _inside(self, kind: str, size: int, rate: float) -> dict[str, Curve]:
        """Within one node: as on any one level, or an all-reduce in the switch, where every operand travels once.

        A few links of a mesh are filled by so much less than all of them: the size at half rate is a latency times the rate.
        """
        link = replace(self.link, half_bytes=self.link.half_bytes * rate / self.link.rate) if self.mesh else self.link
        found = level_curves(link, kind, size, rate)
        if kind == "all_reduce" and self.switch_reduce_bytes_per_s and not self.mesh:
            found["switch"] = self.link.curve(1.0, 2 * tree_depth(size), self._switch_rate(size))
        return found

    def _switch_rate(self, size: int) -> float:
        """Operand bytes/s of a reduction in the switch: beside its operand, a device's link carries its `n`-th of the result."""
        return self.switch_reduce_bytes_per_s * size / (size + 1)

    def _reduced_inside(self, size: int, rate: float) -> float:
        """Per byte, what an all-reduce inside a node puts on each device's link, or its equivalent in the switch."""
        ring = ring_bytes("all_reduce", 1.0, size)
        return min(ring, rate / self._switch_rate(size)) if self.switch_reduce_bytes_per_s and size > 1 else ring

    def _rate(self, kind: str, axes: Axes, size: int) -> float:
        """What a device sends at inside its node."""
        if self.mesh:
            return self._mesh_rate(kind, axes, size)
        rate = self._group_rates.get(size, self.link.rate)
        if kind == "permute":
            return rate * self.point_efficiency
        if kind == "all_to_all":
            return rate * min(self.all_to_all_efficiency, max(size - 1, 1) * self.point_efficiency)
        return rate

    def _mesh_rate(self, kind: str, axes: Axes, size: int) -> float:
        """The slowest of the groups that a node holds: by its rings, or by its thinnest pair where each sends to each."""
        pieces = decompose(axes, self.shape)
        groups = node_groups(pieces[1], self.shape[1]) if pieces else ()
        if size == 1 or not groups:
            return self.link.rate
        if kind in ("all_to_all", "permute"):
            thinnest = min(self.mesh[a][b] for group in groups for a in group for b in group if a != b)
            peers = size - 1 if kind == "all_to_all" else 1
            return min(thinnest * peers * self._one_link, self.link.rate) or self.host_bytes_per_s or self._one_link / 2
        rings = min(ring_links(self.mesh, group) for group in groups)
        return rings * self._one_link or self.host_bytes_per_s or self._one_link / 2

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """See `Topology.transfer_seconds`. Between nodes one device fills at most its NIC, and all together the node's NICs."""
        most = (self.network.rate * self.devices_per_nic, self.link.rate * self.point_efficiency)
        return transfer(nbytes, list(flows), self.shape, (self.network, self.link), most)

    def submesh(self, shape: tuple[int, ...]) -> TwoLevel:
        """`(nodes, devices per node)` of this cluster, with their share of the NICs."""
        return replace(self, shape=node_shape(shape))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        groups = {str(size): rate for size, rate in self.group_bytes_per_s}
        mesh = [list(row) for row in self.mesh]
        return {"kind": self.kind, **asdict(self), "shape": list(self.shape), "group_bytes_per_s": groups, "mesh": mesh}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TwoLevel:
        """The inverse of `to_dict`; `shape` may have one entry, for one node."""
        fields = {name: value for name, value in data.items() if name != "kind"}
        groups = tuple(sorted((int(size), rate) for size, rate in data.get("group_bytes_per_s", {}).items()))
        given = {"link": Link(**data["link"]), "network": Link(**data["network"]), "mesh": tuple(map(tuple, data.get("mesh", ())))}
        return TwoLevel(**{**fields, **given, "shape": node_shape(data["shape"]), "group_bytes_per_s": groups})


def node_groups(pieces: Axes, devices: int) -> tuple[tuple[int, ...], ...]:
    """Members of every group inside a node, for the axes' pieces there.

    >>> node_groups(((2, 2),), 4), node_groups(((2, 1), (2, 4)), 8)
    (((0, 2), (1, 3)), ((0, 1, 4, 5), (2, 3, 6, 7)))
    """
    offsets = sorted(map(sum, product(*(range(0, size * stride, stride) for size, stride in pieces))))
    left, found = set(range(devices)), []
    while left:
        group = tuple(min(left) + offset for offset in offsets)
        found.append(group)
        left -= set(group)
    return tuple(found)


def node_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """`(8,)` is one node of 8, `(2, 8)` two nodes."""
    if len(shape) > 2:
        raise ClusterError(f"{'x'.join(map(str, shape))} has too many numbers; nodes and devices per node are NODESxDEVICES, such as 2x8.")
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
