"""The logical mesh: named axes over devices numbered row-major."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class LogicalMesh:
    """Named axes, major to minor, as in `x=2 y=4`. Device number = row-major position."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def by_name(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    def size(self, axes: Iterable[str]) -> int:
        """Number of devices along `axes` together."""
        n = 1
        for a in axes:
            n *= self.by_name[a]
        return n

    def stride(self, axis: str) -> int:
        """Distance in device numbers between neighbours along `axis`."""
        return prod(self.sizes[self.names.index(axis) + 1 :])

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """(size, stride) per axis: how a collective over `axes` lies on the devices."""
        return tuple((self.by_name[a], self.stride(a)) for a in axes)

    def __str__(self) -> str:
        return " ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) or "one device"
