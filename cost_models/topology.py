"""What every topology can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import inf
from typing import Any

from cost_models.curve import Curve
from cost_models.errors import ClusterError
from cost_models.groups import Axes

NOTHING = Curve(0.0)
Flow = tuple[int, int]
"""A transfer's device that sends and device that receives."""


class Topology(ABC):
    """How devices are joined, and what collectives and transfers cost there.

    A subclass is a frozen dataclass. It says once, per kind and group, how seconds depend on message size for each algorithm; those curves
    are kept, so that a price is a few multiplications.
    """

    kind: str

    @property
    @abstractmethod
    def num_devices(self) -> int:
        """Devices as JAX counts them."""

    @property
    @abstractmethod
    def dims(self) -> tuple[int, ...]:
        """Physical dimensions for logical meshes, outermost first; devices are numbered row-major over them."""

    @abstractmethod
    def _curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        """Seconds over the operand's bytes, by algorithm; `{}` for a group of one."""

    @abstractmethod
    def transfer_seconds(self, nbytes: float, flows: Iterable[Flow]) -> float:
        """Seconds until each `(from, to)` pair of devices has moved its `nbytes`, all pairs at once."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""

    @cached_property
    def _known(self) -> dict[tuple[str, Axes], Mapping[str, Curve]]:
        return {}

    @cached_property
    def _flat(self) -> dict[tuple[str, Axes], tuple[tuple[float, tuple[tuple[float, float], ...]], ...]]:
        return {}

    def curves(self, kind: str, axes: Axes) -> Mapping[str, Curve]:
        """Seconds over the operand's bytes on one device, by algorithm; empty for a group of one.

        Algorithms are `ring`, `tree`, `switch` (reduced in the switch), `direct` (each to each), `torus`, `shared` and, over several
        levels, `flat` (one ring through all) and `hierarchical` (level by level), as the topology has them.
        """
        key = (kind, axes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._curves(kind, axes)
        return found

    def seconds(self, kind: str, nbytes: float, axes: Axes, algorithm: str | None = None) -> float:
        """The fastest algorithm's seconds, or those of the one named; see `Cluster.collective_seconds`."""
        if algorithm is not None:
            return self._named(kind, axes, algorithm).seconds(nbytes)
        flat = self._flat.get((kind, axes))
        if flat is None:
            flat = self._flat[kind, axes] = tuple((curve.fixed, curve.terms) for curve in self.curves(kind, axes).values())
        root = nbytes ** (1 / 3)
        best = inf if flat else 0.0
        for fixed, terms in flat:  # `Curve.seconds`, without calls: prices are asked for hundreds of thousands of times
            slowest = 0.0
            for per_byte, per_root in terms:
                seconds = per_byte * nbytes + per_root * root
                if seconds > slowest:
                    slowest = seconds
            if fixed + slowest < best:
                best = fixed + slowest
        return best

    def _named(self, kind: str, axes: Axes, algorithm: str) -> Curve:
        curves = self.curves(kind, axes)
        if curves and algorithm not in curves:
            raise ClusterError(f"no algorithm {algorithm!r} for {kind} here; known are {', '.join(curves)}.")
        return curves.get(algorithm, NOTHING)
