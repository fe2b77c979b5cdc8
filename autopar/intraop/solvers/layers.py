"""Columns that only memory can make worthwhile: moves of a late layer that could as well be made early and waited with, at no cost.

The conservation rows of a conversion tree are the states of a graph, its flows the arcs. A state is *late* where no strategy brings
flow in, and where all that enters comes from other late states or from one state outside, its *early* state, from which waiting is
free. Where every move between late states has an equal or cheaper *twin* between their early states, none of them is needed while
memory does not matter: all flow can go through the twins and wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from autopar.ir.problem import Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class _Arcs:
    """Flows as arcs between rows: side column, row it leaves, row it enters, and the side column that is paid for it.

    Any of them may be lowered; those that are `free` may be raised as well, up to one, by who pays the cost.
    """

    column: Ints
    tail: Ints
    head: Ints
    opening: Ints
    cost: Floats
    free: np.ndarray


def postponed(problem: Problem) -> Ints:
    """Side columns that some optimum without a budget leaves at zero, in the relaxation too."""
    arcs = _arcs(problem)
    if not arcs.free.any():
        return np.zeros(0, np.int64)
    early = _early_states(problem, arcs)
    late = (early[arcs.tail] >= 0) & (early[arcs.head] >= 0)
    twin = np.full(len(late), -1)
    twin[late] = _cheapest(arcs, early[arcs.tail[late]], early[arcs.head[late]])
    matched = late & arcs.free & (twin >= 0) & (arcs.cost[twin] <= arcs.cost)
    matched[late & ~_paid_alike(arcs, late, arcs.opening[twin])] = False
    group = _groups(arcs, len(problem.rows))
    unmatched = np.unique(group[late & ~matched])
    found = matched & ~np.isin(group, unmatched)
    return np.unique(np.concatenate([arcs.column[found], arcs.opening[found]]))


def _arcs(problem: Problem) -> _Arcs:
    """Side columns with one entry of 1 and one of -1 in conservation rows, and at most bounded from above in other rows."""
    rows, side, first = problem.rows, problem.side, problem.num_choices
    count = len(side)
    state = (rows.lower == 0) & (rows.upper == 0)
    on_side = rows.column >= first
    column = np.where(on_side, rows.column - first, 0)
    enters, leaves = (on_side & state[rows.row] & (rows.value == v) for v in (1.0, -1.0))
    capped = ((rows.value > 0) & np.isneginf(rows.lower)[rows.row]) | ((rows.value < 0) & np.isposinf(rows.upper)[rows.row])
    below, opening = _below(problem, state)
    total = np.bincount(column[on_side], minlength=count)
    flow = (np.bincount(column[enters], minlength=count) == 1) & (np.bincount(column[leaves], minlength=count) == 1)
    flow &= (total == 2 + np.bincount(column[on_side & capped], minlength=count)) & (side.cost >= 0)
    free = flow & (total == 2 + below) & (side.upper >= 1) & ((opening < 0) | (side.cost == 0))
    head, tail = np.zeros(count, np.int64), np.zeros(count, np.int64)
    head[column[enters]], tail[column[leaves]] = rows.row[enters], rows.row[leaves]
    flows = np.flatnonzero(flow)
    paid = np.where(opening[flows] >= 0, opening[flows], flows)
    return _Arcs(flows, tail[flows], head[flows], paid, side.cost[paid], free[flows])


def _below(problem: Problem, state: np.ndarray) -> tuple[np.ndarray, Ints]:
    """For each side column: whether a row `column <= opening` is there, and the opening (-1: none), which is in no other kind of row."""
    rows, side, first = problem.rows, problem.side, problem.num_choices
    order = np.argsort(rows.row, kind="stable")
    row, column, value = rows.row[order], rows.column[order] - first, rows.value[order]
    starts, lengths = np.unique(row, return_index=True, return_counts=True)[1:]
    pairs = starts[lengths == 2]
    a, b, va, vb = column[pairs], column[pairs + 1], value[pairs], value[pairs + 1]
    low, high = rows.lower[row[pairs]], rows.upper[row[pairs]]
    both = (a >= 0) & (b >= 0) & (va == -vb) & (np.abs(va) == 1) & ~state[row[pairs]]
    upward = np.isneginf(low) & (high == 0)  # the column with +1 is at most the one with -1
    downward = np.isposinf(high) & (low == 0)
    good = both & (upward | downward)
    first_is_flow = (va > 0) == upward
    flow, above = np.where(first_is_flow, a, b)[good], np.where(first_is_flow, b, a)[good]
    count = len(side)
    uses = np.bincount(column[column >= 0], minlength=count)
    fair = (np.bincount(above, minlength=count) == uses) & (side.upper == 1) & (side.cost >= 0)
    opening, below = np.full(count, -1, np.int64), np.bincount(flow, minlength=count)
    opening[flow[fair[above]]] = above[fair[above]]
    return np.where(opening >= 0, below, 0), opening


def _early_states(problem: Problem, arcs: _Arcs) -> Ints:
    """For each row that is a late state the row of its early state; -1 for all other rows."""
    rows, count = problem.rows, len(problem.rows)
    known = np.zeros(len(problem.side), bool)
    known[arcs.column] = True
    on_strategy = rows.column < problem.num_choices
    foreign = np.where(on_strategy, rows.value > 0, (rows.value > 0) & ~known[np.where(on_strategy, 0, rows.column - problem.num_choices)])
    graph = sparse.csr_matrix((np.ones(len(arcs.tail)), (arcs.tail, arcs.head)), shape=(count, count))
    part = connected_components(graph, connection="strong")[1]
    waits = arcs.free & (arcs.cost == 0) & (part[arcs.tail] != part[arcs.head])
    early, other = np.full(count, -1, np.int64), np.full(count, count, np.int64)
    np.maximum.at(early, arcs.head[waits], arcs.tail[waits])
    np.minimum.at(other, arcs.head[waits], arcs.tail[waits])
    early[early != other] = -1
    early[rows.row[foreign]] = -1
    early[_overfed(problem, graph)] = -1
    while True:
        late = early >= 0
        strange = late[arcs.head] & ~late[arcs.tail] & (early[arcs.head] != arcs.tail)
        drop = np.zeros(count, bool)
        drop[arcs.head[strange]] = True
        drop[late & late[early]] = True
        if not drop.any():
            return early
        early[drop] = -1


def _overfed(problem: Problem, graph: sparse.csr_matrix) -> np.ndarray:
    """Rows of graphs that more than one unit of flow may enter: strategies of several nodes, or one strategy more than once."""
    rows, count = problem.rows, len(problem.rows)
    part = connected_components(graph, directed=False)[1]
    source = np.flatnonzero((rows.column < problem.num_choices) & (rows.value > 0))
    where, column = part[rows.row[source]], rows.column[source]
    node = np.searchsorted(problem.offsets, column, side="right") - 1
    over = np.zeros(count, bool)
    over[where[rows.value[source] > 1]] = True
    unique, times = np.unique(np.stack([where, column]), axis=1, return_counts=True)
    over[unique[0][times > 1]] = True
    least, most = np.full(count, len(problem.offsets)), np.full(count, -1)
    np.minimum.at(least, where, node)
    np.maximum.at(most, where, node)
    return (over | (most > least))[part]


def _cheapest(arcs: _Arcs, tail: Ints, head: Ints) -> Ints:
    """The cheapest free arc from each tail to each head, or -1."""
    size = int(max(arcs.head.max(initial=0), arcs.tail.max(initial=0))) + 1
    key, free = arcs.tail * size + arcs.head, np.flatnonzero(arcs.free)
    order = free[np.lexsort((arcs.cost[free], key[free]))]
    wanted = tail * size + head
    at = order[np.minimum(np.searchsorted(key[order], wanted), len(order) - 1)]
    return np.where(key[at] == wanted, at, -1)


def _paid_alike(arcs: _Arcs, late: np.ndarray, twin: Ints) -> np.ndarray:
    """Whether all flows below an arc's opening are late and their twins have one opening."""
    count = int(arcs.opening.max(initial=0)) + 1
    least, most = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(least, arcs.opening[late], twin[late])
    np.maximum.at(most, arcs.opening[late], twin[late])
    every = np.bincount(arcs.opening[late], minlength=count) == np.bincount(arcs.opening, minlength=count)
    return (every & (least == most))[arcs.opening]


def _groups(arcs: _Arcs, count: int) -> Ints:
    """A number per arc, equal for arcs that share states or openings."""
    size = count + int(arcs.opening.max(initial=0)) + 1
    ends = np.concatenate([arcs.head, arcs.opening + count])
    graph = sparse.csr_matrix((np.ones(2 * len(arcs.tail)), (np.tile(arcs.tail, 2), ends)), shape=(size, size))
    return connected_components(graph, directed=False)[1][arcs.tail]
