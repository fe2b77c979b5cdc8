"""Devices joined by point-to-point links without a switch: how many rings a group's own links hold.

A ring all-reduce of `n` devices sends `2(n-1)/n S` bytes over each link of its ring, so a group runs at the rate of as many links as there
are rings that share none. NCCL builds such rings on the hybrid cube mesh of eight V100 (NVIDIA, "DGX-1 with Tesla V100 system
architecture", whitepaper WP-08437, section on NCCL): three in both directions through all eight, two through each quad.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

Counts = tuple[tuple[int, ...], ...]
"""Links between each pair of devices, symmetric, zero on the diagonal."""

_MOST_STEPS = 20_000


@cache
def ring_links(counts: Counts, members: tuple[int, ...]) -> int:
    """Links in one direction that a device of the group sends on at once: 0 where no ring joins the members.

    Two devices use what joins them. Three and more use rings with no link in common, each in both directions.

    >>> square = ((0, 1, 0, 1), (1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 1, 0))
    >>> ring_links(square, (0, 1, 2, 3)), ring_links(square, (0, 1)), ring_links(square, (0, 2))
    (2, 1, 0)
    """
    inside = [[counts[a][b] for b in members] for a in members]
    if len(members) == 2:
        return inside[0][1]
    most = min(sum(row) for row in inside) // 2
    return next((2 * rings for rings in range(most, 0, -1) if _pack(inside, rings, [_MOST_STEPS])), 0)


def _pack(left: list[list[int]], rings: int, budget: list[int]) -> bool:
    """Whether `rings` Hamiltonian cycles fit into the links that are left; a search that gives up after `budget` steps."""
    if rings == 0:
        return True
    for cycle in _cycles(left, [0], budget):
        pairs = list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        _take(left, pairs, -1)
        if _pack(left, rings - 1, budget):
            return True
        _take(left, pairs, 1)
    return False


def _take(left: list[list[int]], pairs: Sequence[tuple[int, int]], amount: int) -> None:
    for a, b in pairs:
        left[a][b] += amount
        left[b][a] += amount


def _cycles(left: list[list[int]], path: list[int], budget: list[int]) -> Iterator[tuple[int, ...]]:
    """Hamiltonian cycles from device 0, thick links first."""
    budget[0] -= 1
    if budget[0] < 0:
        return
    here, size = path[-1], len(left)
    if len(path) == size:
        if left[here][0] > 0:
            yield tuple(path)
        return
    for there in sorted(set(range(size)) - set(path), key=lambda d: -left[here][d]):
        if left[here][there] > 0:
            yield from _cycles(left, [*path, there], budget)
