"""Chips on a torus of links, in slices joined by the data-centre network: TPU clusters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from cost_models.errors import ClusterError
from cost_models.groups import Axes, decompose, factorisations
from cost_models.link import Link


class Route(NamedTuple):
    """What a group of devices can use of the torus, with all like groups busy at once."""

    chips: int
    cores: int
    slices: int
    gather_bytes_per_s: float
    """Into one chip over all links that the group uses."""
    spread_seconds_per_byte: float
    """All-to-all, per byte of a device's operand: the narrowest bisection."""
    permute_bytes_per_s: float
    hops: int


@dataclass(frozen=True)
class Torus:
    """`shape = (slices, *chips along each dimension)`; a chip shows `cores` devices to JAX, numbered innermost.

    `link` is one link in one direction, `network` one device's share of its host's NICs. A dimension closes to a ring where its length is
    a multiple of `wrap_multiple`, for `wrap_all` only if every dimension's is. `wraps` holds the outcome.
    """

    kind = "torus"

    shape: tuple[int, ...]
    link: Link
    network: Link
    wraps: tuple[bool, ...]
    cores: int = 1
    core_bytes_per_s: float = 0.0
    max_chips: int = 0
    wrap_multiple: int = 4
    wrap_all: bool = False

    @property
    def num_devices(self) -> int:
        return prod(self.dims)

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes: slices, chips along each dimension, cores."""
        return (*self.shape, self.cores)

    @cached_property
    def _routes(self) -> dict[Axes, Route]:
        return {}

    def seconds(self, kind: str, nbytes: float, axes: Axes) -> float:
        """See `Cluster.collective_seconds`."""
        route = self._routes.get(axes)
        if route is None:
            route = self._routes[axes] = self._route(axes)
        members = route.chips * route.cores
        if members * route.slices == 1:
            return 0.0
        within = self._within(kind, nbytes, members * route.slices, route) if members > 1 else 0.0
        return within + (self._between(kind, nbytes, members, route.slices) if route.slices > 1 else 0.0)

    def _within(self, kind: str, nbytes: float, size: int, route: Route) -> float:
        """Inside a slice. An all-reduce is a reduce-scatter and an all-gather, which cost the same."""
        if kind == "all_gather":
            return self._gather(nbytes * size, route)
        if kind == "reduce_scatter":
            return self._gather(nbytes, route)
        if kind == "all_reduce":
            return 2 * self._gather(nbytes, route)
        latency = self.link.call_seconds + route.hops * self.link.latency_seconds
        if kind == "all_to_all":
            return latency + self.link.transfer_seconds(nbytes, 1 / route.spread_seconds_per_byte)
        return latency + self.link.transfer_seconds(nbytes, route.permute_bytes_per_s)

    def _gather(self, total: float, route: Route) -> float:
        """`total` bytes end up on each device. Parts of the data go round the dimensions in different orders, so all links work at once:
        `(n-1)/n total / (sum of rates)`, the bound of incoming links; then each core takes the other cores' part of it.
        """
        seconds = self.link.call_seconds + route.hops * self.link.latency_seconds
        if route.chips > 1:
            seconds += self.link.transfer_seconds(total * (route.chips - 1) / route.chips, route.gather_bytes_per_s)
        if route.cores > 1:
            seconds += total * (route.cores - 1) / route.cores / self.core_bytes_per_s
        return seconds

    def _between(self, kind: str, nbytes: float, members: int, slices: int) -> float:
        """Over the data-centre network; reductions have been scattered over the slice's `members` by then."""
        moved = {
            "all_gather": (slices - 1) * nbytes,
            "all_reduce": 2 * (slices - 1) / slices * nbytes / members,
            "reduce_scatter": (slices - 1) / slices * nbytes / members,
            "all_to_all": (slices - 1) / slices * nbytes,
            "permute": nbytes,
        }[kind]
        steps = {"all_reduce": 2 * (slices - 1), "permute": 1}.get(kind, slices - 1)
        return self.network.seconds(moved, steps, self.network.rate)

    def _route(self, axes: Axes) -> Route:
        pieces = decompose(axes, self.dims)
        if pieces is None:
            return self._uneven(prod(size for size, _ in axes))
        slices, cores = (prod(size for size, _ in each) for each in (pieces[0], pieces[-1]))
        used = [(self._links(dim, each), each) for dim, each in enumerate(pieces[1:-1]) if each]
        if not used:
            rate = self.core_bytes_per_s or self.link.rate
            return Route(1, cores, slices, rate, 1 / rate, rate, 1)
        lengths = [prod(size for size, _ in each) for _, each in used]
        shared = self.cores // cores
        return Route(
            chips=prod(lengths),
            cores=cores,
            slices=slices,
            gather_bytes_per_s=sum(rate for (rate, _, _), _ in used) / shared,
            spread_seconds_per_byte=max(length * self.cores / (4 * rate) for ((rate, _, _), _), length in zip(used, lengths, strict=True)),
            permute_bytes_per_s=min(single for (_, single, _), _ in used) / self.cores,
            hops=sum(hops for (_, _, hops), _ in used),
        )

    def _links(self, dim: int, pieces: Axes) -> tuple[float, float, int]:
        """Rate into a chip along one dimension, rate of one direction, hops to the farthest chip. Groups that interleave share links."""
        rates, singles, hops = [], [], 0
        for size, step in pieces:
            ring = self.wraps[dim] and size * step == self.shape[1 + dim]
            single = self.link.rate / step
            singles.append(single)
            rates.append(single * (2 if ring else 1))
            hops += step * (size // 2 if ring else size - 1)
        return min(rates), min(singles), hops

    def _uneven(self, size: int) -> Route:
        """A group that the dimensions cut unevenly: an open line on one link that as many groups share; with slices, the network alone."""
        if self.shape[0] > 1:
            return Route(1, 1, size, 1.0, 0.0, 1.0, 0)
        rate = self.link.rate / size
        return Route(size, 1, 1, rate, size / (4 * rate), rate, size)

    def submesh(self, shape: tuple[int, ...]) -> Torus:
        """Part of this cluster, `(slices, *chips)` or, in one slice, the chips alone. A dimension that is cut no longer closes."""
        full = shape if len(shape) == len(self.shape) else (1, *shape)
        wraps = tuple(ring and mine == whole for ring, mine, whole in zip(self.wraps, full[1:], self.shape[1:], strict=True))
        return replace(self, shape=full, wraps=wraps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"kind": self.kind, **asdict(self), "shape": list(self.shape), "wraps": list(self.wraps), "rank": len(self.wraps)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Torus:
        """The inverse of `to_dict`. `shape` may be one number of chips, or leave out the slices; `wraps` follows from the rule."""
        fields = {name: value for name, value in data.items() if name not in ("kind", "rank")}
        shape = slice_shape(tuple(data["shape"]), data["rank"])
        if fields.get("max_chips") and prod(shape[1:]) > fields["max_chips"]:
            form = "x".join(["4"] * data["rank"])
            raise ClusterError(f"a slice holds at most {fields['max_chips']} chips; write several as SLICESxSHAPE, such as 2x{form}.")
        closes = [size % fields["wrap_multiple"] == 0 for size in shape[1:]]
        wraps = data.get("wraps") or [each and (all(closes) or not fields.get("wrap_all")) for each in closes]
        return Torus(**{**fields, "shape": shape, "wraps": tuple(wraps), "link": Link(**data["link"]), "network": Link(**data["network"])})


def slice_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """`(slices, *chips)`; one number alone becomes the most compact slice.

    >>> slice_shape((8,), 2), slice_shape((16, 16), 2), slice_shape((2, 4, 4), 2)
    ((1, 2, 4), (1, 16, 16), (2, 4, 4))
    """
    if len(shape) == rank + 1:
        return shape
    if len(shape) == rank:
        return (1, *shape)
    if len(shape) != 1:
        given, form = "x".join(map(str, shape)), "x".join(["4"] * rank)
        raise ClusterError(f"{given} does not fit a {rank}-dimensional torus; write a shape such as {form}, or slices before it.")
    return (1, *compact(shape[0], rank))


def compact(chips: int, rank: int) -> tuple[int, ...]:
    """The factorisation with the smallest longest side, then the smallest sum; ascending."""
    options = [(1,) * (rank - parts) + tuple(sorted(each)) for parts in range(1, rank + 1) for each in factorisations(chips, parts)]
    return min(options, key=lambda sides: (max(sides), sum(sides)), default=(1,) * rank)
