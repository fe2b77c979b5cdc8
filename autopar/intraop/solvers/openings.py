"""Side columns that are best as low as their rows allow: an arc's opening is paid once, and must only be above the flows through it.

Where lowering one saves nothing, a relaxation leaves it open, and its bytes would count though nobody holds them.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from autopar.ir.problem import Floats, Problem

WHOLE = 1e-6
"""An opening may be this much below the flow through it when it is rounded to a whole number."""


class Openings:
    """The columns of `problem` that cost and hold nothing below zero, and that each of their rows bounds from below at most.

    No two of them share a row, so each can be lowered to what its rows ask for, and no other column has to move.
    """

    def __init__(self, problem: Problem):
        rows, first = problem.rows, problem.num_choices
        entry, free = _bounded_below(problem)
        self.columns = np.flatnonzero(free) + first
        self.integer = problem.side.integer[free]
        self.row, self.column, self.value = rows.row[entry], rows.column[entry], rows.value[entry]
        self.limit = np.where(self.value < 0, rows.upper[self.row], rows.lower[self.row])
        shape = (len(rows), first + len(problem.side))
        self.others = sparse.csr_matrix((rows.value[~entry], (rows.row[~entry], rows.column[~entry])), shape=shape)

    def lowered(self, values: Floats, *, whole: bool = False) -> Floats:
        """The same point with every such column as low as it can be; with `whole` those that are integer stay so.

        `values` holds one value per global column, and perhaps others behind them.
        """
        least = np.zeros(len(values))
        others = self.others @ values[: self.others.shape[1]]
        np.maximum.at(least, self.column, (self.limit - others[self.row]) / self.value)
        needed = least[self.columns]
        if whole:
            needed = np.where(self.integer, np.ceil(needed - WHOLE), needed)
        result = values.copy()
        result[self.columns] = np.minimum(values[self.columns], needed)
        return result


def _bounded_below(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Which entries of the rows bound an opening from below, and which side columns are openings."""
    side, rows, first = problem.side, problem.rows, problem.num_choices
    free = side.cost >= 0
    free[side.usage_column[side.usage_bytes < 0]] = False
    on_side = rows.column >= first
    below = ((rows.value < 0) & np.isneginf(rows.lower)[rows.row]) | ((rows.value > 0) & np.isposinf(rows.upper)[rows.row])
    free[rows.column[on_side & ~below] - first] = False
    entry = on_side.copy()
    entry[on_side] = free[rows.column[on_side] - first]
    several = np.bincount(rows.row[entry], minlength=len(rows)) > 1
    free[rows.column[entry & several[rows.row]] - first] = False
    entry[on_side] = free[rows.column[on_side] - first]
    return entry, free
