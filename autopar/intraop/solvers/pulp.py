"""The programme as one would write it down, with PuLP: slow, readable, and the second opinion on `highs`.

    minimise    sum c[i,p] s[i,p] + sum C[p,q] e[a,b,p,q] + sum d[k] y[k]
    subject to  sum_p s[i,p] = 1                                        each node i
                sum_q e[a,b,p,q] = s[a,p],  sum_p e[a,b,p,q] = s[b,q]   each edge (a,b); only cells of finite cost exist
                row_lower <= side rows <= row_upper
                sum of bytes live at t <= budget                        each time t at which something changes
                s binary, e >= 0, 0 <= y <= upper

No presolve, no laziness. Seconds and bytes are divided by their largest entry, so that a solver's tolerances mean something.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from autopar.errors import SolverError
from autopar.intraop.evaluate import Infeasible, evaluate, horizon_of
from autopar.intraop.solvers.highs import checked
from autopar.ir.problem import Edge, Floats, Problem, Solution, Status


def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    gap: float = 1e-6,
    log: Callable[[str], None] | None = None,
    least: bool = True,
    least_gap: float = 0.0,
    below: float = np.inf,
    bases: Any = None,
    solver: pulp.LpSolver | None = None,
) -> Solution:
    """The cheapest answer that fits, from CBC or any PuLP solver given (which then keeps its own gap and time limit).

    One that costs `below` or more is found all the same: PuLP does not tell bounds on the way, nor does it take `bases`.
    The least peak is exact.

    The bound of an answer that is not optimal is -inf: PuLP does not pass it on. Raises `Infeasible`, with the least peak if `least`
    asks for it.
    """
    begin = time.monotonic()
    statement = _state(problem)
    budget = None if problem.budget is None else problem.budget / statement.byte_unit
    for used in statement.live if budget is not None else ():
        statement.model.addConstraint(used <= budget)
    statement.model.setObjective(statement.seconds)
    values, proven = _run(statement, solver or _cbc(time_limit_s, gap), log)
    if values is None:
        raise _infeasible(problem, solver, time_limit_s, log) if least else Infeasible("no choice fits", proven=False)
    choice, side = values
    objective = evaluate(problem, choice, side).objective
    bound, status = (objective - gap * abs(objective) if proven else -np.inf), _status(proven)
    variables, constraints = statement.model.numVariables(), statement.model.numConstraints()
    rows = 0 if budget is None else len(statement.live)
    solution = Solution(
        choice,
        side,
        objective,
        bound,
        status,
        variables=variables,
        constraints=constraints,
        memory_rows=rows,
        seconds=time.monotonic() - begin,
    )
    return checked(problem, solution, pulp.value(statement.seconds) * statement.time_unit)


def minimum_peak(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    log: Callable[[str], None] | None = None,
    solver: pulp.LpSolver | None = None,
) -> tuple[float, Solution]:
    """The least peak of any answer in bytes, and an answer that has it; the budget is not looked at."""
    begin = time.monotonic()
    statement = _state(problem)
    peak = statement.model.add_variable("peak")
    for used in statement.live:
        statement.model.addConstraint(used <= peak)
    statement.model.setObjective(peak if statement.live else pulp.LpAffineExpression())
    values, proven = _run(statement, solver or _cbc(time_limit_s, 0.0), log)
    if values is None:
        raise Infeasible("the edges and side rows exclude every choice")
    value = evaluate(problem, *values)
    return value.peak_bytes, Solution(*values, value.objective, -np.inf, _status(proven), value.peak_bytes, time.monotonic() - begin)


Take = list[dict[int, pulp.LpVariable]]
"""A variable per node and allowed strategy."""

Log = Callable[[str], None]


def _status(proven: bool) -> Status:
    return "optimal" if proven else "time_limit"


@dataclass(frozen=True)
class _Statement:
    """The model without objective and budget; `seconds` and `live` (bytes at each time of change) are in their units."""

    problem: Problem
    model: pulp.LpProblem
    take: Take
    side: list[pulp.LpVariable]
    seconds: pulp.LpAffineExpression
    live: list[pulp.LpAffineExpression]
    time_unit: float
    byte_unit: float


def _state(problem: Problem) -> _Statement:
    model = pulp.LpProblem("autopar", pulp.LpMinimize)
    time_unit, byte_unit = _time_unit(problem), _byte_unit(problem)
    take = [
        {p: model.add_variable(f"s_{i}_{p}", cat="Binary") for p in np.flatnonzero(np.isfinite(costs)).tolist()}
        for i, costs in enumerate(problem.node_costs)
    ]
    side = [
        model.add_variable(f"y_{k}", 0, None if np.isinf(upper) else float(upper), "Integer" if integer else "Continuous")
        for k, (upper, integer) in enumerate(zip(problem.side.upper, problem.side.integer, strict=True))
    ]
    for strategies in take:
        model += pulp.lpSum(strategies.values()) == 1
    terms = [(take[i][p], costs[p]) for i, costs in enumerate(problem.node_costs) for p in take[i]]
    terms += list(zip(side, problem.side.cost, strict=True))
    for number, edge in enumerate(problem.edges):
        terms += _state_edge(model, take, number, edge)
    columns = [strategies.get(p, 0) for strategies, costs in zip(take, problem.node_costs, strict=True) for p in range(len(costs))] + side
    _state_rows(model, problem, columns)
    seconds = pulp.lpSum(float(cost) / time_unit * variable for variable, cost in terms) + problem.constant_cost / time_unit
    live = [_live(problem, take, side, at, byte_unit) for at in _changes(problem)]
    return _Statement(problem, model, take, side, seconds, live, time_unit, byte_unit)


def _state_edge(model: pulp.LpProblem, take: Take, number: int, edge: Edge) -> list[tuple[pulp.LpVariable, float]]:
    """Cells of an edge with their costs; of an edge from a node to itself only the diagonal is there."""
    a, b, cost = take[edge.a], take[edge.b], edge.cost
    pairs = [(p, q) for p in a for q in b if np.isfinite(cost[p, q]) and (edge.a != edge.b or p == q)]
    cell = {(p, q): model.add_variable(f"e_{number}_{p}_{q}", 0) for p, q in pairs}
    for p in a:
        model += pulp.lpSum(cell[p, q] for q in b if (p, q) in cell) == a[p]
    for q in b:
        model += pulp.lpSum(cell[p, q] for p in a if (p, q) in cell) == b[q]
    return [(variable, cost[pair]) for pair, variable in cell.items()]


def _state_rows(model: pulp.LpProblem, problem: Problem, columns: list[pulp.LpVariable | int]) -> None:
    rows = problem.rows
    sums: list[list] = [[] for _ in range(len(rows))]
    for row, column, value in zip(rows.row, rows.column, rows.value, strict=True):
        sums[row].append(float(value) * columns[column])
    for terms, lower, upper in zip(sums, rows.lower, rows.upper, strict=True):
        total = pulp.LpAffineExpression(pulp.lpSum(terms))
        if lower == upper:
            model += total == float(lower)
            continue
        if np.isfinite(lower):
            model += total >= float(lower)
        if np.isfinite(upper):
            model += total <= float(upper)


def _live(problem: Problem, take: Take, side: list[pulp.LpVariable], at: int, byte_unit: float) -> pulp.LpAffineExpression:
    """Bytes live at a time."""
    nodes = [(u.node, u.nbytes) for u in problem.usages if u.start <= at < u.stop]
    terms = [float(nbytes[p]) / byte_unit * variable for i, nbytes in nodes for p, variable in take[i].items()]
    columns = problem.side
    for k in np.flatnonzero((columns.usage_start <= at) & (at < columns.usage_stop)):
        terms.append(float(columns.usage_bytes[k]) / byte_unit * side[columns.usage_column[k]])
    fixed = float(problem.fixed_bytes[at]) if at < len(problem.fixed_bytes) else 0.0
    return pulp.lpSum(terms) + fixed / byte_unit


def _changes(problem: Problem) -> list[int]:
    """Every time at which what is live may change."""
    times = {0, *range(len(problem.fixed_bytes)), *problem.side.usage_start.tolist(), *problem.side.usage_stop.tolist()}
    for usage in problem.usages:
        times |= {usage.start, usage.stop}
    return sorted(t for t in times if t < horizon_of(problem))


def _time_unit(problem: Problem) -> float:
    costs = [*problem.node_costs, *(e.cost.ravel() for e in problem.edges), problem.side.cost]
    return max([float(np.abs(c[np.isfinite(c)]).max(initial=0.0)) for c in costs]) / 1e3 or 1.0


def _byte_unit(problem: Problem) -> float:
    held = [problem.fixed_bytes, problem.side.usage_bytes, *(u.nbytes for u in problem.usages)]
    return max([float(np.abs(h).max(initial=0.0)) for h in held]) / 1e3 or 1.0


def _cbc(time_limit_s: float | None, gap: float) -> pulp.LpSolver:
    """The CBC that comes with PuLP 3, else the one on the path."""
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    tolerances = ["primalTolerance 1e-9", "allow 1e-9"]
    return pulp.COIN_CMD(path=bundled, msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap / 2, options=tolerances)


def _run(statement: _Statement, solver: pulp.LpSolver, log: Log | None) -> tuple[tuple[tuple[int, ...], Floats] | None, bool]:
    """Strategies and side columns with whether they are proven optimal; None where nothing satisfies the model."""
    model = statement.model
    model.solve(solver)
    if log is not None:
        log(f"{solver.name}: {pulp.LpStatus[model.status]}")
    if model.status == pulp.LpStatusInfeasible or model.sol_status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded):
        return None, True
    if model.sol_status == pulp.LpSolutionNoSolutionFound:
        raise SolverError(f"{solver.name} found no answer: {pulp.LpStatus[model.status]}. Give more time with `time_limit_s`.")
    choice = tuple(max((variable.value(), p) for p, variable in strategies.items())[1] for strategies in statement.take)
    side = np.clip(np.array([y.value() for y in statement.side], float), 0.0, statement.problem.side.upper)
    side = np.where(np.abs(side - np.round(side)) <= 1e-6, np.round(side), side)
    return (choice, side), model.sol_status == pulp.LpSolutionOptimal


def _infeasible(problem: Problem, solver: pulp.LpSolver | None, time_limit_s: float | None, log: Log | None) -> Infeasible:
    if problem.budget is None:
        return Infeasible("the edges and side rows exclude every choice")
    peak, solution = minimum_peak(problem, time_limit_s=time_limit_s, log=log, solver=solver)
    return Infeasible(
        f"no choice fits {problem.budget:.0f} bytes: the least peak is {peak:.0f} bytes", peak, solution, solution.status == "optimal"
    )
