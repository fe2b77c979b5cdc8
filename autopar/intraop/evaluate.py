"""What an answer is worth on the problem as it was stated: no presolve, no scaling, no solver. Every solve ends here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal as OneOf

import numpy as np

from autopar.errors import AutoparError
from autopar.ir.problem import Floats, Ints, Problem, Solution

ROW_TOLERANCE = 1e-6
"""How far a side row or a side column's bound may be missed, relative to the largest term in it (at least 1)."""

WHOLE_TOLERANCE = 1e-6
"""How far an integer side column may be from a whole number."""


class Infeasible(AutoparError):
    """No choice keeps within the budget; with `solution` None, no choice satisfies the edges and side rows at any budget (with `proven`
    False none was found in the time given).

    `solution` has the least peak that is possible, `peak_bytes` (with `proven` False the least that was found in the time given).
    The budget is enough from there on. No answer has a peak below `floor_bytes`.
    """

    def __init__(
        self,
        message: str,
        peak_bytes: float | None = None,
        solution: Solution | None = None,
        proven: bool = True,
        floor_bytes: float = 0.0,
    ):
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.peak_bytes = peak_bytes
        self.solution = solution
        self.proven = proven


class TooDear(Infeasible):
    """No answer within the budget is as cheap as what is asked for: `bound`, in seconds, is proven."""

    def __init__(self, bound: float):
        super().__init__(f"no answer takes less than {bound:.6g} s", proven=False)
        self.bound = bound


@dataclass(frozen=True)
class Evaluation:
    """Seconds and bytes of an answer, and what it violates.

    `objective` is infinite where the choice uses an excluded strategy or pair. `peak_time` is the first time of the largest usage.
    `violated_columns` are indices of side columns out of bounds or not whole; `excess_bytes` is what the peak has over the budget.
    """

    objective: float
    peak_bytes: float
    peak_time: int
    violated_rows: tuple[int, ...]
    violated_columns: tuple[int, ...]
    excess_bytes: float

    @property
    def consistent(self) -> bool:
        """Whether edges, side rows and side columns allow the answer, whatever memory it takes."""
        return bool(np.isfinite(self.objective)) and not self.violated_rows and not self.violated_columns

    @property
    def feasible(self) -> bool:
        """Whether the answer is allowed and fits the budget."""
        return self.consistent and self.excess_bytes <= 0


Kind = OneOf["node", "side", "fixed"]


@dataclass(frozen=True)
class Live:
    """Bytes held at some time by a node's strategy, by a side column, or whatever is chosen."""

    kind: Kind
    index: int
    nbytes: float


def evaluate(problem: Problem, choice: Sequence[int], side: Floats) -> Evaluation:
    """Prices `choice` (a strategy per node) and `side` (a value per side column) and checks every constraint."""
    usage = usage_over_time(problem, choice, side)
    peak_time = int(np.argmax(usage)) if usage.size else 0
    peak = float(usage[peak_time]) if usage.size else 0.0
    return Evaluation(
        objective=_seconds(problem, choice, side),
        peak_bytes=peak,
        peak_time=peak_time,
        violated_rows=_violated_rows(problem, choice, side),
        violated_columns=_violated_columns(problem, side),
        excess_bytes=max(0.0, peak - allowed_bytes(problem)),
    )


def allowed_bytes(problem: Problem) -> float:
    """The budget with what rounding may add: 1e-12 of it, and 1e-7 where continuous side columns hold memory."""
    if problem.budget is None:
        return np.inf
    continuous = bool(np.any(~problem.side.integer[problem.side.usage_column]))
    return problem.budget + abs(problem.budget) * (1e-7 if continuous else 1e-12)


def usage_over_time(problem: Problem, choice: Sequence[int], side: Floats) -> Floats:
    """Bytes held at each time, as the running sum of what begins and ends there."""
    length = horizon_of(problem)
    change = np.zeros(length + 1)
    for usage in problem.usages:
        nbytes = usage.nbytes[choice[usage.node]]
        if usage.start < usage.stop:
            change[usage.start] += nbytes
            change[usage.stop] -= nbytes
    columns = problem.side
    lasting = columns.usage_start < columns.usage_stop
    held = (columns.usage_bytes * np.asarray(side)[columns.usage_column])[lasting]
    change += np.bincount(columns.usage_start[lasting], held, minlength=length + 1)
    change -= np.bincount(columns.usage_stop[lasting], held, minlength=length + 1)
    usage_at = np.cumsum(change[:length])
    usage_at[: len(problem.fixed_bytes)] += problem.fixed_bytes
    return usage_at


def horizon_of(problem: Problem) -> int:
    """The first time after which nothing is held; at least `problem.horizon`."""
    stops = [usage.stop for usage in problem.usages]
    return max([problem.horizon, len(problem.fixed_bytes), int(problem.side.usage_stop.max(initial=0)), *stops])


def live_at(problem: Problem, choice: Sequence[int], side: Floats, time: int) -> tuple[Live, ...]:
    """What holds memory at `time`, from large to small, with the usages of one node or column added up; empty ones are left out."""
    held: dict[tuple[Kind, int], float] = {}
    key: tuple[Kind, int]
    for usage in problem.usages:
        if usage.start <= time < usage.stop:
            key = ("node", usage.node)
            held[key] = held.get(key, 0.0) + float(usage.nbytes[choice[usage.node]])
    columns = problem.side
    for i in np.flatnonzero((columns.usage_start <= time) & (time < columns.usage_stop)):
        key = ("side", int(columns.usage_column[i]))
        held[key] = held.get(key, 0.0) + float(columns.usage_bytes[i] * side[columns.usage_column[i]])
    if time < len(problem.fixed_bytes):
        held["fixed", 0] = float(problem.fixed_bytes[time])
    live = [Live(kind, index, nbytes) for (kind, index), nbytes in held.items() if nbytes]
    return tuple(sorted(live, key=lambda item: (-item.nbytes, item.kind, item.index)))


def _seconds(problem: Problem, choice: Sequence[int], side: Floats) -> float:
    nodes = sum(float(costs[p]) for costs, p in zip(problem.node_costs, choice, strict=True))
    edges = sum(float(edge.cost[choice[edge.a], choice[edge.b]]) for edge in problem.edges)
    return nodes + edges + float(problem.side.cost @ side) + problem.constant_cost


def _violated_rows(problem: Problem, choice: Sequence[int], side: Floats) -> tuple[int, ...]:
    rows = problem.rows
    terms = rows.value * column_values(problem, choice, side)[rows.column]
    total = np.bincount(rows.row, terms, minlength=len(rows))
    largest = np.ones(len(rows))
    np.maximum.at(largest, rows.row, np.abs(terms))
    slack = ROW_TOLERANCE * largest
    return tuple(int(r) for r in np.flatnonzero((total < rows.lower - slack) | (total > rows.upper + slack)))


def _violated_columns(problem: Problem, side: Floats) -> tuple[int, ...]:
    columns, value = problem.side, np.asarray(side)
    slack = ROW_TOLERANCE * np.maximum(1.0, np.where(np.isfinite(columns.upper), np.abs(columns.upper), 1.0))
    outside = (value < -slack) | (value > columns.upper + slack)
    broken = columns.integer & (np.abs(value - np.round(value)) > WHOLE_TOLERANCE)
    return tuple(int(k) for k in np.flatnonzero(outside | broken))


def column_values(problem: Problem, choice: Sequence[int], side: Floats) -> Floats:
    """The answer as one value per global column: ones and zeros for the strategies, then the side columns."""
    values = np.zeros(problem.num_choices + len(problem.side))
    values[problem.offsets[:-1] + np.asarray(choice, np.int64)] = 1.0
    values[problem.num_choices :] = side
    return values


def choice_of(problem: Problem, values: Floats) -> Ints:
    """The strategy with the largest value at each node, from one value per strategy column."""
    offsets = problem.offsets
    return np.array([int(np.argmax(values[a:b])) for a, b in zip(offsets[:-1], offsets[1:], strict=True)], np.int64)
