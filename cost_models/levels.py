"""Devices in nested units: devices in boards, boards in nodes, nodes in pods, with one kind of link at each border."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from cost_models.collective import level_curves, ring_bytes, ring_steps, tree_depth
from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.groups import Axes, decompose, strides
from cost_models.link import Link
from cost_models.topology import Flow, Topology


@dataclass(frozen=True)
class Levels(Topology):
    """`shape = (units, ..., devices)`, outermost first, with as many `links`.

    `links[i]` joins the units of level `i`; its rate is one device's even share of what its unit has there. So the last link is a
    device's own, and a PCIe host of two sockets with four devices each is `shape (nodes, 2, 4)`: the NIC's eighth, the socket link's
    quarter, the device's lanes. `most` limits each entry of the shape; 0 means no limit.
    """

    kind = "levels"

    shape: tuple[int, ...]
    links: tuple[Link, ...]
    most: tuple[int, ...] = ()
    tree_efficiency: float = 1.0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.links):
            raise ClusterError(f"a shape of {len(self.shape)} levels needs as many links, not {len(self.links)}.")
        for size, limit in zip(self.shape, self.most, strict=False):
            if limit and size > limit:
                raise ClusterError(f"{'x'.join(map(str, self.shape))} is too large: at most {limit} where it says {size}.")

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes."""
        return self.shape

    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        members = members_per_level(axes, self.shape)
        if prod(members) == 1:
            return {}
        if prod(members[:-1]) == 1:
            return level_curves(self.links[-1], kind, members[-1], self.links[-1].rate)
        return across_levels(kind, members, self.links, self.tree_efficiency)

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """See `Topology.transfer_seconds`. A border carries its busiest unit's flows at the unit's rate, of which one may use all."""
        most = [link.rate * step for link, step in zip(self.links, strides(self.shape), strict=True)]
        return transfer(nbytes, list(flows), self.shape, self.links, most)

    def submesh(self, shape: tuple[int, ...]) -> Levels:
        """Part of this cluster, as nodes and devices or level by level."""
        return replace(self, shape=full_shape(shape, len(self.links), self.most))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; links by position, outermost first."""
        links = {f"link{i}": asdict(link) for i, link in enumerate(self.links)}
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "most": list(self.most),
            "tree_efficiency": self.tree_efficiency,
            "links": links,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Levels:
        """The inverse of `to_dict`."""
        fields = {name: value for name, value in data.items() if name not in ("kind", "links", "shape", "most")}
        links = tuple(Link(**data["links"][f"link{i}"]) for i in range(len(data["links"])))
        most = tuple(data.get("most", ()))
        return Levels(shape=full_shape(tuple(data["shape"]), len(links), most), links=links, most=most, **fields)


def full_shape(shape: tuple[int, ...], levels: int, most: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The shape of every level, from `(devices,)` or `(nodes, devices)`, which fill units from the innermost level on.

    >>> full_shape((8,), 3, (0, 2, 4)), full_shape((2, 8), 3, (0, 2, 4)), full_shape((3,), 3), full_shape((2, 2, 4), 3)
    ((1, 2, 4), (2, 2, 4), (1, 1, 3), (2, 2, 4))
    """
    if len(shape) == levels:
        return shape
    if len(shape) > 2:
        raise ClusterError(f"{'x'.join(map(str, shape))} is neither NODESxDEVICES nor one number for each of {levels} levels.")
    nodes, left = (1, shape[0]) if len(shape) == 1 else shape
    found: list[int] = []
    for limit in reversed(most[1:] if most else (0,) * (levels - 1)):
        size = max(each for each in range(1, left + 1) if left % each == 0 and (each <= limit or not limit))
        found.insert(0, size)
        left //= size
    if left > 1:
        raise ClusterError(f"{shape[-1]} devices do not fill the units of a node, which hold {'x'.join(map(str, most[1:]))}.")
    return nodes, *found


def members_per_level(axes: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A group's members at each level. One that a border cuts unevenly counts as one member per outermost unit.

    >>> members_per_level(((4, 4),), (2, 8)), members_per_level(((6, 1),), (3, 8))
    ((2, 2), (6, 1))
    """
    pieces = decompose(axes, shape)
    if pieces is None:
        return (prod(size for size, _ in axes), *(1,) * (len(shape) - 1))
    return tuple(prod(size for size, _ in each) for each in pieces)


def across_levels(
    kind: str,
    members: tuple[int, ...],
    links: Sequence[Link],
    tree_efficiency: float = 1.0,
    own_rate: float = 0.0,
    reduced_inside: float = 0.0,
) -> dict[str, Curve]:
    """A collective whose group has `members` at each of several levels. All like groups run at once, so a group has its members' share.

    One *flat* ring crosses every border once with all of its traffic. A *hierarchical* all-reduce crosses level `i`, where `m` members
    meet, with `2(m-1)/m` of the operand, at `tree_efficiency` of the rate. An all-to-all crosses it with what is meant for members outside.
    The levels are pipelined: the slowest counts, and each pays its calls and steps. `own_rate` is a device's on its own link where that is
    not the link's, `reduced_inside` what an all-reduce sends there per byte where a switch sums.
    """
    if kind == "all_reduce":
        flat, tree = ring_bytes(kind, 1.0, prod(members)), 1.0 / tree_efficiency
        steps = [2 * tree_depth(m) for m in members]
        inside = reduced_inside or ring_bytes(kind, 1.0, members[-1])
        staged = [*(ring_bytes(kind, tree, m) for m in members[:-1]), inside]
        return {
            "flat": _pipelined([flat] * len(members), _hops(members), members, links, own_rate),
            "hierarchical": _pipelined(staged, steps, members, links, own_rate),
        }
    steps = [ring_steps(kind, m) for m in members]
    if kind in ("all_to_all", "permute"):
        return {"direct": _pipelined(_direct(kind, members), steps, members, links, own_rate)}
    return {"flat": _pipelined([ring_bytes(kind, 1.0, prod(members))] * len(members), steps, members, links, own_rate)}


def _hops(members: tuple[int, ...]) -> list[int]:
    """Borders of each level that a flat all-reduce ring passes, there and back."""
    units = [prod(members[: i + 1]) for i in range(len(members))]
    return [2 * (mine - (units[i - 1] if i and units[i - 1] > 1 else 0)) if members[i] > 1 else 0 for i, mine in enumerate(units)]


def _direct(kind: str, members: tuple[int, ...]) -> list[float]:
    """Bytes of a whole group's share of a unit on each border, per operand byte; on a device's own link what stays in its unit."""
    size = prod(members)
    below = [prod(members[i + 1 :]) for i in range(len(members))]
    if kind == "permute":
        return [float(each) for each in below]
    return [*((size - each) / size * each for each in below[:-1]), (members[-1] - 1) / size]


def _pipelined(shares: Sequence[float], steps: Sequence[int], members: tuple[int, ...], links: Sequence[Link], own_rate: float) -> Curve:
    """Bytes and steps at each level to a curve; levels where only one member stands are not crossed."""
    fixed, terms = 0.0, []
    for i, (share, count, link) in enumerate(zip(shares, steps, links, strict=True)):
        if members[i] == 1:
            continue
        last = i == len(members) - 1
        fixed += link.call_seconds + count * link.latency_seconds
        terms.append(link.term(share, own_rate if last and own_rate else link.rate * prod(members[i + 1 :])))
    return Curve(fixed, tuple(terms))


def transfer(nbytes: float, flows: Sequence[Flow], shape: tuple[int, ...], links: Sequence[Link], most: Sequence[float]) -> float:
    """Seconds of all flows at once: at each border the unit that sends or receives most is the slowest.

    A unit of level `i` holds `prod(shape[i+1:])` devices and has as many shares of `links[i].rate`; one device alone gets `most[i]`.
    """
    moving = [flow for flow in flows if flow[0] != flow[1]]
    if not moving or nbytes <= 0:
        return 0.0
    slowest, fixed = 0.0, 0.0
    for level, step in enumerate(strides(shape)):
        outer, last = step * shape[level], level == len(shape) - 1
        crossing = [(a // step, b // step) for a, b in moving if a // step != b // step and (a // outer == b // outer or not last)]
        if not crossing:
            continue
        busiest = max(max(Counter(units).values()) for units in zip(*crossing, strict=True))
        link = links[level]
        rate = min(most[level] * busiest, most[level] if last else link.rate * step)
        slowest = max(slowest, Curve(0.0, (link.term(1.0, rate / busiest),)).seconds(nbytes))
        fixed = max(fixed, link.call_seconds + link.latency_seconds)
    return fixed + slowest
