"""Seconds over message size: the one form in which every collective and transfer is priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    """`t(v) = fixed + max_i (per_byte_i v + per_root_i v^(1/3))` seconds for `v` bytes.

    `fixed` is what no byte pays for: calls and latencies. Each term is a resource that works at the same time as the others (links of a
    node beside its NICs), so the slowest counts. `per_root` is the loss of messages too small for their link: with
    `per_root = h^(2/3) per_byte`, half of the rate is reached at `h` bytes (see `Link`). No term means no traffic.
    """

    fixed: float
    terms: tuple[tuple[float, float], ...] = ()

    def seconds(self, nbytes: float) -> float:
        """Seconds for one size."""
        root = nbytes ** (1 / 3)
        slowest = 0.0
        for per_byte, per_root in self.terms:
            slowest = max(slowest, per_byte * nbytes + per_root * root)
        return self.fixed + slowest

    def sample(self, nbytes: Any) -> Any:
        """Seconds for a numpy array of sizes, shape by shape."""
        root = nbytes ** (1 / 3)
        slowest = 0.0 * nbytes
        for per_byte, per_root in self.terms:
            term = per_byte * nbytes + per_root * root
            slowest = slowest + (term - slowest) * (term > slowest)
        return self.fixed + slowest

    def then(self, other: Curve) -> Curve:
        """One after the other: every pair of terms, as `max a + max b = max (a + b)`."""
        if not self.terms or not other.terms:
            return Curve(self.fixed + other.fixed, self.terms or other.terms)
        pairs = tuple((a + c, b + d) for a, b in self.terms for c, d in other.terms)
        return Curve(self.fixed + other.fixed, pairs)
