"""The best plan of one program on one logical mesh, checked, and what to say where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar import costs
from autopar.costs import Pricer
from autopar.errors import CheckError, InfeasibleError
from autopar.intraop import solvers
from autopar.intraop.enumerate import Layout, Pins, enumerate_problem
from autopar.intraop.evaluate import Infeasible, TooDear, evaluate, live_at, usage_over_time
from autopar.intraop.lift import lift
from autopar.intraop.networks import tighten
from autopar.intraop.price import Price, price_plan
from autopar.intraop.remat import Promise
from autopar.intraop.shape import Shape
from autopar.intraop.solvers.bases import Bases
from autopar.ir.graph import Graph
from autopar.ir.plan import ShardingPlan, Solve
from autopar.ir.problem import Problem, Solution, Status
from autopar.ir.same import Same

Progress = Callable[[str], None]

LEAST_GAP = 0.01
"""Relative gap at which a budget that works counts as the smallest that does."""


class TooSlow(InfeasibleError):
    """It is proven that no plan is as fast as what is known."""


@dataclass(frozen=True)
class SolveOptions:
    """How to solve: `solver` (`highs` or `pulp`), seconds per mesh, relative gap at which an answer is taken as optimal.

    With a `memory_price` memory is not stated, but what is held when backward begins costs so many seconds per byte; an answer that does
    not fit is none. By weak duality no plan that fits costs less than the bound of that less what the whole budget costs. `bases` are
    where solves begin and end.
    """

    solver: str = "highs"
    time_limit_s: float | None = None
    gap: float = 1e-4
    memory_price: float | None = None
    bases: Bases = field(default_factory=Bases, compare=False)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan for one logical mesh, with its price, its proof, and what is live at its memory peak.

    `shape` is that of the program with the values `recomputed` made again. Where `memory_rows` is 0, memory decided nothing.
    `peaks` are those up to the end of the last loop, and after it. `promise` is that of the advice that was taken on what to make again.
    """

    plan: ShardingPlan
    pricer: Pricer
    price: Price
    solve: Solve
    peak_bytes: int
    live: tuple[tuple[str, int], ...]
    shape: Shape
    memory_rows: int = 0
    recomputed: tuple[int, ...] = ()
    enumerate_s: float = 0.0
    solve_s: float = 0.0
    peaks: tuple[int, int] = (0, 0)
    promise: Promise = Promise()


def choose_on(
    shape: Shape,
    pricer: Pricer,
    budget: float | None,
    pins: Pins,
    options: SolveOptions,
    progress: Progress,
    clock: Callable[[], float],
    least: bool = True,
    below: float = float("inf"),
) -> Chosen:
    """The best plan on one logical mesh. Raises `InfeasibleError` when nothing fits the budget, which says what would if `least`, and
    `TooSlow` when none that does takes less than `below` seconds.
    """
    begin = clock()
    held = frozenset(pins.items())
    problem, layout = shape.memo.get((Same(pricer), budget, held), lambda: enumerate_problem(shape, pricer, budget, pins))
    enumerated = clock()
    progress(f"mesh {pricer.mesh}: {problem.num_choices + len(problem.side)} variables, {len(problem.rows)} rows")
    solution = _solution(problem, layout, options, least, below)
    solution = _tight(layout, solution)
    plan = lift(layout, solution)
    price = price_plan(shape.graph, shape.rules, plan, pricer, shape.charges, shape.streamed)
    evaluation = evaluate(problem, solution.choice, solution.side)
    if options.memory_price is None:
        solution = _checked(solution, price)
    else:
        solution = _by_duality(solution, price, evaluation.peak_bytes, problem, options)
    usage, end = usage_over_time(problem, solution.choice, solution.side), _after_loops(shape.graph)
    return Chosen(
        plan,
        pricer,
        price,
        _proof(solution, options.solver, shape),
        int(evaluation.peak_bytes),
        live(layout, problem, solution, evaluation.peak_time),
        shape,
        solution.memory_rows,
        (),
        enumerated - begin,
        clock() - enumerated,
        (int(usage[:end].max(initial=0.0)), int(usage[end:].max(initial=0.0))),
    )


def _solution(problem: Problem, layout: Layout, options: SolveOptions, least: bool, below: float) -> Solution:
    """The solver's answer; what it raises in the user's terms."""
    try:
        if options.memory_price is not None:
            return _sparing(problem, options.memory_price, options, layout.shape.graph)
        return solvers.solve(
            problem,
            options.solver,
            time_limit_s=options.time_limit_s,
            gap=options.gap,
            least=least,
            least_gap=LEAST_GAP,
            below=below,
            bases=options.bases,
        )
    except TooDear as error:
        raise TooSlow(f"mesh {layout.mesh}: {error}.") from None
    except Infeasible as error:
        raise _infeasible(error, problem, layout) from None


def _after_loops(graph: Graph) -> int:
    """The first op after all loops."""
    return max((last for _, last in graph.spans.values()), default=-1) + 1


def _sparing(problem: Problem, price: float, options: SolveOptions, graph: Graph) -> Solution:
    """The best answer where each byte that is held costs so many seconds: when backward begins, and when most is held if that is later.

    Its bound is one for answers that fit the budget: at each of these times they save at most its price.
    """
    times = [next((i for i, op in enumerate(graph.ops) if op.phase == "backward"), len(graph.ops) // 2)]
    while True:
        weighed = _weighed(problem, price, times)
        try:
            found = solvers.solve(
                weighed, options.solver, time_limit_s=options.time_limit_s, gap=options.gap, least=False, bases=options.bases
            )
        except Infeasible as error:  # whatever memory there is
            raise Infeasible(str(error), proven=True) from None
        peak = evaluate(problem, found.choice, found.side).peak_time
        if not price or len(times) == 2 or peak < _after_loops(graph):
            return replace(found, bound=found.bound - price * len(times) * (problem.budget or 0.0), memory_rows=len(times) * (price > 0))
        times.append(peak)


def _by_duality(solution: Solution, price: Price, peak: float, problem: Problem, options: SolveOptions) -> Solution:
    """The answer of a weighed problem as one of the problem itself. Raises `InfeasibleError` where it does not fit."""
    weight, budget = options.memory_price or 0.0, problem.budget or 0.0
    if peak > budget:
        raise InfeasibleError(
            f"no plan was found that fits {budget:,.0f} bytes per device: one that spares memory at {weight:.3g} s per byte still takes "
            f"{peak:,.0f}. Use more devices, more microbatches or stages, or more memory.",
            peak_bytes=int(peak),
            budget_bytes=int(budget),
        )
    bound = min(price.total_s, max(0.0, solution.bound))
    open_: Status = "time_limit" if solution.status == "time_limit" else "feasible"
    status = "optimal" if price.total_s - bound <= options.gap * price.total_s else open_
    return replace(solution, objective=price.total_s, bound=bound, status=status)


def _weighed(problem: Problem, price: float, times: Sequence[int]) -> Problem:
    """The problem in which each byte that is held at these times costs so many seconds."""
    costs = [cost.copy() for cost in problem.node_costs]
    for usage in problem.usages:
        costs[usage.node] += price * usage.nbytes * sum(usage.start <= time < usage.stop for time in times)
    side = problem.side
    added = np.zeros(len(side))
    for time in times:
        held = (side.usage_start <= time) & (time < side.usage_stop)
        added += np.bincount(side.usage_column[held], side.usage_bytes[held], minlength=len(side))
    return replace(problem, node_costs=tuple(costs), side=replace(side, cost=side.cost + price * added), budget=None, usages=())


def _tight(layout: Layout, solution: Solution) -> Solution:
    """The same answer without openings that nothing flows through, so that memory counts only what is there."""
    side = np.array(solution.side)
    for network, openings in zip(layout.networks, layout.openings, strict=True):
        tighten(network, openings, solution.choice, side)
    return replace(solution, side=side)


def _proof(solution: Solution, solver: str, shape: Shape) -> Solve:
    folded = len(shape.folded.members) < len(shape.clusters)
    return Solve(
        solver,
        solution.status,
        solution.objective,
        solution.bound,
        solution.gap,
        solution.variables,
        solution.constraints,
        "fold" if folded else "program",
    )


def _checked(solution: Solution, price: Price) -> Solution:
    """The solution with its plan's price as the objective.

    The lifted plan, priced by other code on the unfolded graph, costs what the solver says: no more than its answer (an answer that
    is not optimal may open moves that the plan leaves out), and no less than what it proved.
    """
    slack = 1e-6 * abs(solution.objective) + 1e-12
    if not solution.bound - slack <= price.total_s <= solution.objective + slack:
        raise CheckError(
            f"the plan costs {price.total_s:.9g} s where the solver's answer costs {solution.objective:.9g} s and none costs less than "
            f"{solution.bound:.9g} s."
        )
    if solution.status == "optimal" and price.total_s < solution.objective - 1e-3 * abs(solution.objective):
        raise CheckError(f"the plan costs {price.total_s:.9g} s where an answer called optimal costs {solution.objective:.9g} s.")
    return replace(solution, objective=min(solution.objective, price.total_s))


def live(layout: Layout, problem: Problem, solution: Solution, time: int) -> tuple[tuple[str, int], ...]:
    """What holds memory at `time`, in words, from large to small."""
    words: dict[str, int] = {}
    owner = {o.column: n for n, openings in zip(layout.networks, layout.openings, strict=True) for o in openings}
    for item in live_at(problem, solution.choice, solution.side, time):
        if item.kind == "node":
            what = _node_words(layout, item.index)
        else:
            network = owner.get(item.index)
            what = f"converted {_value_words(layout, network.members[0].value)}" if network else "conversions"
        words[what] = words.get(what, 0) + int(item.nbytes)
    return tuple(sorted(words.items(), key=lambda w: -w[1]))


def _value_words(layout: Layout, value: int) -> str:
    graph = layout.shape.graph
    p = graph.producer.get(value)
    if p is None:
        return graph.input_names[graph.inputs.index(value)]
    op = graph.ops[p]
    return f"{op.phase} {op.primitive}" + (f" in {op.scope}" if op.scope else "")


def _node_words(layout: Layout, node: int) -> str:
    shape = layout.shape
    if node >= len(layout.spaces):
        names = [shape.graph.input_names[shape.graph.inputs.index(v)] for v, n in layout.input_node.items() if n == node]
        if not names:
            return "outputs"
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} alike"
    members = shape.folded.members[node]
    op = shape.graph.ops[shape.clusters[members[0]].ops[0]]
    count = f", {len(members)} alike" if len(members) > 1 else ""
    return f"{op.phase} {op.primitive}" + (f" in {op.scope}" if op.scope else "") + count


def _infeasible(error: Infeasible, problem: Problem, layout: Layout) -> InfeasibleError:
    """The solver's refusal in the user's terms: the least possible peak, what is live there, what to do."""
    budget = int(problem.budget or 0)
    if error.peak_bytes is not None and error.solution is None:
        text = f"no plan that fits {budget:,} bytes was found in the time given on mesh ({layout.mesh}). Give more with `time_limit_s`."
        return InfeasibleError(text, peak_bytes=int(error.peak_bytes), budget_bytes=budget)
    if error.peak_bytes is None and not error.proven:
        text = f"no plan fits {budget:,} bytes per device on mesh ({layout.mesh}); there was no time to find the least that one needs."
        more = ("give more time with `time_limit_s`", "give each device more memory", "use a smaller batch")
        return InfeasibleError(f"{text} To learn it, {more[0]}.", budget_bytes=budget, suggestions=more)
    if error.peak_bytes is None or error.solution is None:
        return InfeasibleError(f"no plan satisfies the constraints on mesh ({layout.mesh}): {error}. Loosen the pins.", budget_bytes=budget)
    peak = int(-(-error.peak_bytes // 1))
    evaluation = evaluate(problem, error.solution.choice, error.solution.side)
    items = live(layout, problem, _tight(layout, error.solution), evaluation.peak_time)
    at = layout.shape.graph.ops[evaluation.peak_time] if evaluation.peak_time < len(layout.shape.graph.ops) else None
    where = f" at `{at.primitive}` ({at.source})" if at else ""
    needed = -(-peak * layout.mesh.num_devices // max(1, budget))
    suggestions = (
        f"give each device at least {peak} bytes (memory_bytes={peak})",
        f"use about {needed} devices of this kind instead of {layout.mesh.num_devices}",
        "use a smaller batch",
    )
    least = "is" if error.proven else "found is"
    largest = "; ".join(f"{what}: {nbytes:,} bytes" for what, nbytes in items[:5])
    return InfeasibleError(
        f"no plan on mesh ({layout.mesh}) fits {budget:,} bytes per device: the least peak {least} {peak:,} bytes{where}. "
        f"Live there: {largest}. To make it fit: {'; or '.join(suggestions)}.",
        peak_bytes=peak,
        budget_bytes=budget,
        live=items,
        suggestions=suggestions,
    )


def flops_of(shape: Shape) -> float:
    """FLOPs of the whole program."""
    return costs.graph_flops(shape.graph)
