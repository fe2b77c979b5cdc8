"""Choose a sharding plan: every logical mesh of the cluster is planned, the fastest plan that fits is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autopar import costs
from autopar.costs import Pricer
from autopar.errors import CheckError, InfeasibleError, SolverError
from autopar.intraop import solvers
from autopar.intraop.enumerate import Layout, Pins, Shape, enumerate_problem
from autopar.intraop.evaluate import Infeasible, evaluate, live_at
from autopar.intraop.lift import lift
from autopar.intraop.networks import tighten
from autopar.intraop.price import Price, price_plan
from autopar.intraop.remat import Advice, Variants, least_held
from autopar.intraop.solvers.highs import relaxed
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan, Solve
from autopar.ir.problem import Problem, Solution

Progress = Callable[[str], None]

MARGINS = (0.98, 0.9, 0.8)
"""Shares of the budget under which it is sought what to make again, one after the other until a whole answer fits."""

WORTHWHILE = 2e-3
"""Share of the step time that making values again must promise to save where a plan fits without."""


@dataclass(frozen=True)
class SolveOptions:
    """How to solve: `solver` (`highs` or `pulp`), seconds per mesh, relative gap at which an answer is taken as optimal."""

    solver: str = "highs"
    time_limit_s: float | None = None
    gap: float = 1e-4


@dataclass(frozen=True, eq=False)
class Chosen:
    """The plan for one logical mesh, with its price, its proof, and what is live at its memory peak.

    `shape` is that of the program with the values `recomputed` made again. Where `memory_rows` is 0, memory decided nothing.
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


def choose_on(
    shape: Shape,
    pricer: Pricer,
    budget: float | None,
    pins: Pins,
    options: SolveOptions,
    progress: Progress,
    clock: Callable[[], float],
    least: bool = True,
) -> Chosen:
    """The best plan on one logical mesh. Raises `InfeasibleError` when nothing fits the budget, which says what would if `least`."""
    begin = clock()
    problem, layout = enumerate_problem(shape, pricer, budget, pins)
    enumerated = clock()
    progress(f"mesh {pricer.mesh}: {problem.num_choices + len(problem.side)} variables, {len(problem.rows)} rows")
    try:
        solution = solvers.solve(problem, options.solver, time_limit_s=options.time_limit_s, gap=options.gap, least=least)
    except Infeasible as error:
        raise _infeasible(error, problem, layout) from None
    solution = _tight(layout, solution)
    plan = lift(layout, solution)
    price = price_plan(shape.graph, shape.rules, plan, pricer, shape.charges)
    solution = _checked(solution, price)
    evaluation = evaluate(problem, solution.choice, solution.side)
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
    )


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


def choose_with(
    variants: Variants,
    pricer: Pricer,
    budget: float | None,
    pins: Pins,
    options: SolveOptions,
    progress: Progress,
    clock: Callable[[], float],
    least: bool = True,
) -> Chosen:
    """The best plan on one logical mesh, with values made again as `variants.mode` says: where memory asks for it, if it is `auto`.

    What is made again comes from a relaxation under the budget, and from ones under less where its answer does not fit whole. Where that
    fails, what holds least is tried and, if it does not fit either, named by `InfeasibleError`; without `least` nothing more is tried.
    """

    def plan(values: frozenset[int], least: bool) -> Chosen:
        found = choose_on(variants.shape(values), pricer, budget, pins, options, progress, clock, least)
        return replace(found, recomputed=tuple(sorted(values)))

    if variants.mode != "auto" or budget is None:
        return plan(variants.asked, least)
    every = variants.every()
    best: Chosen | None = None
    if not every or variants.held_at_least(pricer.mesh.num_devices) <= budget:
        try:
            best = plan(frozenset(), least and not every)
        except InfeasibleError:
            if not every:
                raise
    if best is not None and not (best.memory_rows and every):
        return best
    advice = Advice(variants, pricer, budget, pins, options.time_limit_s)
    ways: list[Callable[[], tuple[frozenset[int], float]]] = [lambda: advice.values(1.0, round), advice.whole]
    ways += [partial(advice.values, share) for share in MARGINS]
    again: Chosen | None = None
    for n, way in enumerate(ways):
        if again is not None and n > 1:
            break
        progress(f"mesh {pricer.mesh}: what to make again, try {n + 1}")
        try:
            values, seconds = way()
            if best is not None and seconds > best.price.total_s * (1 - WORTHWHILE):
                continue
            again = min((c for c in (again, plan(values, False)) if c), key=lambda c: c.price.total_s)
        except (Infeasible, InfeasibleError, SolverError):
            continue
    if again is not None and (best is None or again.price.total_s < best.price.total_s):
        return again
    if best is not None:
        return best
    if not least:
        raise InfeasibleError(f"no plan on mesh ({pricer.mesh}) that was looked for fits {budget:,.0f} bytes per device.")
    refused = []
    for values in dict.fromkeys((least_held(variants, pricer, pins, options.time_limit_s), every, frozenset[int]())):
        try:
            return plan(values, True)
        except InfeasibleError as error:
            refused.append(error)
    raise _smallest(refused)


def choose(
    variants: Variants,
    cluster: Any,
    meshes: Sequence[LogicalMesh],
    budget: float | None,
    pins: Callable[[LogicalMesh], Pins],
    options: SolveOptions,
    progress: Progress,
    clock: Callable[[], float],
    as_written: bool = False,
) -> tuple[Chosen, tuple[tuple[str, float], ...]]:
    """The best plan over `meshes`, and the objective on each (infinite where none was found, a bound where it was passed over).

    The mesh on which the program is fastest if memory does not matter comes first, and those on which even that is slower than a plan
    that was found are passed over. Raises the least bad `InfeasibleError` when none fits, `SolverError` when time ran out everywhere.
    """
    found: list[Chosen] = []
    tried: dict[str, float] = {}
    refused: list[LogicalMesh] = []
    unanswered: list[SolverError] = []

    def attempt(mesh: LogicalMesh, least: bool) -> Chosen:
        return choose_with(variants, Pricer(cluster, mesh, as_written), budget, pins(mesh), options, progress, clock, least)

    bounds = {mesh: 0.0 for mesh in meshes}
    if len(meshes) > 1:
        for mesh in meshes:
            bounds[mesh] = unburdened(variants, Pricer(cluster, mesh, as_written), pins(mesh), options)
            progress(f"mesh {mesh}: at least {bounds[mesh] * 1e3:.3f} ms, whatever memory there is")
    for mesh in sorted(meshes, key=lambda m: float(f"{bounds[m]:.4g}")):  # of equal ones the first
        if found and bounds[mesh] > min(c.price.total_s for c in found) * (1 - options.gap):
            tried[f"{mesh}, at least"] = bounds[mesh]
            continue
        try:
            chosen = attempt(mesh, len(meshes) == 1)
        except InfeasibleError:
            if len(meshes) == 1:
                raise
            refused.append(mesh)
            tried[str(mesh)] = float("inf")
            continue
        except SolverError as error:
            progress(f"mesh {mesh}: {error}")
            unanswered.append(error)
            tried[str(mesh)] = float("inf")
            continue
        found.append(chosen)
        tried[str(mesh)] = chosen.price.total_s
        progress(f"mesh {mesh}: {chosen.price.total_s * 1e3:.3f} ms, {chosen.solve.status}, gap {chosen.solve.gap:.2g}")
    if not found and unanswered:
        raise unanswered[0]
    if not found:
        found.append(_at_last(attempt, refused, options, clock))
        tried[str(found[0].pricer.mesh)] = found[0].price.total_s
    best = min(found, key=lambda c: c.price.total_s)
    total = replace(best, enumerate_s=sum(c.enumerate_s for c in found), solve_s=sum(c.solve_s for c in found))
    return total, tuple(tried.items())


def _at_last(
    attempt: Callable[[LogicalMesh, bool], Chosen], meshes: Sequence[LogicalMesh], options: SolveOptions, clock: Callable[[], float]
) -> Chosen:
    """A plan that what holds least may still allow; else the least bad `InfeasibleError`, of as many meshes as there is time for."""
    begin, refused = clock(), list[InfeasibleError]()
    for mesh in meshes:
        try:
            return attempt(mesh, True)
        except InfeasibleError as error:
            refused.append(error)
        if options.time_limit_s is not None and clock() - begin > options.time_limit_s:
            break
    raise _smallest(refused)


def unburdened(variants: Variants, pricer: Pricer, pins: Pins, options: SolveOptions) -> float:
    """Seconds that no plan on this mesh can be faster than, whatever memory there is; 0 where that is not known."""
    problem, _ = enumerate_problem(variants.shape(variants.asked), pricer, None, pins)
    try:
        found = relaxed(problem, time_limit_s=options.time_limit_s)
    except Infeasible:
        return 0.0
    return 0.0 if found is None else found[1]


def _smallest(refused: Sequence[InfeasibleError]) -> InfeasibleError:
    """The refusal that asks for the least memory; 0 says that there was no time to find the least."""
    return min(refused, key=lambda e: e.peak_bytes or float("inf"))


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
