"""The dynamic programme over layers and submeshes: the stages with the least makespan by a schedule's closed form, or that none fit.

The makespan is a sum over stages and hops, plus weighted maxima (`schedule/formulas.py`). With a bound on each maximum the sum alone is
left, which `sweep` minimises exactly. The bounds are searched by branching. A box holds the plans whose maxima lie between two values of
each; whatever they are, they take no less than the least sum under the upper bounds plus the lower bounds by their weights. A box in which
that is no better than the best plan known holds none that is better. Others are halved, the most promising first, until none is left:
so the answer is the optimum of the closed form over all plans, within the relative `gap` that is asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from autopar.errors import UsageError
from autopar.interop.shortage import shortage
from autopar.interop.stages import Chain, Grid, Oracle, StagePlan
from autopar.interop.sweep import Found, Frame, least_devices, sweep
from autopar.interop.tables import Tables, formula_arrays, make_plan, tables
from autopar.ir.problem import Floats
from autopar.schedule.formulas import Flight, Formula

ROUNDING = 1e-12
"""Relative difference of sums that are taken in another order."""

CLIMB = (1.0, 1.03, 1.1, 1.25, 1.5, 2.0, 3.0, 6.0, np.inf)
"""Multiples of the least bound on the slowest stage, tried in turn for a first plan."""


def plan_stages(
    chain: Chain,
    grid: Grid,
    oracle: Oracle,
    formulas: Sequence[Formula],
    *,
    max_stages: int | None = None,
    gap: float = 0.0,
) -> StagePlan:
    """The fastest stages over these schedules and numbers of microbatches.

    One stage is among the answers, and the first of equals wins, so list first what is simplest. The oracle is asked once for each number
    of microbatches, submesh and class of ranges. Raises `InfeasibleError`, which says what the nearest plan's fullest stage
    lacks, where no plan fits `grid.memory_bytes`.
    """
    if not formulas or (max_stages is not None and max_stages < 1) or not 0 <= gap < 1:
        raise UsageError(f"give one schedule or more, max_stages of 1 or more and a gap in [0, 1), not {formulas}, {max_stages} and {gap}.")
    levels = min(chain.num_layers, grid.size, max_stages or chain.num_layers)
    known: dict[int, Tables] = {}
    best: StagePlan | None = None
    for formula in formulas:
        if formula.microbatches not in known:
            known[formula.microbatches] = tables(chain, grid, oracle, formula.microbatches)
        cutoff = best.seconds if best else np.inf
        best = best_stages(known[formula.microbatches], grid, formula, levels, cutoff, gap) or best
    if best is None:
        raise shortage([(known[f.microbatches], f) for f in formulas], grid, levels)
    return best


def best_stages(table: Tables, grid: Grid, formula: Formula, levels: int, cutoff: float = np.inf, gap: float = 0.0) -> StagePlan | None:
    """The fastest stages under one schedule, if they take less than `cutoff` seconds.

    Where the closed form depends on how many stages there are, it grows with them. A search that lets any number of stages take and hold
    as little as one would settles it, if its plan does so in truth. Else each number of stages is a search of its own, those near that
    plan's first; numbers are passed over from one on for which a search that lets more stages take and hold as little finds nothing better.
    """
    easy = Search(table, grid, formula, gap, 1, levels)
    best = easy.run(cutoff)
    if best is None or not formula.counts_all or easy.holds(best):
        return best
    near, best, below = len(best.stages), None, levels + 1
    exactly = formula.name == "interleaved"
    for count in sorted(_counts(formula, table.num_layers, levels), key=lambda count: (abs(count - near), count)):
        limit = best.seconds if best else cutoff
        if count >= below:
            continue
        if best and Search(table, grid, formula, gap, count, levels).run(limit, first=True) is None:
            below = count
        else:
            best = Search(table, grid, formula, gap, count, count, exactly).run(limit) or best
    return best


def _counts(formula: Formula, layers: int, levels: int) -> list[int]:
    """The numbers of stages that a schedule may have. Interleaving wants a layer for each chunk."""
    return list(range(1, min(levels, layers // formula.chunks) + 1))


@dataclass(frozen=True)
class Corner:
    """The least sum under a box's upper bounds, and the maxima of the plan that has it, as places among each peak's values."""

    least: float
    maxima: tuple[int, ...]


@dataclass(frozen=True, order=True)
class _Box:
    """Plans whose maxima lie between the values at `low` and `high` of each peak; none of them takes less than `bound`."""

    bound: float
    low: tuple[int, ...]
    high: tuple[int, ...]
    corner: Corner = field(compare=False)


class Search:
    """Branch and bound over the peaks' bounds, for one schedule over one table.

    Stages take and hold what they would among `count`. There are at most `levels` of them, or `exactly` as many.
    """

    def __init__(self, table: Tables, grid: Grid, formula: Formula, gap: float, count: int, levels: int, exactly: bool = False):
        self.table, self.grid, self.formula, self.gap = table, grid, formula, gap
        self.count, self.levels, self.exactly = count, levels, exactly
        self.frame = Frame(table.row, table.units, table.total)
        self.sums, self.hop_sums, peaks = formula_arrays(table, formula, count)
        self.weights = [weight for weight, _, _ in peaks]
        self.peaks = [(stage, hop) for _, stage, hop in peaks]
        self.values = [_sorted(stage, hop) for stage, hop in self.peaks]
        self.limit = np.inf if grid.memory_bytes is None else grid.memory_bytes
        self.fits: dict[Flight, Floats] = {}
        self.best: StagePlan | None = None
        self.value = np.inf

    def run(self, cutoff: float, first: bool = False) -> StagePlan | None:
        """The fastest plan that takes less than `cutoff`, or the `first` that is found."""
        self.value = cutoff
        if np.isfinite(self.sums).any():
            low = tuple(self._least(r) for r in range(len(self.peaks)))
            self._climb(low)
            if self.best is None or not first:
                self._branch(low, first)
        return self.best

    def holds(self, plan: StagePlan) -> bool:
        """Whether a plan takes and holds, among as many stages as it has, no more than was found for it."""
        return plan.seconds <= self.value * (1 + 1e-9) and all(stage.nbytes <= self.limit for stage in plan.stages)

    def _branch(self, low: tuple[int, ...], first: bool) -> None:
        """Boxes by their bounds, until none can hold a better plan."""
        high = self._shrunk(low, tuple(len(values) - 1 for values in self.values), self._floor(low))
        boxes: list[_Box] = []
        self._push(boxes, low, high, self._solve(low, high))
        while boxes:
            box = heapq.heappop(boxes)
            if not self._better(box.bound) or (first and self.best is not None):
                return
            r, middle = self._cut(box)
            self._push(boxes, _with(box.low, r, middle + 1), box.high, box.corner)
            left = self._shrunk(box.low, _with(box.high, r, middle), box.corner.least)
            self._push(boxes, box.low, left, self._solve(box.low, left))

    def _push(self, boxes: list[_Box], low: tuple[int, ...], high: tuple[int, ...], corner: Corner | None) -> None:
        if corner is not None:
            bound = corner.least + self._lower(low)
            if self._better(bound):
                heapq.heappush(boxes, _Box(bound, low, high, corner))

    def _cut(self, box: _Box) -> tuple[int, int]:
        """The peak that keeps the box's plan farthest from the box's bound, and the place half way between the two."""
        spans = [w * (v[m] - v[a]) for w, v, a, m in zip(self.weights, self.values, box.low, box.corner.maxima, strict=True)]
        r = int(np.argmax(spans))
        values, a, m = self.values[r], box.low[r], box.corner.maxima[r]
        middle = int(np.searchsorted(values, (values[a] + values[m]) / 2, side="right")) - 1
        return r, min(max(middle, a), m - 1)

    def _shrunk(self, low: tuple[int, ...], high: tuple[int, ...], least: float) -> tuple[int, ...]:
        """Upper bounds of a box without what is so high that no plan can be better, whose sum is `least` or more."""
        room = max(0.0, (self.value - least - self._lower(low)) * (1 + 1e-9))
        tops = (np.searchsorted(v, v[a] + room / w, side="right") - 1 for w, v, a in zip(self.weights, self.values, low, strict=True))
        return tuple(min(int(top), b) for top, b in zip(tops, high, strict=True))

    def _floor(self, low: tuple[int, ...]) -> float:
        """The least sum, whatever the peaks and the devices."""
        cheapest = self.frame.spread(self._costs(1, [np.inf] * len(low))).min(axis=2)
        least = np.zeros(len(cheapest) + 1)
        for j in range(1, len(least)):
            least[j] = np.min(least[:j] + cheapest[:j, j])
        return float(least[-1])

    def _better(self, bound: float) -> bool:
        return bound < self.value * (1 - max(self.gap, ROUNDING))

    def _lower(self, low: tuple[int, ...]) -> float:
        """What the peaks take at least."""
        return sum(float(w * v[a]) for w, v, a in zip(self.weights, self.values, low, strict=True))

    def _least(self, r: int) -> int:
        """The place of the least bound on one peak under which there may be a plan."""
        a, b = 0, len(self.values[r]) - 1
        while a < b:
            middle = (a + b) // 2
            bounds = [np.inf] * len(self.values)
            bounds[r] = self.values[r][middle]
            before, _ = least_devices(self.frame, self.frame.spread(self._costs(1, bounds)))
            a, b = (a, middle) if before[-1] <= self.frame.total else (middle + 1, b)
        return a

    def _climb(self, low: tuple[int, ...]) -> None:
        """A first plan: bounds on the first peak are raised until there is one."""
        top = [len(values) - 1 for values in self.values]
        for factor in CLIMB:
            values = self.values[0]
            high = int(np.searchsorted(values, values[low[0]] * factor, side="right")) - 1
            if self._solve(low, (high, *top[1:])) is not None or high == top[0]:
                return

    def _solve(self, low: tuple[int, ...], high: tuple[int, ...]) -> Corner | None:
        """The plan of the least sum under upper bounds, unless no plan within them can be better than the best. It may become the best."""
        bounds = [values[b] for values, b in zip(self.values, high, strict=True)]
        hop = self.hop_sums
        for (_, between), bound in zip(self.peaks, bounds, strict=True):
            hop = np.where(between <= bound, hop, np.inf)
        room = self.value - self._lower(low)
        costs = partial(self._costs, bounds=bounds)
        found = sweep(self.frame, costs, hop, np.add, self.levels, cutoff=room, exactly=self.exactly)
        if found is None:
            return None
        picks = self._picks(found, bounds)
        maxima = tuple(self._maximum(r, found, picks) for r in range(len(bounds)))
        value = found.value + self._lower(maxima)
        if value < self.value:
            self.best, self.value = make_plan(self.table, self.grid, self.formula, found.stages, picks), value
        return Corner(found.value, maxima)

    def _picks(self, found: Found, bounds: Sequence[float]) -> list[int]:
        """The choice of each stage that gives the least sum."""
        n = len(found.stages)
        return [int(np.argmin(self._allowed(n - s, bounds)[self.table.row[i, j], m])) for s, (i, j, m) in enumerate(found.stages)]

    def _maximum(self, r: int, found: Found, picks: Sequence[int]) -> int:
        """The place among a peak's values of the largest on these stages and the hops between them."""
        stage, hop = self.peaks[r]
        values = [stage[self.table.row[i, j], m, c] for (i, j, m), c in zip(found.stages, picks, strict=True)]
        values += [hop[i, a, b] for (_, _, a), (i, _, b) in zip(found.stages, found.stages[1:], strict=False)]
        return int(np.searchsorted(self.values[r], max(values)))

    def _fit(self, position: int) -> Floats:
        """Which choices fit the memory at a position from the end."""
        flight = self.formula.flight(position, max(self.count, position))
        if flight not in self.fits:
            self.fits[flight] = np.where(self.table.nbytes(flight) <= self.limit, self.sums, np.inf)
        return self.fits[flight]

    def _allowed(self, position: int, bounds: Sequence[float]) -> Floats:
        """What each choice adds to the sum; infinite where it does not fit or exceeds a bound."""
        found = self._fit(position)
        for (stage, _), bound in zip(self.peaks, bounds, strict=True):
            if np.isfinite(bound):
                found = np.where(stage <= bound, found, np.inf)
        return found

    def _costs(self, position: int, bounds: Sequence[float]) -> Floats:
        return self._allowed(position, bounds).min(axis=2)


def _sorted(stage: Floats, hop: Floats) -> Floats:
    """All values that a peak may have."""
    return np.unique(np.concatenate([stage[np.isfinite(stage)], hop[1:-1].ravel()]))


def _with(places: tuple[int, ...], r: int, place: int) -> tuple[int, ...]:
    return (*places[:r], place, *places[r + 1 :])
