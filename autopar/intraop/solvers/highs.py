"""The default solver: presolve, strong relaxation, lazy memory rows, reduced-cost fixing, branch and bound, all in arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import CheckError, SolverError
from autopar.intraop.evaluate import Infeasible, allowed_bytes, choice_of, evaluate
from autopar.intraop.presolve import Lift, presolve
from autopar.intraop.solvers.ascent import ascend
from autopar.intraop.solvers.bases import Bases
from autopar.intraop.solvers.branch import Branch, Log, OutOfTime, Unsatisfiable
from autopar.intraop.solvers.memory import memory_rows
from autopar.intraop.solvers.programme import programme
from autopar.intraop.solvers.room import excluded_by_memory
from autopar.intraop.solvers.scaled import SCALED_BUDGET, SCALED_OPTIMUM, with_peak
from autopar.intraop.solvers.search import improve
from autopar.ir.problem import Edge, Floats, Problem, Solution, Status

EXACTLY = 1e-9
"""Relative gap of a least peak that is to be exact."""

LOCAL_SEARCH_SHARE = 0.1
"""Share of the time limit that the local search for a first answer may take, of 20 s at most."""

LAST_CHANCE_S = 1.0
"""Seconds after the time limit in which an answer may be sought where there is none."""

LONGEST_REPAIR_S = 2.0
"""Seconds that a rounded point may be repaired for."""

SPARE_BYTES = (0.02, 0.1, 0.3, 1.0, 4.0, np.inf)
"""Shares above the bound of the least peak at which an answer to a large programme is sought."""

LONGEST_PEAK_S = 15.0
"""Seconds that the least peak is sought for at most: a refusal is to come soon."""
SHORTEST_PEAK_S = 5.0
"""Seconds that it is sought for where the solve has used up its time: a refusal that says what would fit is worth them."""

LARGE_CELLS, ASCENT_SHARE, LONGEST_ASCENT_S, LONGEST_SEARCH_S = 500_000, 0.5, 60.0, 15.0
"""Above so many cells dual ascent comes first, for a share of the time limit, and each of its local searches ends after a while."""


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    gap: float = 1e-6,
    log: Log | None = None,
    least: bool = True,
    least_gap: float = EXACTLY,
    below: float = np.inf,
    bases: Bases | None = None,
) -> Solution:
    """The cheapest answer that fits, proven within the relative `gap`. Relaxations begin where those of `bases` ended.

    Answers that cost `below` or more are of no use: `TooDear` is raised as soon as it is proven that there are no others.

    `time_limit_s` ends the search with status `time_limit` and the best answer so far; `SolverError` where there is none yet.
    Raises `Infeasible` where no answer fits, with the least peak (to `least_gap`) if `least` asks for it. Whatever HiGHS says, the
    answer is re-evaluated on `problem`.
    """
    begin = time.monotonic()
    deadline = np.inf if time_limit_s is None else begin + time_limit_s
    log = log or _silent
    try:
        smaller, lift = _fitting(problem)
        log(f"{len(problem.node_costs)} nodes, {len(smaller.node_costs)} of them decide; {len(smaller.edges)} edges")
        solution = _solved(smaller, gap, deadline, log, below, bases)
    except Unsatisfiable:
        raise (_infeasible(problem, deadline, log, least_gap) if least else Infeasible("no choice fits", proven=False)) from None
    if solution is None:
        raise SolverError(f"no answer within {time_limit_s} s. Give more time with `time_limit_s`, or a larger budget.")
    lifted = replace(lift(solution), seconds=time.monotonic() - begin)
    return checked(problem, lifted, solution.objective)


def _fitting(problem: Problem) -> tuple[Problem, Lift]:
    """The presolved problem without what cannot fit; `Unsatisfiable` where nothing is left, `Infeasible` where no budget would do.

    Without side columns there is no form of a value that is too large by itself, and contraction has done the work.
    """
    smaller, lift = presolve(problem)
    if not len(problem.side):
        return smaller, lift
    try:
        fitting = excluded_by_memory(smaller)
        if all(np.all(np.isfinite(cost)) for cost in fitting.node_costs):
            return fitting, lift
        fitting, lift_again = presolve(fitting)
    except Infeasible:
        raise Unsatisfiable from None
    return fitting, lambda solution: lift(lift_again(solution))


def _solved(
    problem: Problem, gap: float, deadline: float, log: Log, below: float = np.inf, bases: Bases | None = None
) -> Solution | None:
    """Solves a presolved problem; None where the time was too short for any answer."""
    if _is_large(problem):
        return _solved_large(problem, gap, deadline, log)
    branch = _least_seconds(problem, gap, deadline, log, below, bases)
    branch.minimise()
    if branch.best is None:
        _offer_cheapest(branch, max(deadline, time.monotonic()) + LAST_CHANCE_S)
    if branch.best is None:
        return None
    best, size = branch.best, branch.model.matrix.shape
    status: Status = "optimal" if branch.closed else "time_limit" if branch.late else "feasible"
    bound = min(branch.bound, best.value)
    rows = len(branch.scaled.times)
    return Solution(best.choice, best.side, best.value, bound, status, variables=size[1], constraints=size[0] + rows, memory_rows=rows)


def _is_large(problem: Problem) -> bool:
    """Whether there are more cells than a simplex run likes, and nothing that the dual ascent ignores."""
    return sum(edge.cost.size for edge in problem.edges) > LARGE_CELLS and not len(problem.rows) and not len(problem.side)


def _solved_large(problem: Problem, gap: float, deadline: float, log: Log) -> Solution | None:
    """Dual ascent and local search first; then branch and bound on what they do not exclude.

    Nothing that is better than the best answer is excluded, so the better of it and the optimum of the rest is the optimum of all.
    """
    memory, best = memory_rows(problem), _Best(problem, log)
    ends = time.monotonic() + min(ASCENT_SHARE * (deadline - time.monotonic()), LONGEST_ASCENT_S)

    def offer(choice: Sequence[int]) -> None:
        best.take(improve(problem, memory, choice, min(ends, time.monotonic() + LONGEST_SEARCH_S)))

    excluded = ascend(problem, memory, best.value, offer, ends)
    log(f"dual ascent: bound {excluded.bound:.9g}")
    if best.solution is None and np.isinf(excluded.bound):
        raise Unsatisfiable
    if best.solution is None:
        best.take(improve(problem, memory, choice_of(problem, -np.concatenate(problem.node_costs)).tolist(), deadline))
    if best.solution is not None and best.value() - excluded.bound <= gap * abs(best.value()):
        return best.proven(min(excluded.bound, best.value()), "optimal")
    try:
        smaller, lift = presolve(excluded.problem)
        log(f"{len(smaller.node_costs)} nodes and {sum(int(np.isfinite(e.cost).sum()) for e in smaller.edges)} cells are left")
        branch = _least_seconds(smaller, gap, deadline, log)
        branch.minimise()
    except (Infeasible, Unsatisfiable):
        if best.solution is None:
            raise Unsatisfiable from None
        return best.proven(best.value(), "optimal")
    if branch.best is not None:
        best.take(lift(Solution(branch.best.choice, branch.best.side, branch.best.value, -np.inf, "feasible")).choice)
    bound = max(excluded.bound, min(branch.bound, best.value()))
    closed = best.solution is not None and best.value() - bound <= gap * abs(best.value())
    return best.proven(bound, "optimal" if closed else "time_limit" if branch.late else "feasible", branch)


class _Best:
    """The best answer of a problem without side columns so far."""

    def __init__(self, problem: Problem, log: Log):
        self.problem, self.log = problem, log
        self.solution: Solution | None = None

    def value(self) -> float:
        return np.inf if self.solution is None else self.solution.objective

    def take(self, choice: Sequence[int] | None) -> None:
        value = None if choice is None else evaluate(self.problem, choice, np.zeros(0))
        if choice is not None and value is not None and value.feasible and value.objective < self.value():
            self.solution = Solution(tuple(choice), np.zeros(0), value.objective, -np.inf, "feasible", value.peak_bytes)
            self.log(f"answer {value.objective:.9g}")

    def proven(self, bound: float, status: Status, branch: Branch | None = None) -> Solution | None:
        """The answer with its bound and how the solve ended; None where there is none."""
        if self.solution is None:
            return None
        size = (0, 0) if branch is None else branch.model.matrix.shape
        return replace(self.solution, bound=bound, status=status, variables=size[1], constraints=size[0])


def relaxed(
    problem: Problem,
    *,
    excess: float = 0.0,
    time_limit_s: float | None = None,
    log: Log | None = None,
    bases: Bases | None = None,
) -> tuple[Floats, float] | None:
    """The relaxation of a problem under its budget: a value per strategy, in shares, and a bound of the objective.

    The budget may be missed by a share of `excess` at some times. None where there was no time. Raises `Infeasible` where not even a
    mixture of answers fits.
    """
    deadline = np.inf if time_limit_s is None else time.monotonic() + time_limit_s
    branch = _least_seconds(problem, 1.0, deadline, log or _silent, bases=bases)
    try:
        point = branch.relax_unburdened(excess)
        if point is None or branch.scaled.times:
            point = branch.relax(excess)
    except Unsatisfiable:
        raise Infeasible("no mixture of answers fits the budget", floor_bytes=branch.floor_bytes) from None
    except OutOfTime:
        return None
    return point.values[: problem.num_choices], point.value


def minimum_peak(
    problem: Problem, *, time_limit_s: float | None = None, log: Log | None = None, gap: float = EXACTLY
) -> tuple[float, Solution]:
    """The least peak of any answer in bytes, and an answer that has it; the problem's budget is not looked at.

    The peak is that of the integral answer, so a budget of so many bytes works. `solution.status` is `optimal` where no answer has
    less (but for a share of `gap`), else `feasible` or `time_limit`; its `bound` says nothing about seconds. Raises `Infeasible` where
    edges and side rows exclude every answer.

    A large programme's peak is not minimised: the cheapest answer of a budget little above the bound is taken, the first that is found.
    """
    begin = time.monotonic()
    deadline = np.inf if time_limit_s is None else begin + time_limit_s
    priceless = replace(
        problem,
        node_costs=tuple(np.where(np.isfinite(c), 0.0, np.inf) for c in problem.node_costs),
        edges=tuple(Edge(e.a, e.b, np.where(np.isfinite(e.cost), 0.0, np.inf)) for e in problem.edges),
        side=replace(problem.side, cost=np.zeros(len(problem.side))),
        budget=None,
        constant_cost=0.0,
    )
    smaller, lift = presolve(priceless)
    branch = _least_bytes(smaller, deadline, log or _silent, gap)
    try:
        found = _found_near(problem, branch, deadline, log or _silent) if branch.large else _found_least(branch, lift)
    except Unsatisfiable:
        raise Infeasible("the side rows exclude every choice") from None
    if found is None:
        raise SolverError(f"no answer within {time_limit_s} s. Give more time with `time_limit_s`.")
    value = evaluate(problem, found.choice, found.side)
    if not value.consistent:
        raise CheckError("the answer of least peak breaks an edge or a side row of the problem it was found for")
    seconds = time.monotonic() - begin
    return value.peak_bytes, replace(found, objective=value.objective, peak_bytes=value.peak_bytes, seconds=seconds)


def _found_least(branch: Branch, lift: Lift) -> Solution | None:
    """The answer of least peak, lifted; None where there was no time for any."""
    branch.minimise()
    if branch.best is None:
        return None
    return lift(Solution(branch.best.choice, branch.best.side, 0.0, -np.inf, "optimal" if branch.closed else "time_limit"))


def _found_near(problem: Problem, branch: Branch, deadline: float, log: Log) -> Solution | None:
    """An answer whose peak is not far above the least that the relaxation allows, as cheap as a budget there lets it be."""
    least = branch.least_value() * branch.scaled.byte_unit
    log(f"the least peak is at least {least:.0f} bytes")
    for spare in SPARE_BYTES:
        budget = None if np.isinf(spare) else least * (1 + spare)
        try:
            smaller, lift = _fitting(replace(problem, budget=budget))
            solution = _solved(smaller, 1.0, deadline, log)
        except Unsatisfiable:
            continue
        if solution is None:
            return None
        found = lift(solution)
        return replace(found, status="optimal" if found.peak_bytes <= least * (1 + 1e-6) else "feasible")
    raise Unsatisfiable


def checked(problem: Problem, solution: Solution, objective: float) -> Solution:
    """The solution, priced anew on the problem; `CheckError` where it does not fit or is not worth `objective`."""
    value = evaluate(problem, solution.choice, solution.side)
    if not value.feasible:
        raise CheckError(f"the solver's answer is not feasible: {value}")
    if abs(value.objective - objective) > 1e-6 * max(abs(objective), _size(problem, solution)):
        raise CheckError(f"the solver reports {objective:.9g} s, and its answer is worth {value.objective:.9g} s")
    return replace(solution, objective=value.objective, peak_bytes=value.peak_bytes, bound=min(solution.bound, value.objective))


def _size(problem: Problem, solution: Solution) -> float:
    """The largest single term of the objective: what cancellation is measured against."""
    nodes = [abs(float(c[p])) for c, p in zip(problem.node_costs, solution.choice, strict=True)]
    edges = [abs(float(e.cost[solution.choice[e.a], solution.choice[e.b]])) for e in problem.edges]
    return max([0.0, *nodes, *edges, *np.abs(problem.side.cost * solution.side), abs(problem.constant_cost)])


def _least_seconds(
    problem: Problem, gap: float, deadline: float, log: Log, below: float = np.inf, bases: Bases | None = None
) -> Branch:
    def judge(choice: tuple[int, ...], side: Floats) -> float | None:
        value = evaluate(problem, choice, side)
        return value.objective if value.feasible else None

    limit = np.inf if problem.budget is None else float(problem.budget)
    model, memory = programme(problem), memory_rows(problem)
    branch = Branch(problem, model, memory, judge, _repaired, limit=limit, gap=gap, deadline=deadline, log=log, below=below, bases=bases)
    if not branch.model.num_side:
        spare = LOCAL_SEARCH_SHARE * max(0.0, min(deadline - time.monotonic(), 20.0))
        _offer_cheapest(branch, time.monotonic() + spare)
    return branch


def _repaired(branch: Branch, choice: tuple[int, ...]) -> tuple[tuple[int, ...], Floats] | None:
    """The best side columns for a choice; where there are none, a choice nearby that fits."""
    if branch.model.num_side:
        side = branch.settle(choice)
        return None if side is None else (choice, side)
    ends = min(branch.deadline, time.monotonic() + LONGEST_REPAIR_S)
    near = improve(branch.problem, branch.memory, choice, ends)
    return None if near is None else (near, np.zeros(0))


def _offer_cheapest(branch: Branch, deadline: float) -> None:
    """Offers what is found near the cheapest strategy of each node."""
    problem = branch.problem
    cheapest = tuple(int(p) for p in choice_of(problem, -branch.model.cost))
    if not branch.model.num_side:
        near = improve(problem, branch.memory, cheapest, deadline)
        if near is not None:
            branch.take(near, np.zeros(0), branch.judge(near, np.zeros(0)))
        return
    side = branch.settle(cheapest)
    if side is not None:
        branch.take(cheapest, side, branch.judge(cheapest, side))


def _least_bytes(problem: Problem, deadline: float, log: Log, gap: float = EXACTLY) -> Branch:
    """The programme with one more column, the peak, whose bytes are in units of a thousandth of a plain answer's peak."""
    memory = memory_rows(problem)

    def judge(choice: tuple[int, ...], side: Floats) -> float | None:
        value = evaluate(problem, choice, side)
        return value.peak_bytes / branch.scaled.byte_unit if value.consistent else None

    even = np.concatenate([_uniform(problem), np.zeros(len(problem.side))])
    limit = max(float(memory.usage(even).max(initial=0.0)), 1.0)
    model = with_peak(programme(problem), memory, limit)
    branch = Branch(problem, model, memory, judge, _repaired, limit=limit, peak=True, gap=gap, deadline=deadline, log=log)
    branch.scaled.unit = SCALED_BUDGET / SCALED_OPTIMUM
    branch.scaled.times = memory.worst_times(memory.usage(np.ones(problem.num_choices + len(problem.side))), -np.inf)
    return branch


def _uniform(problem: Problem) -> Floats:
    """Every strategy of a node in equal parts."""
    return np.concatenate([np.full(len(c), 1.0 / len(c)) for c in problem.node_costs] or [np.zeros(0)])


def _infeasible(problem: Problem, deadline: float, log: Log, gap: float) -> Infeasible:
    """What to say when nothing fits: the least peak, which is sought for as long as the solve itself might have lasted."""
    if problem.budget is None:
        return Infeasible("the side rows exclude every choice")
    left = min(LONGEST_PEAK_S, max(SHORTEST_PEAK_S, deadline - time.monotonic()))
    try:
        peak, solution = minimum_peak(problem, time_limit_s=left, log=log, gap=gap)
    except SolverError:
        return Infeasible(f"no choice fits {problem.budget:.0f} bytes, and there was no time to find the least that does", proven=False)
    proven = solution.status == "optimal"
    if peak <= allowed_bytes(problem):
        raise CheckError(f"HiGHS calls {problem.budget:.0f} bytes infeasible, and there is an answer that needs {peak:.0f}")
    least = "the least peak is" if proven else "the least peak found is"
    return Infeasible(f"no choice fits {problem.budget:.0f} bytes: {least} {peak:.0f} bytes", peak, solution, proven)


def _silent(line: str) -> None:
    pass
