"""A topology of which some groups were measured: their curves as found, everything else by the model that was fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cost_models.curve import Curve
from cost_models.groups import Axes, decompose
from cost_models.levels import Levels
from cost_models.shared import SharedMemory
from cost_models.switch import TwoLevel
from cost_models.topology import Flow, Topology
from cost_models.torus import Torus

Base = TwoLevel | Levels | Torus | SharedMemory
BASES: dict[str, type[TwoLevel] | type[Levels] | type[Torus] | type[SharedMemory]] = {
    each.kind: each for each in (TwoLevel, Levels, Torus, SharedMemory)
}


@dataclass(frozen=True)
class Measured(Topology):
    """`base` says how devices are joined. `found` are curves by collective and group, `("all_reduce", "8:1")` for size and stride.

    They were measured with all like groups busy, on devices of dimensions `dims_measured`; `sent` is the curve of transfers then, one for
    each pair of devices. They hold for that shape, and for groups inside one node of larger clusters of such nodes.
    """

    kind = "measured"

    base: Base
    dims_measured: tuple[int, ...]
    found: tuple[tuple[str, str, Curve], ...] = ()
    sent: Curve | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def num_devices(self) -> int:
        return self.base.num_devices

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes."""
        return self.base.dims

    @cached_property
    def _table(self) -> dict[tuple[str, str], Curve]:
        return {(kind, group): curve for kind, group, curve in self.found}

    @cached_property
    def _span(self) -> int:
        """Devices from the first on, aligned, among which what was measured holds."""
        if self.dims == self.dims_measured:
            return self.num_devices
        nodes = isinstance(self.base, (TwoLevel, Levels)) and self.dims[1:] == self.dims_measured[1:]
        return prod(self.dims[1:]) if nodes else 1

    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        pieces = decompose(axes, (self.num_devices,))
        if pieces and len(pieces[0]) == 1:
            (size, stride), *_ = pieces[0]
            curve = self._table.get((kind, f"{size}:{stride}"))
            if curve is not None and size * stride <= self._span:
                return {"measured": curve}
        return self.base.curves(kind, axes)

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """See `Topology.transfer_seconds`. As measured where all stays among the devices measured, one after the other from each device."""
        moving = [flow for flow in flows if flow[0] != flow[1]]
        inside = all(a // self._span == b // self._span for a, b in moving)
        if self.sent is None or not inside or not moving or nbytes <= 0:
            return self.base.transfer_seconds(nbytes, moving)
        return max(len([a for a, _ in moving if a == source]) for source, _ in moving) * self.sent.seconds(nbytes)

    def submesh(self, shape: tuple[int, ...]) -> Measured:
        """See `Cluster.submesh`."""
        return replace(self, base=self.base.submesh(shape))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        found = {f"{kind} {group}": _numbers(curve) for kind, group, curve in self.found}
        sent = {} if self.sent is None else {"all": _numbers(self.sent)}
        base = {name: value for name, value in self.base.to_dict().items() if name != "shape"}
        dims = list(self.dims_measured)
        return {"kind": self.kind, "shape": list(self.shape), "dims_measured": dims, "base": base, "found": found, "sent": sent}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Measured:
        """The inverse of `to_dict`."""
        base = BASES[data["base"]["kind"]].from_dict({**data["base"], "shape": data["shape"]})
        found = tuple((*name.split(" "), _curve(numbers)) for name, numbers in data.get("found", {}).items())
        sent = data.get("sent", {}).get("all")
        return Measured(base, tuple(data["dims_measured"]), found, _curve(sent) if sent else None)


def _numbers(curve: Curve) -> list[float]:
    """A curve of one term as a list."""
    return [curve.fixed, *curve.terms[0]]


def _curve(numbers: list[float]) -> Curve:
    return Curve(numbers[0], ((numbers[1], numbers[2]),))
