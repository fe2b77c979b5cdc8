"""Simulated devices that share one host's cores and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from cost_models.collective import KINDS
from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.groups import Axes
from cost_models.topology import Flow, Topology


@dataclass(frozen=True)
class SharedMemory(Topology):
    """Per kind of collective a fixed cost in seconds and a rate in bytes/s per device, all devices busy at once.

    The bytes that count are those a device writes: the whole result of an all-gather, the operand of everything else. On XLA's CPU
    backend both figures hardly depend on how many devices are in a group, but much on how many share the cores.
    """

    kind = "shared-memory"

    shape: tuple[int, ...]
    call_seconds: tuple[tuple[str, float], ...]
    bytes_per_s: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if set(dict(self.call_seconds)) != set(KINDS) or set(dict(self.bytes_per_s)) != set(KINDS):
            raise ClusterError(f"a shared-memory cluster needs `call_seconds` and `bytes_per_s` for each of {', '.join(KINDS)}.")

    @cached_property
    def _figures(self) -> dict[str, tuple[float, float]]:
        rates = dict(self.bytes_per_s)
        return {kind: (seconds, rates[kind]) for kind, seconds in self.call_seconds}

    @property
    def num_devices(self) -> int:
        return prod(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes: all devices are alike."""
        return (self.num_devices,)

    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        size = prod(each for each, _ in axes)
        if size == 1:
            return {}
        fixed, rate = self._figures[kind]
        return {"shared": Curve(fixed, (((size if kind == "all_gather" else 1) / rate, 0.0),))}

    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """See `Topology.transfer_seconds`. The rates are those with all devices busy, so fewer flows are as fast as many."""
        if nbytes <= 0 or all(a == b for a, b in flows):
            return 0.0
        fixed, rate = self._figures["permute"]
        return fixed + nbytes / rate

    def submesh(self, shape: tuple[int, ...]) -> SharedMemory:
        """Fewer devices at the same figures: the others stay busy."""
        return replace(self, shape=shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"kind": self.kind, **asdict(self), "call_seconds": dict(self.call_seconds), "bytes_per_s": dict(self.bytes_per_s)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SharedMemory:
        """The inverse of `to_dict`."""
        figures = {name: tuple(sorted(data[name].items())) for name in ("call_seconds", "bytes_per_s")}
        return SharedMemory(shape=tuple(data["shape"]), **figures)
