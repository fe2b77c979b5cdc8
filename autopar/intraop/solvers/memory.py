"""Memory over time as rows of the programme, made only for the times that are asked for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.intraop.evaluate import horizon_of
from autopar.ir.problem import Floats, Ints, Problem

ROWS_PER_ROUND = 12
APART, SKETCHES = 0.1, 16
"""Rows of one round differ by a tenth of their size, as seen in so many random projections: in a program of equal layers, many rows
are equal or nearly so, and say the same."""


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Usages as triplets over the global columns (strategies, then side columns)."""

    column: Ints
    start: Ints
    stop: Ints
    nbytes: Floats
    fixed: Floats
    """Bytes held whatever is chosen, at each time."""

    @cached_property
    def events(self) -> Ints:
        """The times at which usage may rise, and the first: between two of them it never does."""
        changes = np.flatnonzero(np.diff(self.fixed)) + 1
        times = np.unique(np.concatenate([[0], self.start, self.stop[self.nbytes < 0], changes])).astype(np.int64)
        return times[times < self.horizon]

    @property
    def horizon(self) -> int:
        """The number of times."""
        return len(self.fixed)

    def usage(self, values: Floats) -> Floats:
        """Bytes at each time for one value per column, fractional or not."""
        held = self.nbytes * values[self.column]
        change = np.bincount(self.start, held, minlength=self.horizon + 1) - np.bincount(self.stop, held, minlength=self.horizon + 1)
        return np.cumsum(change)[: self.horizon] + self.fixed

    def row(self, time: int) -> tuple[Ints, Floats]:
        """Columns that hold memory at `time`, and how much."""
        active = np.flatnonzero((self.start <= time) & (time < self.stop))
        columns, where = np.unique(self.column[active], return_inverse=True)
        return columns, np.bincount(where, self.nbytes[active], minlength=len(columns)).astype(float)

    @cached_property
    def sketch(self) -> Floats:
        """A few random sums (columns) of each event's row (rows): distances between rows nearly are those between their sketches."""
        random, count = np.random.default_rng(0), int(self.column.max(initial=0)) + 1
        sums = [self.usage(random.choice((-1.0, 1.0), count)) - self.fixed for _ in range(SKETCHES)]
        return np.stack(sums, axis=1)[self.events]

    def worst_times(self, usage: Floats, limit: float, known: Set[int] = frozenset()) -> list[int]:
        """The times over `limit` that are worst, at most twelve that differ, none of them `known`; empty where all fits."""
        if not self.horizon:
            return []
        at = usage[self.events]
        rises, falls = np.diff(at, prepend=-np.inf) > 0, np.diff(at, append=-np.inf) <= 0
        peaks = [int(i) for i in np.flatnonzero((at > limit) & rises & falls) if int(self.events[i]) not in known]
        chosen: list[int] = []
        for i in sorted(peaks, key=lambda i: -at[i]):
            if chosen and self._differs_least(i, chosen) < APART:
                continue
            chosen.append(i)
            if len(chosen) == ROWS_PER_ROUND:
                break
        return [int(self.events[i]) for i in chosen]

    def _differs_least(self, event: int, chosen: list[int]) -> float:
        """Relative distance of an event's row to the nearest of those chosen."""
        own = self.sketch[event]
        return float(np.linalg.norm(self.sketch[chosen] - own, axis=1).min()) / max(float(np.linalg.norm(own)), 1e-300)


def memory_rows(problem: Problem) -> MemoryRows:
    """The usages of `problem`, with empty ones dropped."""
    side, offsets = problem.side, problem.offsets
    counts = np.array([len(u.nbytes) for u in problem.usages], np.int64)
    first = np.array([offsets[u.node] for u in problem.usages], np.int64)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    column = np.concatenate([np.repeat(first, counts) + within, side.usage_column + problem.num_choices])
    start = np.concatenate([np.repeat(np.array([u.start for u in problem.usages], np.int64), counts), side.usage_start])
    stop = np.concatenate([np.repeat(np.array([u.stop for u in problem.usages], np.int64), counts), side.usage_stop])
    nbytes = np.concatenate([*(u.nbytes for u in problem.usages), side.usage_bytes]).astype(float)
    keep = (nbytes != 0) & (start < stop)
    fixed = np.zeros(horizon_of(problem))
    fixed[: len(problem.fixed_bytes)] = problem.fixed_bytes
    return MemoryRows(column[keep].astype(np.int64), start[keep].astype(np.int64), stop[keep].astype(np.int64), nbytes[keep], fixed)
