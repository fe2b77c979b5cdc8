"""Chips on a torus of links, in slices joined by the data-centre network: TPU clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, NamedTuple

from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.groups import Axes, decompose, factorisations, strides
from cost_models.link import Link
from cost_models.topology import NOTHING, Flow, Topology


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
    steps: int
    """Messages of a gather that follow one another."""


@dataclass(frozen=True)
class Torus(Topology):
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

    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        route = self._route(axes)
        members = route.chips * route.cores
        if members * route.slices == 1:
            return {}
        within = self._within(kind, members * route.slices, route) if members > 1 else NOTHING
        return {"torus": within.then(self._between(kind, members, route.slices) if route.slices > 1 else NOTHING)}

    def _within(self, kind: str, size: int, route: Route) -> Curve:
        """Inside a slice. An all-reduce is a reduce-scatter and an all-gather, which cost the same."""
        if kind == "all_gather":
            return self._gather(size, route)
        if kind == "reduce_scatter":
            return self._gather(1.0, route)
        if kind == "all_reduce":
            return self._gather(1.0, route).then(self._gather(1.0, route))
        if kind == "all_to_all":
            return self.link.curve(1.0, route.hops, 1 / route.spread_seconds_per_byte)
        return self.link.curve(1.0, route.hops, route.permute_bytes_per_s)

    def _gather(self, total: float, route: Route) -> Curve:
        """`total v` bytes end up on each device. Parts of the data go round the dimensions in different orders, so all links work at once:
        `(n-1)/n total / (sum of rates)`, the bound of incoming links; then each core takes the other cores' part of it.
        """
        far, near = (route.chips - 1) / route.chips, (route.cores - 1) / route.cores
        curve = self.link.curve(total * far, route.steps, route.gather_bytes_per_s)
        return curve.then(Curve(0.0, ((total * near / self.core_bytes_per_s, 0.0),)) if near else NOTHING)

    def _between(self, kind: str, members: int, slices: int) -> Curve:
        """Over the data-centre network; reductions have been scattered over the slice's `members` by then."""
        moved = {
            "all_gather": slices - 1,
            "all_reduce": 2 * (slices - 1) / slices / members,
            "reduce_scatter": (slices - 1) / slices / members,
            "all_to_all": (slices - 1) / slices,
            "permute": 1,
        }[kind]
        steps = {"all_reduce": 2 * (slices - 1), "permute": 1}.get(kind, slices - 1)
        return self.network.curve(moved, steps, self.network.rate)

    def _route(self, axes: Axes) -> Route:
        pieces = decompose(axes, self.dims)
        if pieces is None:
            return self._uneven(prod(size for size, _ in axes))
        slices, cores = (prod(size for size, _ in each) for each in (pieces[0], pieces[-1]))
        used = [(self._links(dim, each), each) for dim, each in enumerate(pieces[1:-1]) if each]
        if not used:
            rate = self.core_bytes_per_s or self.link.rate
            return Route(1, cores, slices, rate, 1 / rate, rate, 1, 1)
        lengths = [prod(size for size, _ in each) for _, each in used]
        shared = self.cores // cores
        rate, steps = self._gather_rate([each for each, _ in used], lengths)
        return Route(
            chips=prod(lengths),
            cores=cores,
            slices=slices,
            gather_bytes_per_s=rate / shared,
            spread_seconds_per_byte=max(length * self.cores / (4 * rate) for ((rate, _, _), _), length in zip(used, lengths, strict=True)),
            permute_bytes_per_s=min(single for (_, single, _), _ in used) / self.cores,
            hops=sum(hops for (_, _, hops), _ in used),
            steps=steps,
        )

    def _gather_rate(self, used: list[tuple[float, float, int]], lengths: list[int]) -> tuple[float, int]:
        """Rate into a chip over all dimensions that a group uses, and steps.

        Closed dimensions add up. Where two or more are used and none closes, the compiler takes one ring through all chips, both ways
        round: two links, and `n - 1` steps. Published all-gathers of 2 x 2 x 1 and 2 x 2 x 2 chips of TPU v7x show both: one rate of two
        links, and fixed costs that are as 3 to 7.
        """
        total, hops = sum(rate for rate, _, _ in used), sum(hops for _, _, hops in used)
        if len(used) < 2 or any(rate > single for rate, single, _ in used):
            return total, hops
        return min(total, 2 * min(single for _, single, _ in used)), prod(lengths) - 1

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
            return Route(1, 1, size, 1.0, 0.0, 1.0, 0, 0)
        rate = self.link.rate / size
        return Route(size, 1, 1, rate, size / (4 * rate), rate, size, size)

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """See `Topology.transfer_seconds`. Each flow goes dimension by dimension, the shorter way round; the busiest link counts."""
        load: Counter[tuple[int, int, int]] = Counter()
        far: Counter[tuple[bool, int]] = Counter()
        most, near = 0, False
        for source, target in flows:
            a, b = (self._place(device) for device in (source, target))
            if a[0] != b[0]:
                far.update([(True, source), (False, target)])
                continue
            hops = list(self._way(a, b))
            load.update(hops)
            most, near = max(most, len(hops)), near or source != target
        link = self.link.curve(max(load.values(), default=1), most, self.link.rate) if near else NOTHING
        network = self.network.curve(max(far.values()), 1, self.network.rate) if far else NOTHING
        return max(link.seconds(nbytes), network.seconds(nbytes)) if nbytes > 0 else 0.0

    def _place(self, device: int) -> tuple[int, ...]:
        """Slice and chip coordinates of a device."""
        return tuple(device // step % size for step, size in zip(strides(self.dims), self.shape, strict=False))

    def _way(self, a: tuple[int, ...], b: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """The links from chip `a` to chip `b`: chip, dimension and direction."""
        here = list(a)
        chips = strides(self.shape)
        for dim in range(1, len(a)):
            size = self.shape[dim]
            ahead = (b[dim] - here[dim]) % size
            forward = ahead * 2 <= size if self.wraps[dim - 1] else b[dim] >= here[dim]
            while here[dim] != b[dim]:
                yield sum(x * step for x, step in zip(here, chips, strict=True)), dim, 1 if forward else -1
                here[dim] = (here[dim] + (1 if forward else -1)) % size

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
