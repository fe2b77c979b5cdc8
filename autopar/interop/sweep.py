"""The inner dynamic programme: stages over layers and devices, for costs that are added or of which the largest counts.

What a stage may cost depends on its position from the end, since memory does: a stage with more stages behind it holds more. A first
pass takes every stage as if it were the last. Where its answer holds at the positions that its stages have, it is the answer. Else
it still says, for every state, the least that may stand before it, and a second pass goes from the last stage to the first, level by level:

`state[i, n, d]` of level s: layers from i on run in s stages on d devices in all, the first of them on submesh n. Two kinds of states
lead nowhere: those that with the least before them cost too much; and those that cost no less than one of a lower level with all else the
same, since whatever stands before them could stand before the other too, and would hold no more there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.ir.problem import Floats, Ints

Combine = Any
"""`np.add` or `np.maximum`."""

Costs = Callable[[int], Floats]
"""Position of a stage from the end, the last being 1 -> cost of (row, submesh), which never falls with the position.

Infinite is what cannot be there.
"""

Stages = tuple[tuple[int, int, int], ...]
"""(first layer, layer after the last, submesh) of each stage, in order."""

DEEPENING = (1.03, 1.3, 2.0, np.inf)
"""Multiples of the first pass's value below which the second one looks for its own, in turn."""


@dataclass(frozen=True, eq=False)
class Frame:
    """What all sweeps over the same layers and devices share: `row[i, j]` of the costs, sizes of submeshes, and devices in all."""

    row: Ints
    units: Ints
    total: int

    def spread(self, costs: Floats) -> Floats:
        """(first layer, layer after the last, submesh); infinite where there is no such range."""
        return np.where(self.row[:, :, None] >= 0, costs[self.row], np.inf)


@dataclass(frozen=True)
class Found:
    """The least value, and its stages."""

    value: float
    stages: Stages


def sweep(
    frame: Frame, costs: Costs, hop: Floats, combine: Combine, levels: int, cutoff: float = np.inf, exactly: bool = False
) -> Found | None:
    """The stages with the least combined cost below `cutoff` that use all devices, at most `levels` of them or `exactly` as many.

    `hop[k, a, b]` is combined too, for a border before layer k between submeshes a and b. None if there are no such stages.
    """
    passed = _First(frame, frame.spread(costs(1)), hop, combine)
    if not passed.value < cutoff:
        return None
    stages = passed.stages()
    if len(stages) == levels or (len(stages) < levels and not exactly):
        if _holds(frame, costs, stages):
            return Found(passed.value, stages)
    for factor in DEEPENING:
        found = _Second(passed, costs, min(cutoff, passed.value * factor), levels, exactly).run()
        if found is not None or passed.value * factor >= cutoff:
            return found
    return None


def _holds(frame: Frame, costs: Costs, stages: Stages) -> bool:
    """Whether stages cost at their positions what the last stage would."""
    last, n = costs(1), len(stages)
    rows = [(frame.row[i, j], m) for i, j, m in stages]
    return all(costs(n - s)[at] == last[at] for s, at in enumerate(rows))


def least_devices(frame: Frame, first: Floats) -> tuple[Floats, Floats]:
    """For each border the fewest devices on which what stands before it, and behind it, can run; infinite where it cannot."""
    n = len(frame.row)
    needs = np.where(np.isfinite(first), frame.units, np.inf).min(axis=2)
    before, behind = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
    before[0] = behind[n] = 0.0
    for j in range(1, n + 1):
        before[j] = np.min(before[:j] + needs[:j, j])
    for i in range(n - 1, -1, -1):
        behind[i] = np.min(needs[i, i + 1 :] + behind[i + 1 :])
    return before, behind


@dataclass(frozen=True, eq=False)
class _Ahead:
    """The least before a border, by the submesh of the stage behind it, the hop counted, and devices used, from `low` on."""

    low: int
    cost: Floats

    @property
    def high(self) -> int:
        return self.low + self.cost.shape[1] - 1


class _First:
    """The pass from the first layer to the last. `state[j, n, d]`: layers before j on d devices, the last stage of them on submesh n."""

    def __init__(self, frame: Frame, first: Floats, hop: Floats, combine: Combine):
        self.frame, self.first, self.hop, self.combine = frame, first, hop, combine
        n, sizes = len(frame.row), len(frame.units)
        self.ahead: dict[int, _Ahead] = {}
        self.value = np.inf
        before, behind = least_devices(frame, first)
        if before[n] > frame.total:
            return
        self.state = np.full((n + 1, sizes, frame.total + 1), np.inf)
        for k in range(n):
            high = frame.total - behind[k]
            if before[k] <= high:
                self._border(k, int(before[k]), int(high))
        self.value = float(self.state[n, :, frame.total].min())

    def _border(self, k: int, low: int, high: int) -> None:
        """Puts a stage behind what ends at border k, on `low` to `high` devices."""
        if k:
            cost = _least(self.combine, self.hop[k].T, self.state[k, :, low : high + 1])
        else:
            cost = np.zeros((len(self.frame.units), 1))
        self.ahead[k] = _Ahead(low, cost)
        there = np.isfinite(self.first[k])
        for m in np.flatnonzero(there.any(axis=0)):
            at = low + int(self.frame.units[m])
            width = min(cost.shape[1], self.frame.total + 1 - at)
            if width > 0:
                rows = _span(there[:, m])
                target = self.state[rows, m, at : at + width]
                np.minimum(target, self.combine(self.first[k, rows, m][:, None], cost[m, :width][None, :]), out=target)

    def stages(self) -> Stages:
        """The stages behind the value, found by making each state's value once more."""
        j, d = len(self.frame.row), self.frame.total
        m = int(np.argmin(self.state[j, :, d]))
        found: list[tuple[int, int, int]] = []
        while True:
            value, rest = self.state[j, m, d], d - int(self.frame.units[m])
            i = next(k for k, ahead in self.ahead.items() if self._made(ahead, self.first[k, j, m], m, rest, value))
            found.append((i, j, m))
            if i == 0:
                return tuple(reversed(found))
            m, j, d = int(np.argmin(self.combine(self.hop[i, :, m], self.state[i, :, rest]))), i, rest

    def _made(self, ahead: _Ahead, cost: float, m: int, rest: int, value: float) -> bool:
        return bool(ahead.low <= rest <= ahead.high and self.combine(cost, ahead.cost[m, rest - ahead.low]) == value)


def _span(there: NDArray[np.bool_]) -> slice:
    """From the first to the last place that is true."""
    found = np.flatnonzero(there)
    return slice(int(found[0]), int(found[-1]) + 1)


def _least(combine: Combine, hop: Floats, block: Floats) -> Floats:
    """The least over submeshes b of `hop[a, b]` with `block[b, d]`, for each a and d."""
    found = np.full((len(hop), block.shape[1]), np.inf)
    for b in np.flatnonzero(np.isfinite(block).any(axis=1)):
        np.minimum(found, combine(hop[:, b][:, None], block[b][None, :]), out=found)
    return found


class _Second:
    """The pass from the last stage to the first, level by level, for what costs less than `cutoff` in all."""

    def __init__(self, passed: _First, costs: Costs, cutoff: float, levels: int, exactly: bool):
        self.passed, self.costs, self.cutoff, self.levels, self.exactly = passed, costs, cutoff, levels, exactly
        self.frame, self.combine = passed.frame, passed.combine
        self.state = np.full((len(self.frame.row) + 1, len(self.frame.units), self.frame.total + 1), np.inf)
        self.least: dict[int, Floats] = {}

    def run(self) -> Found | None:
        """The best stages, if there are any."""
        best: tuple[float, int] = (self.cutoff, 0)
        stored: list[dict[int, Floats]] = []
        touched = self._last(self.frame.spread(self.costs(1)))
        while touched:
            stored.append({i: kept for i in sorted(touched) if (kept := self._keep(i)) is not None})
            if 0 in stored[-1] and (not self.exactly or len(stored) == self.levels):
                best = min(best, (float(stored[-1][0].min()), len(stored)))
                self.cutoff = best[0]
            if len(stored) == self.levels:
                break
            touched = self._in_front(self.frame.spread(self.costs(len(stored) + 1)), stored[-1])
        return Found(best[0], self._trace(stored[: best[1]])) if best[1] else None

    def _last(self, cost: Floats) -> set[int]:
        """The states of the first level, and their rows."""
        n, total = len(self.frame.row), self.frame.total
        for m, size in enumerate(self.frame.units):
            if size <= total:
                self.state[:n, m, size] = cost[:, n, m]
        return {int(i) for i in np.flatnonzero(np.isfinite(cost[:, n]).any(axis=1))}

    def _window(self, i: int) -> slice:
        """The devices behind border i for which something can stand before it."""
        ahead = self.passed.ahead[i]
        return slice(self.frame.total - ahead.high, self.frame.total - ahead.low + 1)

    def _keep(self, i: int) -> Floats | None:
        """What may lead on of a row, which is cleared for the next level; None if nothing does."""
        block = self.state[i, :, self._window(i)].copy() if i in self.passed.ahead else None
        self.state[i] = np.inf
        if block is None or block.min() == np.inf:
            return None
        if i not in self.least or self.exactly:
            self.least[i] = np.full_like(block, np.inf)
        ahead = self.passed.ahead[i].cost[:, ::-1]
        block[(block >= self.least[i]) | (self.combine(block, ahead) >= self.cutoff)] = np.inf
        np.minimum(self.least[i], block, out=self.least[i])
        return block if block.min() < np.inf else None

    def _in_front(self, cost: Floats, level: dict[int, Floats]) -> set[int]:
        """Makes the states of the next level, and says in which rows they are."""
        touched: set[int] = set()
        for j, block in level.items():
            if j == 0:
                continue
            low = self._window(j).start
            behind = _least(self.combine, self.passed.hop[j], block)
            there = np.isfinite(cost[:j, j, :])
            for m in np.flatnonzero(there.any(axis=0)):
                at = low + int(self.frame.units[m])
                width = min(block.shape[1], self.frame.total + 1 - at)
                if width > 0:
                    rows = _span(there[:, m])
                    target = self.state[rows, m, at : at + width]
                    np.minimum(target, self.combine(cost[rows, j, m][:, None], behind[m, :width][None, :]), out=target)
                    touched.update(range(rows.start, rows.stop))
        return touched

    def _trace(self, levels: list[dict[int, Floats]]) -> Stages:
        """The stages behind the least value of the last of these levels, found by making each state's value once more."""
        n, d = len(self.frame.row), self.frame.total
        i, m = 0, int(np.argmin(levels[-1][0][:, 0]))
        value = float(levels[-1][0][m, 0])
        stages = []
        for s in range(len(levels), 1, -1):
            d -= int(self.frame.units[m])
            j, m_next = self._behind(i, m, d, value, levels[s - 2], self.frame.spread(self.costs(s))[i, :, m])
            stages.append((i, j, m))
            value = float(levels[s - 2][j][m_next, d - self._window(j).start])
            i, m = j, m_next
        return (*stages, (i, n, m))

    def _behind(self, i: int, m: int, d: int, value: float, level: dict[int, Floats], cost: Floats) -> tuple[int, int]:
        """The border and the submesh of the state on d devices before which a stage from i on submesh m makes this value."""
        for j, block in level.items():
            at = d - self._window(j).start
            if j > i and np.isfinite(cost[j]) and 0 <= at < block.shape[1]:
                behind = self.combine(self.passed.hop[j, m], block[:, at])
                k = int(np.argmin(behind))
                if self.combine(cost[j], behind[k]) == value:
                    return j, k
        raise AssertionError("a state's value is made of none of the level below it")
