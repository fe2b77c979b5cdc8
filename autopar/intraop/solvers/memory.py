"""Memory over time as rows of the programme, made only for the times that are asked for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.intraop.evaluate import horizon_of
from autopar.ir.problem import Floats, Ints, Problem

ROWS_PER_ROUND = 12
SPACING = 200
"""Rows of one round are at least a 200th of the distinct event times apart: neighbours differ little, and say the same."""


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

    def worst_times(self, usage: Floats, limit: float, known: Set[int] = frozenset()) -> list[int]:
        """The times over `limit` that are worst, at most twelve and spaced, none of them `known`; empty where all fits."""
        if not self.horizon:
            return []
        at = usage[self.events]
        over = np.flatnonzero(at > limit)
        spacing = max(1, len(self.events) // SPACING)
        chosen: list[int] = []
        for i in over[np.argsort(-at[over], kind="stable")]:
            if int(self.events[i]) in known or any(abs(int(i) - j) < spacing for j in chosen):
                continue
            chosen.append(int(i))
            if len(chosen) == ROWS_PER_ROUND:
                break
        return [int(self.events[i]) for i in chosen]


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
