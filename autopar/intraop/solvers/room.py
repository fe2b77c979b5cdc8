"""What cannot fit the budget whatever else is chosen: found from the least that every node holds at each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopar.intraop.evaluate import Infeasible, allowed_bytes, horizon_of
from autopar.ir.problem import Floats, Ints, Problem, Usage

Piece = tuple[Ints, Ints, Floats]
"""A node's usage in pieces of constant bytes: where each begins and stops, and bytes by piece (rows) and strategy (columns)."""


def excluded_by_memory(problem: Problem) -> Problem:
    """The problem without strategies and side columns that need more than the others leave; `Infeasible` where the least is too much.

    A strategy's cost becomes infinite; a side column's upper bound falls to what there is room for.
    """
    if problem.budget is None or not len(problem.node_costs):
        return problem
    pieces = _pieces(problem)
    room = allowed_bytes(problem) * (1 + 1e-9) - _least(problem, pieces)
    if room.size and room.min() < 0:
        raise Infeasible(f"at least {allowed_bytes(problem) - room.min():.0f} bytes are held whatever is chosen")
    costs = list(problem.node_costs)
    for node, (start, stop, nbytes) in pieces.items():
        over = nbytes - _lowest(costs[node], nbytes) > _smallest(room, start, stop)[:, None]
        costs[node] = np.where(over.any(axis=0), np.inf, costs[node])
    return replace(problem, node_costs=tuple(costs), side=replace(problem.side, upper=_upper(problem, room)))


def _pieces(problem: Problem) -> dict[int, Piece]:
    """The pieces of each node that holds anything."""
    usages: dict[int, list[Usage]] = {}
    for usage in problem.usages:
        if usage.start < usage.stop:
            usages.setdefault(usage.node, []).append(usage)
    found = {}
    for node, own in usages.items():
        times = np.unique([t for u in own for t in (u.start, u.stop)])
        change = np.zeros((len(times), len(problem.node_costs[node])))
        np.add.at(change, np.searchsorted(times, [u.start for u in own]), [u.nbytes for u in own])
        np.subtract.at(change, np.searchsorted(times, [u.stop for u in own]), [u.nbytes for u in own])
        found[node] = times[:-1], times[1:], np.cumsum(change, axis=0)[:-1]
    return found


def _lowest(costs: Floats, nbytes: Floats) -> Floats:
    """The least bytes of the strategies that are left, by piece."""
    return np.where(np.isfinite(costs), nbytes, np.inf).min(axis=1, keepdims=True)


def _least(problem: Problem, pieces: dict[int, Piece]) -> Floats:
    """Bytes at each time with every node at its least, and side columns that hold less than nothing at their most."""
    change, side = np.zeros(horizon_of(problem) + 1), problem.side
    for node, (start, stop, nbytes) in pieces.items():
        least = _lowest(problem.node_costs[node], nbytes)[:, 0]
        np.add.at(change, start, least)
        np.subtract.at(change, stop, least)
    below = np.flatnonzero((side.usage_bytes < 0) & (side.usage_start < side.usage_stop))
    most = side.usage_bytes[below] * side.upper[side.usage_column[below]]
    np.add.at(change, side.usage_start[below], most)
    np.subtract.at(change, side.usage_stop[below], most)
    usage = np.cumsum(change)[:-1]
    usage[: len(problem.fixed_bytes)] += problem.fixed_bytes
    return usage


def _smallest(room: Floats, start: Ints, stop: Ints) -> Floats:
    """The least of `room` in each interval, from tables of the least over powers of two."""
    tables, width = [room], 1
    while 2 * width <= int((stop - start).max(initial=1)):
        tables.append(np.minimum(tables[-1][:-width], tables[-1][width:]))
        width *= 2
    level = np.floor(np.log2(stop - start)).astype(np.int64)
    result = np.empty(len(start))
    for k, table in enumerate(tables):
        at = level == k
        result[at] = np.minimum(table[start[at]], table[stop[at] - (1 << k)])
    return result


def _upper(problem: Problem, room: Floats) -> Floats:
    """Upper bounds of the side columns, each alone with what every node holds at least."""
    side = problem.side
    held = np.flatnonzero((side.usage_bytes > 0) & (side.usage_start < side.usage_stop))
    upper, column = side.upper.copy(), side.usage_column[held]
    if not len(held) or np.any(side.usage_bytes < 0):
        return upper
    most = _smallest(room, side.usage_start[held], side.usage_stop[held]) / side.usage_bytes[held]
    np.minimum.at(upper, column, np.where(side.integer[column], np.floor(most * (1 + 1e-9) + 1e-9), most * (1 + 1e-9)))
    return np.maximum(upper, 0.0)
