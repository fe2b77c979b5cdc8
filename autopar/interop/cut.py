"""Where to cut a line of ops: little crosses, parts are about as dear, and cuts are at places of one kind if that costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints

Flags = NDArray[np.bool_]

KINDS = 4
"""Kinds of places that are tried, those with most places first."""


@dataclass(frozen=True, eq=False)
class Line:
    """Ops in a row. `total[p]` is the cost of all before place p, the end among them; `height[p]` are the bytes that cross there.

    A part begins at each place of `given`. `kinds[p]` is equal for places with equal surroundings.
    """

    total: Floats
    height: Floats
    given: tuple[int, ...] = ()
    kinds: Sequence[Hashable] = ()

    def bytes_at(self, places: Sequence[int]) -> float:
        """What crosses at some places."""
        return float(self.height[list(places)].sum())

    def dearest(self, places: Sequence[int]) -> float:
        """What the dearest part costs."""
        return float(np.max(np.diff(self.total[[0, *places, len(self.total) - 1]])))

    def unevenness(self, places: Sequence[int]) -> float:
        """The sum of squares of what parts cost."""
        return float(np.square(np.diff(self.total[[0, *places, len(self.total) - 1]])).sum())


def best_cut(line: Line, places: Sequence[int], count: int, slack: float) -> list[int]:
    """The borders of `count` parts, all of them among these places, which hold the given ones.

    The dearest part costs at most `1 + slack` times what it must, and the cheapest at least half of what it then can. Of such cuts those
    are taken that least crosses; of these those at places of one kind; of these the most even ones.
    """
    ends = np.array([0, *places, len(line.total) - 1])
    part = line.total[ends][None, :] - line.total[ends][:, None]
    part[_skips(ends, line.given)] = np.inf
    part = np.where(part <= _most_even(part, count) * (1 + slack), part, np.inf)
    part = np.where(part >= _least_share(part, count) / 2, part, np.inf)
    found = _cheapest(line, ends, part, count)
    alike = [
        cut
        for keep in _alike(line, ends, count)
        if (cut := _cheapest(line, ends[keep], part[np.ix_(keep, keep)], count)) and line.bytes_at(cut) <= line.bytes_at(found)
    ]
    return min(alike, key=line.unevenness, default=found)


def _alike(line: Line, ends: Ints, count: int) -> Iterator[Ints]:
    """Positions in `ends` of both ends and of the places of one kind or given, for kinds that have enough of them."""
    kinds = Counter(line.kinds[p] for p in ends[1:-1]) if line.kinds and count > 2 else Counter()
    for kind, times in kinds.most_common(KINDS):
        keep = [k for k, p in enumerate(ends[1:-1], 1) if line.kinds[p] == kind or p in line.given]
        if times > 1 and len(keep) >= count - 1:
            yield np.array([0, *keep, len(ends) - 1])


def _cheapest(line: Line, ends: Ints, part: Floats, count: int) -> list[int]:
    """The borders that least crosses, by dynamic programming; of equals the most even ones. Empty where there are none.

    Parts that cost infinitely much are none. The unevenness is scaled to less than one byte.
    """
    mean = max(float(line.total[-1]) / count, np.finfo(float).tiny)
    uneven = np.square(part / mean - 1)
    scale = 0.5 / (count * (1.0 + np.max(uneven, where=np.isfinite(uneven), initial=0.0)))
    price = np.append(line.height[ends[:-1]], 0.0)[None, :] + scale * uneven
    best, back = price[0], []
    for _ in range(count - 1):
        through = best[:, None] + price
        back.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    at, found = len(ends) - 1, []
    for pointers in reversed(back):
        at = int(pointers[at])
        found.append(int(ends[at]))
    return found[::-1] if np.isfinite(best[-1]) else []


def _skips(ends: Ints, given: Sequence[int]) -> Flags:
    """Which pairs of places are no part: not in order, or with a given border between them."""
    passed = np.searchsorted(np.array(given, np.int64), ends, side="left")
    upto = np.searchsorted(np.array(given, np.int64), ends, side="right")
    return (ends[:, None] >= ends[None, :]) | (upto[:, None] < passed[None, :])


def _most_even(part: Floats, count: int) -> float:
    """The least cost that the dearest of so many parts can have."""
    best = part[0]
    for _ in range(count - 1):
        best = np.min(np.maximum(best[:, None], part), axis=0)
    return float(best[-1])


def _least_share(part: Floats, count: int) -> float:
    """The most that the cheapest of so many parts can cost."""
    worth = np.where(np.isfinite(part), part, -1.0)
    best = worth[0]
    for _ in range(count - 1):
        best = np.max(np.minimum(best[:, None], worth), axis=0)
    return float(best[-1])
