"""Relaxation, reduced-cost fixing and branch and bound with HiGHS, for one linear objective over a programme with lazy memory rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.errors import CheckError, SolverError
from autopar.intraop.evaluate import TooDear, allowed_bytes, choice_of
from autopar.intraop.solvers.bases import Bases
from autopar.intraop.solvers.layers import postponed
from autopar.intraop.solvers.memory import MemoryRows
from autopar.intraop.solvers.openings import Openings
from autopar.intraop.solvers.programme import Programme
from autopar.intraop.solvers.scaled import LARGE_COLUMNS, REPORT_TOLERANCE, SCALED_BUDGET, SCALED_OPTIMUM, Scaled, with_peak
from autopar.ir.problem import Floats, Problem

INTEGRAL = 1e-6
LONGEST_SETTLE_S = 3.0
"""Seconds that the side columns of fixed strategies may take, also past the deadline: there may be no other answer."""

DIVES = ((0.99, 1e-4, 10.0), (0.9999, 1e-3, 30.0))
"""Dives for an answer: a node with a strategy of at least this value keeps it; other columns of a reduced cost above this share of
the relaxation are closed; seconds."""

LEFT_TO_ANSWERS = 3e-3
"""Share by which a large relaxation may miss the budget: a run to put that right costs more than the rows that answers will add."""

FAILURES = 3
"""After so many spreads within which nothing fits, all columns are opened."""

Log = Callable[[str], None]


class Unsatisfiable(Exception):
    """No point satisfies the rows that were stated."""


class OutOfTime(Exception):
    """The deadline passed before the relaxation was solved."""


@dataclass(frozen=True)
class Point:
    """A solution of one run: column values and its value in the objective's own unit.

    A relaxation's `value` is a bound that its reduced costs prove: no column with one above zero is needed above its lower bound.
    """

    values: Floats
    value: float
    reduced: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Run:
    """How one branch and bound ended: `point` None where none was found; `bound` holds for the columns that were open."""

    point: Point | None
    bound: float
    finished: bool


@dataclass(frozen=True)
class Answer:
    """Strategies and side columns that satisfy everything, and their value in the objective's unit."""

    choice: tuple[int, ...]
    side: Floats
    value: float


Judge = Callable[[tuple[int, ...], Floats], float | None]
"""The exact value of an answer, or None where it is not allowed or does not fit."""


Repair = Callable[["Branch", tuple[int, ...]], tuple[tuple[int, ...], Floats] | None]
"""Strategies near those given and side columns that go with them, or None where none were found."""


class Branch:
    """Minimises `model` under `limit` bytes at every time; with `peak` a last column of the model stands for the limit.

    `best` is the best answer so far, `bound` the proven bound: both are good at any moment, which is what makes the solve anytime.
    Once the bound is at `below` or above, no answer is of use, and `TooDear` is raised. No answer has a peak below `floor_bytes`.
    """

    def __init__(
        self,
        problem: Problem,
        model: Programme,
        memory: MemoryRows,
        judge: Judge,
        repair: Repair,
        *,
        limit: float,
        peak: bool = False,
        gap: float,
        deadline: float,
        log: Log,
        below: float = np.inf,
        bases: Bases | None = None,
    ):
        self.bases = bases or Bases()
        self.problem, self.model, self.memory, self.below = problem, model, memory, below
        self.judge, self.repair = judge, repair
        self.limit, self.peak, self.gap, self.deadline, self.log = limit, peak, gap, deadline, log
        self.best: Answer | None = None
        self.floor_bytes = 0.0
        self.bound = least_sum(model)
        self.scaled = Scaled(model, memory, limit, peak, gap, self.bound)
        self.openings = Openings(problem)

    def minimise(self) -> None:
        """Runs until proven within the gap or out of time; `Unsatisfiable` where nothing fits, `TooDear` where nothing is of use."""
        if not len(self.model.cost):
            self.take((), np.zeros(0), self.judge((), np.zeros(0)))
            if self.best is None:
                raise Unsatisfiable
            return
        try:
            if self.unburdened():
                return
            relaxed = self.relax(LEFT_TO_ANSWERS if self.large else 0.0)
        except OutOfTime:
            return
        self.raise_bound(relaxed.value)
        self.log(f"relaxation {relaxed.value:.9g} with {len(self.scaled.times)} memory rows")
        self.offer(relaxed.values)
        if not self.closed:
            self.dive(relaxed)
        if not self.closed:
            self.close(relaxed)

    def unburdened(self) -> bool:
        """Whether the relaxation without memory ends the solve."""
        point = self.relax_unburdened()
        if point is not None:
            self.offer(point.values)
        return self.closed

    def relax_unburdened(self, excess: float = 0.0) -> Point | None:
        """The relaxation without memory, with all columns closed that only memory makes worthwhile; None where there are none.

        The first memory rows are where it is over the limit by more than a share of `excess`.
        """
        late = np.zeros(0, np.int64) if self.peak else postponed(self.problem) + self.model.num_choices
        if not len(late):
            return None
        upper = self.model.upper.copy()
        upper[late] = 0.0
        point = self.relax_once(upper)[1]
        self.log(f"relaxation {point.value:.9g} without memory")
        self.raise_bound(point.value)
        self.scaled.times = self.violated(point.values, excess)
        return point

    def raise_bound(self, bound: float) -> None:
        """What was proven."""
        self.bound = max(self.bound, bound)
        if self.bound >= self.below:
            raise TooDear(self.bound)

    @property
    def closed(self) -> bool:
        """Whether the best answer is proven within the gap."""
        return self.best is not None and self.best.value - self.bound <= self.gap * abs(self.best.value) + 1e-12 * self.scaled.unit

    @property
    def large(self) -> bool:
        """Whether relaxations with memory rows go to the interior point method, and answers are sought by diving."""
        return len(self.model.cost) > LARGE_COLUMNS

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.deadline

    def relax(self, excess: float = 0.0) -> Point:
        """The relaxation with every memory row that it violates by more than a share of `excess`."""
        if self.large and self.scaled.times:
            return self.relax_inside(excess)
        solver, point = self.relax_once(self.model.upper)
        while times := self.violated(point.values, excess):
            self.scaled.times += times
            if self.large:
                return self.relax_inside(excess)
            self.scaled.add_rows(solver, [self.scaled.memory_row(at) for at in times])
            point = self.run_relaxation(solver, self.model.upper)
        return point

    def relax_once(self, upper: Floats) -> tuple[highspy.Highs, Point]:
        """The relaxation with the memory rows known so far, re-scaled once if its value shows that the unit was a bad guess."""
        solver, point = self.run_fresh(upper)
        size = max(abs(point.value), abs(point.value - self.model.constant)) / self.scaled.unit
        if not size or SCALED_OPTIMUM / 1e2 <= size <= SCALED_OPTIMUM * 1e2:
            return solver, point
        self.scaled.unit *= size / SCALED_OPTIMUM
        return self.run_fresh(upper)

    def run_fresh(self, upper: Floats) -> tuple[highspy.Highs, Point]:
        """One run of the simplex method, from where one with the same matrix ended."""
        solver = self.scaled.fresh(np.zeros_like(upper), upper, integers=False)
        if self.model.num_side:
            self.bases.begin(solver, self.model)
        point = self.run_relaxation(solver, upper)
        if self.model.num_side:
            self.bases.keep(solver, self.model)
        return solver, point

    def relax_inside(self, excess: float = 0.0) -> Point:
        """The same by the interior point method, as dual simplex takes minutes with memory rows. Nothing here needs a vertex."""
        while True:
            point = self.run_inside()
            times = self.violated(point.values, excess)
            self.log(f"interior point: at least {point.value:.9g} with {len(self.scaled.times)} memory rows, {len(times)} more violated")
            if not times:
                return point
            self.scaled.times += times

    def run_inside(self) -> Point:
        """One run of the interior point method; simplex where it claims without proof that nothing fits."""
        everything = np.zeros_like(self.model.upper), self.model.upper
        try:
            point = self.run_relaxation(inside(self.scaled.fresh(*everything, integers=False)), self.model.upper)
        except Unsatisfiable:
            if self.peak or self.overfull():
                raise
            point = self.run_relaxation(self.scaled.fresh(*everything, integers=False), self.model.upper)
        self.raise_bound(point.value)
        return point

    def overfull(self) -> bool:
        """Whether duals prove that the relaxation's least peak is above the limit, by the memory rows known so far."""
        model = with_peak(self.model, self.memory, self.limit)
        scaled = Scaled(model, self.memory, self.limit, True, self.gap, 0.0)
        scaled.unit, scaled.times = SCALED_BUDGET / SCALED_OPTIMUM, list(self.scaled.times)
        solver = inside(scaled.fresh(np.zeros_like(model.upper), model.upper, integers=False))
        self.limit_time(solver)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        least, _ = scaled.dual_bound(model.upper, np.array(solver.getSolution().row_dual))
        self.floor_bytes = least * scaled.byte_unit
        self.log(f"the least peak is at least {self.floor_bytes:.0f} bytes")
        return self.floor_bytes > self.limit

    def least_value(self) -> float:
        """A bound from the memory rows known so far alone; not the last word, and soon said."""
        try:
            self.run_inside()
        except OutOfTime:
            pass
        return self.bound

    def run_relaxation(self, solver: highspy.Highs, upper: Floats) -> Point:
        self.limit_time(solver)
        solver.run()
        status = solver.getModelStatus()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            raise Unsatisfiable
        if status == highspy.HighsModelStatus.kTimeLimit:
            raise OutOfTime
        if status != highspy.HighsModelStatus.kOptimal:
            if solver.getOptionValue("solver")[1] != "ipm":
                raise SolverError(f"HiGHS ended the relaxation with `{solver.modelStatusToString(status)}`. Try another solver.")
            solver.setOptionValue("solver", "simplex")
            return self.run_relaxation(solver, upper)
        solution = solver.getSolution()
        values, _ = self.scaled.checked(solver, solution)
        return Point(values, *self.scaled.dual_bound(upper, np.array(solution.row_dual)))

    def dive(self, relaxed: Point) -> None:
        """Seeks an answer where the relaxation nearly is one: nodes that it decides stay so, columns that it does without are closed."""
        if not self.large:
            return
        offsets, values = self.problem.offsets, relaxed.values[: self.model.num_choices]
        largest = np.repeat(np.maximum.reduceat(values, offsets[:-1]), np.diff(offsets))
        for decided, share, seconds in DIVES:
            if self.closed or self.late:
                return
            lower, upper, _ = self.narrowed(relaxed, share * abs(relaxed.value))
            closed = np.flatnonzero((largest >= decided) & (values < largest))
            upper[closed] = 0.0
            lower[closed] = 0.0
            self.log(f"dive: {int(np.sum(upper > lower))} of {len(upper)} columns open")
            try:
                self.branch(lower, upper, seconds)
            except Unsatisfiable:
                continue

    def close(self, relaxed: Point) -> None:
        """Branch and bound on the columns whose reduced cost leaves them a chance, with a spread that grows until it is proven enough.

        No answer within `spread` of the relaxation uses a column of a larger reduced cost.
        """
        spread, failures = min(self.first_spread(relaxed), self.below - relaxed.value), 0
        while not self.late and not self.closed:
            lower, upper, everything = self.narrowed(relaxed, spread)
            self.log(f"{int(np.sum(upper > lower))} of {len(upper)} columns open within {spread:.3g} of the relaxation")
            try:
                run = self.branch(lower, upper)
            except Unsatisfiable:
                if everything:
                    raise
                self.raise_bound(relaxed.value + spread)
                failures += 1
                spread = 4 * spread if failures < FAILURES else np.inf
                continue
            if run.point is not None and run.point.value < relaxed.value - REPORT_TOLERANCE * max(abs(relaxed.value), self.scaled.unit):
                raise CheckError(f"HiGHS reports {run.point.value:.9g}, which is below its own relaxation, {relaxed.value:.9g}")
            self.raise_bound(run.bound if everything else min(run.bound, relaxed.value + spread))
            if everything or self.closed or not run.finished or self.best is None:
                return
            needed = (self.best.value - relaxed.value) * (1 + 1e-9)
            spread = min(needed, 8 * spread) if needed > spread else 2 * spread

    def first_spread(self, relaxed: Point) -> float:
        """0.3 % of the relaxation, or what the best answer proves to be enough when that is under 1 %."""
        size = abs(relaxed.value)
        if self.best is not None and self.best.value - relaxed.value <= 0.01 * size:
            return (self.best.value - relaxed.value) * (1 + 1e-6) + 1e-9 * self.scaled.unit
        return max(0.003 * size, self.scaled.unit)

    def narrowed(self, relaxed: Point, spread: float) -> tuple[Floats, Floats, bool]:
        """Bounds that any answer within `spread` of the relaxation obeys, and whether they are the original ones."""
        lower, upper = np.zeros_like(self.model.upper), self.model.upper.copy()
        reduced = relaxed.reduced
        priced = np.abs(reduced) > 1e-9 * self.scaled.unit
        reach = np.divide(spread, np.abs(reduced), out=np.full_like(reduced, np.inf), where=priced)
        at_lower, at_upper = reduced > 0, (reduced < 0) & np.isfinite(upper)
        upper[at_lower] = np.minimum(upper, reach)[at_lower]
        lower[at_upper] = np.maximum(0.0, upper[at_upper] - reach[at_upper])
        sides = slice(self.model.num_choices, self.columns)
        whole = np.isfinite(upper)
        whole[sides] &= self.model.integer[sides]
        if self.peak:
            whole[-1] = False
        upper[whole] = np.floor(upper[whole] + INTEGRAL)
        lower[whole] = np.ceil(lower[whole] - INTEGRAL)
        return lower, upper, bool(np.all(lower == 0) and np.all(upper == self.model.upper))

    def branch(self, lower: Floats, upper: Floats, seconds: float = np.inf) -> Run:
        """Branch and bound on fresh objects, once more with each memory row or cover that the answer violates, for some seconds."""
        ends = time.monotonic() + seconds
        while True:
            solver = self.scaled.fresh(lower, upper, integers=True)
            self.limit_time(solver, ends)
            solver.run()
            status, info = solver.getModelStatus(), solver.getInfo()
            if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
                raise Unsatisfiable
            finished = status == highspy.HighsModelStatus.kOptimal
            if not finished and status != highspy.HighsModelStatus.kTimeLimit:
                raise SolverError(f"HiGHS ended branch and bound with `{solver.modelStatusToString(status)}`. Try another solver.")
            bound = info.mip_dual_bound * self.scaled.unit
            if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
                return Run(None, bound, finished)
            values, value = self.scaled.checked(solver, solver.getSolution())
            self.offer(values)
            if not self.tighten(values) or time.monotonic() >= min(ends, self.deadline):
                return Run(Point(values, value), bound, finished)
            self.log(f"{len(self.scaled.times)} memory rows, {len(self.scaled.covers)} covers")

    def tighten(self, values: Floats) -> bool:
        """Adds what an integral answer violates; whether there was anything to add."""
        rounded = self.rounded(values)
        times = self.violated(rounded, self.gap / 2 if self.peak else 0.0)
        self.scaled.times += times
        if times or self.peak:
            return bool(times)
        usage = self.memory.usage(self.openings.lowered(rounded, whole=True)[: self.columns])
        worst = int(np.argmax(usage)) if usage.size else 0
        if not usage.size or usage[worst] <= allowed_bytes(self.problem):
            return False
        cover = self.cover(worst, rounded)
        if cover is not None:
            self.scaled.covers.append(cover)
        return cover is not None

    def cover(self, at: int, rounded: Floats) -> np.ndarray | None:
        """Strategies that together exceed the limit at a time by themselves: not all of them can be chosen.

        This is how an excess that HiGHS' tolerance lets through is cut off without touching any answer that fits. None where
        side columns are part of the excess, or usages below zero could make up for it.
        """
        columns, nbytes = self.memory.row(at)
        chosen = (columns < self.model.num_choices) & (rounded[columns] > 0.5)
        over = float(nbytes[chosen].sum()) + float(self.memory.fixed[at]) > allowed_bytes(self.problem)
        return columns[chosen] if over and chosen.any() and nbytes.min() >= 0 else None

    @property
    def columns(self) -> int:
        return self.model.num_choices + self.model.num_side

    def rounded(self, values: Floats) -> Floats:
        """Strategies as ones and zeros."""
        result = values.copy()
        result[: self.model.num_choices] = 0.0
        result[self.problem.offsets[:-1] + choice_of(self.problem, values)] = 1.0
        return result

    def violated(self, values: Floats, excess: float = 0.0) -> list[int]:
        """Times to add a memory row for: those that miss the limit by more than a share of `excess`, or by a tolerance."""
        limit = float(values[-1]) * self.scaled.byte_unit if self.peak else self.limit
        if not np.isfinite(limit):
            return []
        usage = self.memory.usage(self.openings.lowered(values)[: self.columns])
        return self.memory.worst_times(usage, limit * (1 + max(excess, 1e-9)), set(self.scaled.times))

    def offer(self, values: Floats) -> None:
        """Makes an answer of a point, fractional or not, by rounding strategies and repairing what that breaks; the best is kept."""
        choice = tuple(int(p) for p in choice_of(self.problem, values))
        side = self.snapped(self.rounded(values))
        value = self.judge(choice, side)
        if value is None:
            repaired = self.repair(self, choice)
            if repaired is None:
                return
            choice, side = repaired
            value = self.judge(choice, side)
        self.take(choice, side, value)

    def take(self, choice: tuple[int, ...], side: Floats, value: float | None) -> None:
        if value is not None and (self.best is None or value < self.best.value):
            self.best = Answer(choice, side, value)
            self.log(f"answer {value:.9g}")

    def snapped(self, values: Floats) -> Floats:
        """Side values of a point: whole where they are so up to tolerance, within bounds, and openings no higher than they must be."""
        sides = slice(self.model.num_choices, self.columns)
        side = np.clip(values[sides], 0.0, self.problem.side.upper)
        point = values.copy()
        point[sides] = np.where(np.abs(side - np.round(side)) <= INTEGRAL, np.round(side), side)
        return self.openings.lowered(point, whole=True)[sides]

    def settle(self, choice: tuple[int, ...]) -> Floats | None:
        """The best side columns for fixed strategies, or None where none fit."""
        lower, upper = np.zeros_like(self.model.upper), self.model.upper.copy()
        upper[: self.model.num_choices] = 0.0
        chosen = self.problem.offsets[:-1] + np.array(choice, np.int64)
        lower[chosen] = upper[chosen] = 1.0
        times, ends = list(self.scaled.times), time.monotonic() + LONGEST_SETTLE_S
        while True:
            solver = self.scaled.fresh(lower, upper, integers=True, times=times)
            solver.setOptionValue("time_limit", max(0.01, ends - time.monotonic()))
            solver.run()
            if solver.getInfo().primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
                return None
            values = np.array(solver.getSolution().col_value)
            new = [t for t in self.violated(values) if t not in times]
            if not new:
                return self.snapped(values)
            times += new

    def limit_time(self, solver: highspy.Highs, ends: float = np.inf) -> None:
        """Lets a run last until the deadline, or until `ends` (HiGHS counts the time of all runs of an object)."""
        ends = min(ends, self.deadline)
        if np.isfinite(ends):
            solver.setOptionValue("time_limit", solver.getRunTime() + max(0.01, ends - time.monotonic()))


def inside(solver: highspy.Highs) -> highspy.Highs:
    """Sets the interior point method, which ends without a vertex."""
    solver.setOptionValue("solver", "ipm")
    solver.setOptionValue("presolve", "choose")
    solver.setOptionValue("run_crossover", "off")
    return solver


def least_sum(model: Programme) -> float:
    """A bound without solving: the cheapest strategy of each node, no cell, and every side column at its cheaper bound."""
    below = np.minimum(model.cost, 0.0)
    sides = slice(model.num_choices, model.num_choices + model.num_side)
    extra = np.where(below[sides] < 0, below[sides] * model.upper[sides], 0.0)
    first = model.matrix[: _num_nodes(model)]
    nodes = [model.cost[first.indices[a:b]].min() for a, b in zip(first.indptr[:-1], first.indptr[1:], strict=True)]
    return float(np.sum(nodes) + extra.sum() + model.constant)


def _num_nodes(model: Programme) -> int:
    """The first rows choose one strategy per node: each strategy is in exactly one of them."""
    starts = model.matrix.indptr
    return int(np.searchsorted(starts, model.num_choices))
