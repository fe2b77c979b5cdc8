"""Nodes whose devices see each other through a switch, joined by a network: GPU clusters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cost_models.collective import level_seconds, ring_bytes, ring_steps, tree_depth
from cost_models.errors import ClusterError
from cost_models.groups import Axes, decompose
from cost_models.link import Link


@dataclass(frozen=True)
class TwoLevel:
    """`shape = (nodes, devices per node)`. `link` is a device's inside its node, `network` a device's even share of its node's NICs.

    `switch_reduce_bytes_per_s`: an all-reduce inside a node may also be summed in the switch (NVLS), each device sending its operand once
    at this rate; 0 where the switch cannot. `tree_efficiency`: part of the network's rate that a node-by-node tree reaches relative to a
    ring. `group_bytes_per_s`: achieved rates of smaller groups where links are not switched (V100). `max_per_node` 0 means no limit.
    """

    kind = "two-level"

    shape: tuple[int, int]
    link: Link
    network: Link
    max_per_node: int = 0
    switch_reduce_bytes_per_s: float = 0.0
    tree_efficiency: float = 1.0
    group_bytes_per_s: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.max_per_node and self.shape[1] > self.max_per_node:
            nodes = -(-prod(self.shape) // self.max_per_node)
            raise ClusterError(
                f"a node holds at most {self.max_per_node} of these devices; write the shape as {nodes}x{self.max_per_node}."
            )

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes."""
        return self.shape

    @cached_property
    def _routes(self) -> dict[Axes, tuple[int, int]]:
        return {}

    @cached_property
    def _group_rates(self) -> dict[int, float]:
        return dict(self.group_bytes_per_s)

    def seconds(self, kind: str, nbytes: float, axes: Axes) -> float:
        """See `Cluster.collective_seconds`."""
        route = self._routes.get(axes)
        if route is None:
            route = self._routes[axes] = self._route(axes)
        inside, nodes = route
        if inside * nodes == 1:
            return 0.0
        return self._inside(kind, nbytes, inside) if nodes == 1 else self._across(kind, nbytes, inside, nodes)

    def _route(self, axes: Axes) -> tuple[int, int]:
        """Group members inside one node, and nodes. A group that a node border cuts unevenly counts as one member per node."""
        pieces = decompose(axes, self.shape)
        if pieces is None:
            return 1, prod(size for size, _ in axes)
        nodes, inside = (prod(size for size, _ in each) for each in pieces)
        return inside, nodes

    def _link_rate(self, size: int) -> float:
        return self._group_rates.get(size, self.link.rate)

    def _inside(self, kind: str, nbytes: float, size: int) -> float:
        """Within one node: ring or tree, or reduced in the switch, where every operand travels once."""
        seconds = level_seconds(self.link, kind, nbytes, size, self._link_rate(size))
        if kind == "all_reduce" and self.switch_reduce_bytes_per_s:
            return min(seconds, self.link.seconds(nbytes, 2 * tree_depth(size), self.switch_reduce_bytes_per_s))
        return seconds

    def _across(self, kind: str, nbytes: float, inside: int, nodes: int) -> float:
        """`inside` members in each of `nodes` nodes. All groups run at once, so a group gets its members' share of the NICs.

        A flat ring crosses each node border once with all of its traffic. A two-stage all-reduce crosses with `2(m-1)/m` of the operand
        only. Inside it may reduce in the switch. Transfers inside and across are pipelined: the slower one counts. A permute between
        nodes is taken to stay on one member's share.
        """
        size = inside * nodes
        if kind == "all_reduce":
            ring = ring_bytes(kind, nbytes, size)
            tree = ring_bytes(kind, nbytes, nodes) / self.tree_efficiency
            return min(
                self._levels(ring, ring, (2 * (size - nodes), 2 * nodes), inside),
                self._levels(self._reduced_inside(nbytes, inside), tree, (2 * tree_depth(inside), 2 * tree_depth(nodes)), inside),
            )
        steps = ring_steps(kind, inside), ring_steps(kind, nodes)
        if kind == "all_to_all":
            far = (size - inside) / size
            return self._levels((inside - 1) / size * nbytes, far * nbytes * inside, steps, inside)
        if kind == "permute":
            return self._levels(nbytes, nbytes * inside, steps, inside)
        moved = ring_bytes(kind, nbytes, size)
        return self._levels(moved, moved, steps, inside)

    def _reduced_inside(self, nbytes: float, size: int) -> float:
        """Bytes on each device's link, or their equivalent in the switch, for an all-reduce inside a node."""
        ring = ring_bytes("all_reduce", nbytes, size)
        return min(ring, nbytes * self.link.rate / self.switch_reduce_bytes_per_s) if self.switch_reduce_bytes_per_s else ring

    def _levels(self, near: float, far: float, steps: tuple[int, int], inside: int) -> float:
        """Bytes on each device's link, bytes of one group on a node's NICs, and steps at both levels, to seconds."""
        fixed = self.network.call_seconds + steps[0] * self.link.latency_seconds + steps[1] * self.network.latency_seconds
        across = self.network.transfer_seconds(far, self.network.rate * inside)
        if inside == 1:
            return fixed + across
        return fixed + self.link.call_seconds + max(self.link.transfer_seconds(near, self._link_rate(inside)), across)

    def submesh(self, shape: tuple[int, ...]) -> TwoLevel:
        """`(nodes, devices per node)` of this cluster, with their share of the NICs."""
        return replace(self, shape=node_shape(shape))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        groups = {str(size): rate for size, rate in self.group_bytes_per_s}
        return {"kind": self.kind, **asdict(self), "shape": list(self.shape), "group_bytes_per_s": groups}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TwoLevel:
        """The inverse of `to_dict`; `shape` may have one entry, for one node."""
        fields = {name: value for name, value in data.items() if name != "kind"}
        groups = tuple(sorted((int(size), rate) for size, rate in data.get("group_bytes_per_s", {}).items()))
        links = {"link": Link(**data["link"]), "network": Link(**data["network"])}
        return TwoLevel(**{**fields, **links, "shape": node_shape(data["shape"]), "group_bytes_per_s": groups})


def node_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """`(8,)` is one node of 8, `(2, 8)` two nodes."""
    if len(shape) > 2:
        raise ClusterError(f"{'x'.join(map(str, shape))} has too many numbers; nodes and devices per node are NODESxDEVICES, such as 2x8.")
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
