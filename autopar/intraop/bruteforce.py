"""Every choice, tried: the independent truth for problems of a few nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from autopar.errors import SolverError, UsageError
from autopar.intraop.evaluate import Infeasible, evaluate, horizon_of, usage_over_time
from autopar.ir.problem import Floats, Problem, Solution

LARGEST = 200_000


def brute_force(problem: Problem) -> Solution:
    """The cheapest answer that fits, or `Infeasible` with the least peak. At most 200,000 choices.

    Side columns, where there are any, are a small programme of their own once the strategies are chosen.
    """
    best, found = np.inf, None
    for choice in _choices(problem):
        side = _best_side(problem, choice, least_peak=False)
        if side is None:
            continue
        value = evaluate(problem, choice, side)
        if value.feasible and value.objective < best:
            best, found = value.objective, Solution(choice, side, value.objective, value.objective, "optimal", value.peak_bytes)
    if found is not None:
        return found
    least = least_peak(problem)
    raise Infeasible("no choice fits the budget", least.peak_bytes, least)


def least_peak(problem: Problem) -> Solution:
    """The answer whose largest usage over time is the least, whatever its seconds and the budget."""
    best, found = np.inf, None
    for choice in _choices(problem):
        side = _best_side(problem, choice, least_peak=True)
        if side is None:
            continue
        value = evaluate(problem, choice, side)
        if value.consistent and value.peak_bytes < best:
            best, found = value.peak_bytes, Solution(choice, side, value.objective, -np.inf, "feasible", value.peak_bytes)
    if found is None:
        raise Infeasible("no choice satisfies the edges and side rows")
    return found


def _choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every choice whose node and edge costs are finite."""
    count = int(np.prod([len(c) for c in problem.node_costs], dtype=float))
    if count > LARGEST:
        raise UsageError(f"{count} choices are too many to enumerate; brute force takes at most {LARGEST}. Use another solver.")
    for choice in product(*(range(len(c)) for c in problem.node_costs)):
        cost = sum(c[p] for c, p in zip(problem.node_costs, choice, strict=True))
        if np.isfinite(cost + sum(e.cost[choice[e.a], choice[e.b]] for e in problem.edges)):
            yield choice


def _best_side(problem: Problem, choice: tuple[int, ...], least_peak: bool) -> Floats | None:
    """Side columns of least cost (or least peak) for fixed strategies; None where none fit."""
    columns, rows = problem.side, problem.rows
    count = len(columns)
    if not count:
        return np.zeros(0)
    fixed = np.zeros(problem.num_choices + count)
    fixed[[int(problem.offsets[i]) + p for i, p in enumerate(choice)]] = 1.0
    matrix = np.zeros((len(rows), problem.num_choices + count))
    np.add.at(matrix, (rows.row, rows.column), rows.value)
    given = matrix @ fixed
    horizon = horizon_of(problem)
    held = np.zeros((horizon, count + 1))
    for k, start, stop, nbytes in zip(columns.usage_column, columns.usage_start, columns.usage_stop, columns.usage_bytes, strict=True):
        held[start:stop, k] += nbytes
    base = usage_over_time(problem, choice, np.zeros(count))
    scale = max(1.0, float(base.max(initial=0)), float(held.max(initial=0)))
    limit = np.inf if problem.budget is None else problem.budget
    held /= scale
    if least_peak:
        held[:, count] = -1.0
    room = -base / scale if least_peak else (limit - base) / scale
    side_rows = np.hstack([matrix[:, problem.num_choices :], np.zeros((len(rows), 1))])
    cost = np.append(np.zeros(count), 1.0) if least_peak else np.append(columns.cost, 0.0)
    result = milp(
        cost / max(float(np.abs(cost).max()), 1e-300),
        integrality=np.append(columns.integer.astype(int), 0),
        bounds=Bounds(np.zeros(count + 1), np.append(columns.upper, np.inf if least_peak else 0.0)),
        constraints=[LinearConstraint(held, -np.inf, room), LinearConstraint(side_rows, rows.lower - given, rows.upper - given)],
    )
    if result.status == 2:
        return None
    if result.x is None:
        raise SolverError(f"scipy's milp ended with: {result.message}")
    side = result.x[:count]
    return np.where(np.abs(side - np.round(side)) < 1e-6, np.round(side), side)
