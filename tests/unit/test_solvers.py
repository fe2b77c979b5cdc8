from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autopar.errors import UsageError
from autopar.intraop import solvers
from autopar.intraop.bruteforce import brute_force, least_peak
from autopar.intraop.evaluate import TooDear, column_values, evaluate
from autopar.intraop.networks import SideBuilder
from autopar.intraop.presolve import presolve
from autopar.intraop.solvers import branch, highs
from autopar.intraop.solvers.ascent import ascend
from autopar.intraop.solvers.bases import Bases
from autopar.intraop.solvers.layers import postponed
from autopar.intraop.solvers.memory import memory_rows
from autopar.intraop.solvers.openings import Openings
from autopar.intraop.solvers.programme import programme
from autopar.intraop.solvers.room import excluded_by_memory
from autopar.intraop.solvers.scaled import Scaled
from autopar.ir.problem import Edge, Problem, SideColumns, SideRows, Usage

SETTINGS = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def random_problem(seed: int, *, nodes=5, forbidden=0.0, budget=None, seconds=1.0, nbytes=1.0, whole=False) -> Problem:
    """A connected graph with costs up to `seconds`, usages up to `100 * nbytes`, and a share of the pairs `forbidden`."""
    rng = np.random.default_rng(seed)
    number = (lambda *shape: rng.integers(0, 20, shape).astype(float)) if whole else (lambda *shape: rng.random(shape))
    sizes = rng.integers(1, 5, nodes)
    edges = []
    for b in range(1, nodes):
        for a in {int(rng.integers(0, b)), int(rng.integers(0, b))}:
            cost = number(sizes[a], sizes[b]) * seconds
            cost[rng.random(cost.shape) < forbidden] = np.inf
            edges.append(Edge(a, b, cost) if rng.random() < 0.5 else Edge(b, a, cost.T))
    usages = []
    for i in range(nodes):
        start = int(rng.integers(0, 8))
        usages.append(Usage(i, start, start + int(rng.integers(1, 6)), np.round(rng.random(sizes[i]) * 100) * nbytes))
    node_costs = tuple(number(size) * seconds for size in sizes)
    limit = None if budget is None else budget * nbytes
    return Problem(node_costs, tuple(edges), tuple(usages), horizon=14, budget=limit, fixed_bytes=np.full(3, 5.0 * nbytes))


def outcome(solve, problem: Problem) -> dict:
    """The objective, or what `Infeasible` says about the peak (-1 where no budget would do)."""
    try:
        return {"objective": solve(problem).objective}
    except solvers.Infeasible as error:
        return {"least peak": -1.0 if error.peak_bytes is None else error.peak_bytes}


def assert_all_agree(problem: Problem) -> None:
    truth = outcome(brute_force, problem)
    for name in ("highs", "pulp"):
        assert outcome(lambda p, name=name: solvers.solve(p, name), problem) == pytest.approx(truth, rel=3e-6), name


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.4]), st.sampled_from([None, 60, 120, 200]), st.booleans())
def test_highs_and_pulp_agree_with_brute_force(seed, forbidden, budget, whole):
    assert_all_agree(random_problem(seed, forbidden=forbidden, budget=budget, whole=whole))


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([None, 40.0, 80.0, 200.0]), st.booleans())
def test_highs_and_pulp_agree_with_brute_force_on_conversion_trees(seed, budget, whole):
    assert_all_agree(flow_problem(seed, budget=budget, whole=whole))


def flow_problem(seed: int, *, users=2, states=4, budget=None, whole=True) -> Problem:
    """A producer and its users, joined by a conversion tree: a flow per user over shared arcs, an arc's cost and bytes paid once."""
    rng = np.random.default_rng(seed)
    strategies = 3
    arcs = [(i, j) for i in range(states) for j in range(states) if i != j and rng.random() < 0.6] or [(0, 1)]
    made_in = rng.integers(0, states, strategies)
    needed_in = rng.integers(0, states, (users, strategies))
    opened, flows = len(arcs), len(arcs) * users
    choices = strategies * (users + 1)
    entries, lower, upper = [], [], []

    def row(terms, low, high):
        entries.extend((len(lower), column, value) for column, value in terms)
        lower.append(low)
        upper.append(high)

    for k in range(users):
        flow = [choices + opened + k * len(arcs) + i for i in range(len(arcs))]
        for state in range(states):
            terms = [(flow[i], 1.0) for i, (a, _) in enumerate(arcs) if a == state]
            terms += [(flow[i], -1.0) for i, (_, b) in enumerate(arcs) if b == state]
            terms += [(p, -1.0) for p in range(strategies) if made_in[p] == state]
            terms += [(strategies * (k + 1) + q, 1.0) for q in range(strategies) if needed_in[k, q] == state]
            row(terms, 0.0, 0.0)
        for i in range(len(arcs)):
            row([(choices + i, 1.0), (flow[i], -1.0)], 0.0, np.inf)
    r, c, v = (np.array(x) for x in zip(*entries, strict=True))
    side = SideColumns(
        cost=np.concatenate([rng.random(opened), np.zeros(flows)]),
        upper=np.ones(opened + flows),
        integer=np.concatenate([np.full(opened, whole), np.zeros(flows, bool)]),
        usage_column=np.arange(opened),
        usage_start=rng.integers(0, 4, opened),
        usage_stop=np.full(opened, 6),
        usage_bytes=np.round(rng.random(opened) * 40),
    )
    usages = [Usage(i, int(rng.integers(0, 3)), 5, np.round(rng.random(strategies) * 40)) for i in range(users + 1)]
    rows = SideRows(r.astype(np.int64), c.astype(np.int64), v.astype(float), np.array(lower), np.array(upper))
    return Problem(tuple(rng.random(strategies) for _ in range(users + 1)), (), tuple(usages), side, rows, 6, budget=budget)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from(["random", "random with forbidden pairs", "conversion tree"]))
def test_the_least_peak_is_brute_forces_and_a_budget_that_works(seed, kind):
    if kind == "conversion tree":
        problem = flow_problem(seed)
    else:
        problem = random_problem(seed, forbidden=0.3 * (kind != "random"))
    try:
        truth = least_peak(problem).peak_bytes
    except solvers.Infeasible:
        for name in ("highs", "pulp"):
            with pytest.raises(solvers.Infeasible) as error:
                solvers.minimum_peak(problem, name)
            assert error.value.peak_bytes is None
        return
    for name in ("highs", "pulp"):
        peak, solution = solvers.minimum_peak(problem, name)
        assert peak == pytest.approx(truth, rel=1e-6)
        assert evaluate(problem, solution.choice, solution.side).peak_bytes == peak
        assert solvers.solve(replace(problem, budget=peak), name).peak_bytes <= peak * (1 + 1e-9)


def test_a_budget_below_the_least_peak_is_refused_with_the_least_peak():
    problem = random_problem(3)
    peak, _ = solvers.minimum_peak(problem)
    with pytest.raises(solvers.Infeasible, match="the least peak is") as error:
        solvers.solve(replace(problem, budget=peak - 1))
    assert error.value.peak_bytes == peak == least_peak(problem).peak_bytes
    assert error.value.proven and evaluate(problem, error.value.solution.choice, error.value.solution.side).consistent


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from(["random", "conversion tree", "two layers"]), st.sampled_from([0.5, 0.98, 1.02, 2.0]))
def test_answers_above_what_is_known_are_given_up_and_no_others(seed, kind, factor):
    make = {"random": random_problem, "conversion tree": flow_problem, "two layers": layered_problem}[kind]
    problem = make(seed, budget=120.0)
    try:
        best = brute_force(problem).objective
    except solvers.Infeasible:
        return
    below = factor * best
    try:
        found = solvers.solve(problem, below=below)
    except TooDear as error:
        assert factor < 1 and below <= error.bound <= best * (1 + 1e-6)
    else:
        assert found.objective == pytest.approx(best, rel=3e-6)  # an answer that came before its bound


@pytest.mark.parametrize("seed", range(5))
def test_half_of_the_least_seconds_are_given_up(seed):
    problem = layered_problem(seed)
    with pytest.raises(TooDear):
        solvers.solve(problem, below=0.5 * brute_force(problem).objective)


def test_a_relaxation_that_begins_where_it_ended_takes_no_steps():
    bases, problem = Bases(), layered_problem(1, users=3)
    steps = []
    for _ in range(2):
        run = highs._least_seconds(problem, 1e-6, np.inf, lambda line: None, bases=bases)
        solver, _ = run.run_fresh(run.model.upper)
        steps.append(solver.getInfo().simplex_iteration_count)
    assert steps[0] > 0 and steps[1] == 0


@SETTINGS
@given(st.integers(0, 10**6))
def test_where_a_relaxation_begins_changes_no_value(seed):
    """The same matrix with other costs and another budget, from where the last one ended."""
    bases, problem = Bases(), layered_problem(seed, users=3)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        truth = brute_force(problem).objective
        assert solvers.solve(problem, bases=bases).objective == pytest.approx(truth, rel=3e-6)
        other = replace(problem.side, cost=problem.side.cost * (0.5 + rng.random(len(problem.side))))
        problem = replace(problem, side=other, node_costs=tuple(rng.random(len(c)) for c in problem.node_costs))
    assert solvers.minimum_peak(problem)[0] == pytest.approx(least_peak(problem).peak_bytes, rel=1e-6)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from(["random", "conversion tree", "two layers"]))
def test_a_least_peak_within_a_gap_is_a_budget_that_works(seed, kind):
    make = {"random": random_problem, "conversion tree": flow_problem, "two layers": layered_problem}[kind]
    problem = make(seed)
    truth = least_peak(problem).peak_bytes
    peak, solution = solvers.minimum_peak(problem, gap=0.05)
    assert truth * (1 - 1e-6) <= peak <= truth * 1.06 or solution.status != "optimal"
    assert solvers.solve(replace(problem, budget=peak)).peak_bytes <= peak * (1 + 1e-9)


def test_a_budget_below_what_is_held_in_any_case_is_refused():
    with pytest.raises(solvers.Infeasible) as error:
        solvers.solve(replace(random_problem(4), fixed_bytes=np.full(14, 1e4), budget=500.0))
    assert error.value.peak_bytes >= 1e4


def test_a_pair_of_nodes_that_exclude_each_other_is_infeasible_without_a_peak():
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, np.full((2, 2), np.inf)),), budget=1.0)
    for name in ("highs", "pulp"):
        with pytest.raises(solvers.Infeasible) as error:
            solvers.solve(problem, name)
        assert error.value.peak_bytes is None and error.value.solution is None


@pytest.mark.parametrize("seconds", [1e-7, 1.0, 1e6])
@pytest.mark.parametrize("nbytes", [1e-2, 10.0, 1e9])
def test_extreme_units_do_not_change_the_choice(seconds, nbytes):
    plain = [solvers.solve(random_problem(seed, budget=180)) for seed in range(3)]
    scaled = [solvers.solve(random_problem(seed, budget=180, seconds=seconds, nbytes=nbytes)) for seed in range(3)]
    assert [s.choice for s in scaled] == [s.choice for s in plain]
    assert [s.objective for s in scaled] == pytest.approx([s.objective * seconds for s in plain], rel=1e-9)


def test_a_cost_a_million_times_the_optimum_does_not_blur_it():
    problem = random_problem(11, nodes=6)
    node_costs = tuple(np.append(c, 1e6) for c in problem.node_costs)
    edges = tuple(Edge(e.a, e.b, np.pad(e.cost, (0, 1), constant_values=1e6)) for e in problem.edges)
    usages = tuple(replace(u, nbytes=np.append(u.nbytes, 0.0)) for u in problem.usages)
    solution = solvers.solve(replace(problem, node_costs=node_costs, edges=edges, usages=usages))
    assert solution.objective == pytest.approx(brute_force(problem).objective)


def test_a_relaxation_that_is_integral_ends_the_solve():
    lines = []
    problem = random_problem(5)
    solution = solvers.solve(problem, log=lines.append)
    assert solution.status == "optimal" and solution.objective == pytest.approx(brute_force(problem).objective)
    assert any("relaxation" in line for line in lines) and not any("columns open" in line for line in lines)


def test_memory_rows_are_added_only_where_they_bind_and_equal_the_full_statement():
    problem = random_problem(21, nodes=24)
    usages = tuple(Usage(i, i, i + 6, np.round(c * 100)) for i, c in enumerate(problem.node_costs))
    problem = replace(problem, node_costs=tuple(1.0 - c for c in problem.node_costs), usages=usages, horizon=50, fixed_bytes=np.zeros(0))
    peak, _ = solvers.minimum_peak(problem)
    tight = replace(problem, budget=round(1.1 * peak))
    free, bound = solvers.solve(problem), solvers.solve(tight)
    assert bound.objective > free.objective
    assert 0 < bound.constraints - free.constraints < 30
    assert bound.objective == pytest.approx(solvers.solve(tight, "pulp").objective, rel=3e-6)


def test_a_bound_is_never_above_the_objective_and_within_the_gap():
    for seed in range(8):
        solution = solvers.solve(random_problem(seed, nodes=8, budget=300), gap=1e-3)
        assert solution.bound <= solution.objective and solution.gap <= 1e-3


def test_a_time_limit_ends_with_an_answer_that_fits_and_says_so():
    problem = hard_problem()
    begin = time.monotonic()
    solution = solvers.solve(problem, time_limit_s=1.0)
    assert time.monotonic() - begin < 4
    assert solution.status == "time_limit" and solution.bound < solution.objective
    assert evaluate(problem, solution.choice, solution.side).feasible


def hard_problem() -> Problem:
    """A dense graph with costs drawn at random, far from integral and too large to solve in seconds, and a budget."""
    rng = np.random.default_rng(0)
    nodes, size = 60, 8
    edges = tuple(Edge(a, b, rng.random((size, size))) for a in range(nodes) for b in range(a + 1, nodes) if rng.random() < 0.3)
    usages = tuple(Usage(i, i, i + 20, rng.integers(1, 100, size).astype(float)) for i in range(nodes))
    return Problem(tuple(rng.random(size) for _ in range(nodes)), edges, usages, horizon=80, budget=700.0)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.4]), st.sampled_from([None, 120, 200]), st.booleans())
def test_dual_ascent_excludes_no_optimum(seed, forbidden, budget, whole):
    """The way of large problems, taken by small ones."""
    problem = random_problem(seed, nodes=6, forbidden=forbidden, budget=budget, whole=whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(highs, "LARGE_CELLS", -1)
        assert outcome(highs.solve, problem) == pytest.approx(outcome(brute_force, problem), rel=3e-6)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([None, 200]))
def test_the_bound_of_dual_ascent_is_below_the_optimum(seed, budget):
    problem, _ = presolve(random_problem(seed, nodes=6, budget=budget))
    try:
        optimum = brute_force(problem).objective
    except solvers.Infeasible:
        return
    excluded = ascend(problem, memory_rows(problem), lambda: optimum, lambda choice: None, time.monotonic() + 1.0)
    assert excluded.bound <= optimum * (1 + 1e-9)
    assert brute_force(excluded.problem).objective == pytest.approx(optimum)


def test_side_rows_over_strategies_hold_after_contraction():
    """Node 1 follows node 0 through a permutation, and a row forbids a strategy of node 1: it must bind on node 0."""
    follow = np.array([[np.inf, 0.0, np.inf], [np.inf, np.inf, 0.0], [0.0, np.inf, np.inf]])
    rows = SideRows(np.array([0]), np.array([4]), np.array([1.0]), np.array([0.0]), np.array([0.0]))
    problem = Problem((np.array([1.0, 2.0, 3.0]), np.zeros(3)), (Edge(0, 1, follow),), rows=rows)
    smaller, _ = presolve(problem)
    assert len(smaller.node_costs) == 1
    for name in ("highs", "pulp"):
        assert solvers.solve(problem, name).choice == brute_force(problem).choice == (1, 2)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([0.3, 0.5, 0.65]))
def test_a_lifted_answer_of_the_presolved_problem_is_the_optimum_of_the_whole(seed, forbidden):
    problem = random_problem(seed, nodes=6, forbidden=forbidden, budget=200)
    try:
        truth = brute_force(problem)
    except solvers.Infeasible as error:
        with pytest.raises(solvers.Infeasible) as again:
            smaller, _ = presolve(problem)
            brute_force(smaller)
        assert again.value.peak_bytes is None or again.value.peak_bytes == error.peak_bytes
        return
    smaller, lift = presolve(problem)
    small = brute_force(smaller)
    lifted = lift(small)
    assert small.objective == pytest.approx(truth.objective, rel=1e-12) == lifted.objective
    assert small.peak_bytes == evaluate(problem, lifted.choice, lifted.side).peak_bytes


def test_pairs_that_contraction_forbids_are_deleted_before_the_next_contraction():
    """Once counted as a function: an edge whose finite cells were as many as its rows, one of which had none and another two."""
    problem = random_problem(10000259, nodes=6, forbidden=0.4, budget=220)
    smaller, _ = presolve(problem)
    assert brute_force(smaller).objective == pytest.approx(brute_force(problem).objective, rel=1e-12)


def test_followers_and_separable_edges_leave_one_decision():
    """A chain of permutations, joined to another node by an edge that is a sum of two node costs."""
    turn = np.where(np.roll(np.eye(4), 1, axis=1) > 0, 1.0, np.inf)
    edges = [Edge(i, i + 1, turn * (i + 1)) for i in range(5)]
    edges.append(Edge(6, 3, np.arange(3.0)[:, None] + np.arange(4.0)))
    problem = Problem((*(np.arange(4.0) for _ in range(6)), np.array([2.0, 0.0, 5.0])), tuple(edges))
    smaller, lift = presolve(problem)
    assert len(smaller.node_costs) == 2 and not smaller.edges
    assert lift(brute_force(smaller)).objective == brute_force(problem).objective


def test_an_edge_from_a_node_to_itself_is_priced_on_its_diagonal():
    problem = Problem((np.array([0.0, 1.0]),), (Edge(0, 0, np.array([[5.0, 0.0], [0.0, 1.0]])),))
    for name in ("highs", "pulp"):
        assert solvers.solve(problem, name).choice == (1,) == brute_force(problem).choice


def test_parallel_edges_and_negative_costs_add_up():
    rng = np.random.default_rng(7)
    edges = (Edge(0, 1, rng.normal(size=(3, 4))), Edge(1, 0, rng.normal(size=(4, 3))), Edge(0, 2, rng.normal(size=(3, 2))))
    assert_all_agree(Problem((rng.normal(size=3), rng.normal(size=4), rng.normal(size=2)), edges, constant_cost=-2.0))


def test_an_integer_side_column_counts_whole_members():
    """Three members of a class share strategies in counts: 2.5 is what the row asks for and 3 what it takes."""
    side = SideColumns(np.array([1.0]), np.array([3.0]), np.array([True]))
    rows = SideRows(np.array([0, 0]), np.array([1, 2]), np.array([-2.5, 1.0]), np.array([0.0]), np.array([np.inf]))
    problem = Problem((np.array([9.0, 1.0]),), side=side, rows=rows)
    for name in ("highs", "pulp"):
        solution = solvers.solve(problem, name)
        assert solution.objective == pytest.approx(4.0) and solution.side.tolist() == [3.0]


def test_an_empty_problem_costs_its_constant():
    assert solvers.solve(Problem((), constant_cost=2.0)).objective == 2.0


def test_an_unknown_solver_is_named_with_those_there_are():
    with pytest.raises(UsageError, match="highs, pulp"):
        solvers.solve(Problem(()), "simplex")


def layered_problem(seed: int, *, users=2, states=3, budget=None) -> Problem:
    """A conversion tree with an early and a late layer: the last user reads late, the others early; waiting is free and holds memory."""
    rng = np.random.default_rng(seed)
    strategies, layers = 2, 2
    pairs = [(i, j) for i in range(states) for j in range(states) if i != j]
    moves = [(i, j, float(rng.random())) for i, j in pairs if j == (i + 1) % states or rng.random() < 0.5]
    openings = [(layer * states + i, layer * states + j, cost) for layer in range(layers) for i, j, cost in moves]
    openings += [(i, states + i, 0.0) for i in range(states)]
    builder = SideBuilder(strategies * (users + 1), range(0, strategies * (users + 2), strategies))
    for tail, head, cost in openings:
        column = builder.add_column(cost, users > 1)
        start = 0 if head < states else 4 if tail >= states else 2
        stop = 2 if head < states else 6 if tail >= states else 4
        builder.usage.append((column, np.array([start]), np.array([stop]), float(rng.integers(1, 40))))
    made_in = rng.integers(0, states, strategies)
    for k in range(users):
        layer = layers - 1 if k == users - 1 else 0
        needed = rng.integers(0, states, strategies) + layer * states
        flow = {}
        for o, (_, head, _) in enumerate(openings):
            if layer or head < states:
                flow[o] = o if users == 1 else builder.add_column(0.0, False)
                if users > 1:
                    builder.add_row([(builder.side(flow[o]), 1.0), (builder.side(o), -1.0)], -np.inf, 0.0)
        for state in range(states * (layer + 1)):
            terms = [(builder.side(f), float((openings[o][1] == state) - (openings[o][0] == state))) for o, f in flow.items()]
            terms += [(p, 1.0) for p in range(strategies) if made_in[p] == state]
            terms += [(strategies * (k + 1) + q, -1.0) for q in range(strategies) if needed[q] == state]
            builder.add_row([term for term in terms if term[1]], 0.0, 0.0)
    side, rows = builder.finish()
    usages = tuple(Usage(i, i, i + 4, rng.integers(0, 40, strategies).astype(float)) for i in range(users + 1))
    return Problem(tuple(rng.random(strategies) for _ in range(users + 1)), (), usages, side, rows, 8, budget=budget)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([None, 60.0, 90.0, 150.0]), st.sampled_from([1, 2, 3]))
def test_highs_and_pulp_agree_with_brute_force_on_trees_of_two_layers(seed, budget, users):
    assert_all_agree(layered_problem(seed, users=users, budget=budget))


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]))
def test_moves_of_a_late_layer_are_never_needed_while_memory_does_not_matter(seed, users):
    problem = layered_problem(seed, users=users)
    late = postponed(problem)
    assert len(late)
    upper = problem.side.upper.copy()
    upper[late] = 0.0
    closed = replace(problem, side=replace(problem.side, upper=upper))
    assert brute_force(closed).objective == pytest.approx(brute_force(problem).objective)


@SETTINGS
@given(st.integers(0, 10**6), st.booleans())
def test_a_tree_of_one_layer_has_nothing_to_postpone(seed, whole):
    assert not len(postponed(flow_problem(seed, whole=whole)))


def test_a_late_move_that_is_cheaper_than_its_early_twin_is_not_postponed():
    problem = layered_problem(0)
    moves = np.flatnonzero(problem.side.integer)[:-3]
    cost = problem.side.cost.copy()
    cost[moves[len(moves) // 2 :]] *= 0.5
    assert not len(postponed(replace(problem, side=replace(problem.side, cost=cost))))


def test_waiting_that_is_free_of_memory_in_the_form_a_value_was_made_in_changes_nothing_about_the_late_layer():
    """As for inputs, which are there anyway: a second, capped way to wait beside each one that holds memory."""
    problem = layered_problem(5, users=2)
    late = postponed(problem)
    rows, first = problem.rows, problem.num_choices
    waits = np.flatnonzero(problem.side.integer)[-3:]
    count, size, new_row = len(problem.side), len(rows), []
    flows = [c for c in range(count) if not problem.side.integer[c] and set(_openings_of(problem, c)) & set(waits.tolist())]
    entries = [
        (r, v) for c in flows for r, k, v in zip(rows.row, rows.column, rows.value, strict=True) if k == first + c and r in _states(rows)
    ]
    assert len(entries) == 2 * len(flows)
    columns = np.repeat(np.arange(count, count + len(flows)), 2) + first
    new_row = [(size + i, first + count + i, 1.0) for i in range(len(flows))] + [(size + i, 0, -1.0) for i in range(len(flows))]
    extended = replace(
        rows,
        row=np.concatenate([rows.row, [r for r, _ in entries], [r for r, _, _ in new_row]]),
        column=np.concatenate([rows.column, columns, [c for _, c, _ in new_row]]),
        value=np.concatenate([rows.value, [v for _, v in entries], [v for _, _, v in new_row]]),
        lower=np.concatenate([rows.lower, np.full(len(flows), -np.inf)]),
        upper=np.concatenate([rows.upper, np.zeros(len(flows))]),
    )
    more = len(flows)
    side = replace(
        problem.side,
        cost=np.append(problem.side.cost, np.zeros(more)),
        upper=np.append(problem.side.upper, np.ones(more)),
        integer=np.append(problem.side.integer, np.zeros(more, bool)),
    )
    assert len(late) and postponed(replace(problem, rows=extended, side=side)).tolist() == late.tolist()


def _states(rows: SideRows) -> set[int]:
    return set(np.flatnonzero(rows.lower == rows.upper).tolist())


def _openings_of(problem: Problem, column: int) -> list[int]:
    """Side columns that share an inequality with one."""
    rows, first = problem.rows, problem.num_choices
    mine = set(rows.row[rows.column == first + column].tolist()) - _states(rows)
    return [int(c) - first for r, c in zip(rows.row, rows.column, strict=True) if r in mine and c != first + column]


def test_a_late_layer_that_a_strategy_feeds_is_not_postponed():
    problem = layered_problem(0, users=1)
    rows = problem.rows
    fed = replace(
        rows,
        row=np.append(rows.row, [3, 4, 5]),
        column=np.append(rows.column, [0, 0, 0]),
        value=np.append(rows.value, [1.0, 1.0, 1.0]),
    )
    assert not len(postponed(replace(problem, rows=fed)))


@SETTINGS
@given(st.integers(0, 10**6), st.booleans())
def test_lowering_the_openings_keeps_every_row_and_raises_neither_seconds_nor_bytes(seed, two_layers):
    problem = layered_problem(seed) if two_layers else flow_problem(seed)
    answer = brute_force(problem)
    loose = np.where(problem.side.integer, 1.0, answer.side)
    values = Openings(problem).lowered(column_values(problem, answer.choice, loose), whole=True)
    lowered = evaluate(problem, answer.choice, values[problem.num_choices :])
    assert lowered.consistent
    assert lowered.objective <= answer.objective + 1e-9
    assert lowered.peak_bytes <= evaluate(problem, answer.choice, loose).peak_bytes


def test_an_opening_that_a_conservation_row_needs_is_not_lowered():
    assert not len(Openings(layered_problem(0, users=1)).columns)


def test_a_budget_that_only_counted_open_arcs_that_nothing_flows_through_needs_no_memory_row():
    problem = layered_problem(3)
    free = solvers.solve(problem)
    lines = []
    again = solvers.solve(replace(problem, budget=free.peak_bytes), log=lines.append)
    assert again.objective == pytest.approx(free.objective) and again.status == "optimal"
    assert not any("memory rows" in line for line in lines)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([60.0, 80.0, 110.0, 150.0]), st.sampled_from(["edges", "one layer", "two layers"]))
def test_what_cannot_fit_is_excluded_and_nothing_else(seed, budget, kind):
    make = {"edges": random_problem, "one layer": flow_problem, "two layers": layered_problem}[kind]
    problem = make(seed, budget=budget)
    truth = outcome(brute_force, problem)
    try:
        excluded = excluded_by_memory(problem)
    except solvers.Infeasible:
        assert "least peak" in truth
        return
    assert outcome(brute_force, excluded).get("objective") == pytest.approx(truth.get("objective"))


def test_a_strategy_that_leaves_the_others_too_little_is_excluded_at_the_time_where_they_overlap():
    usages = (Usage(0, 0, 4, np.array([10.0, 45.0])), Usage(1, 2, 6, np.array([50.0, 30.0])), Usage(1, 5, 9, np.array([0.0, 90.0])))
    problem = Problem((np.zeros(2), np.zeros(2)), (), usages, horizon=9, budget=80.0)
    excluded = excluded_by_memory(problem)
    assert [np.isinf(c).tolist() for c in excluded.node_costs] == [[False, False], [False, True]]
    assert [np.isinf(c).tolist() for c in excluded_by_memory(excluded).node_costs] == [[False, True], [False, True]]


def test_a_budget_below_what_the_nodes_hold_at_least_is_refused_without_a_relaxation():
    lines = []
    problem = flow_problem(1)
    least = max(u.nbytes.min() for u in problem.usages)
    with pytest.raises(solvers.Infeasible):
        excluded_by_memory(replace(problem, budget=0.5 * least))
    with pytest.raises(solvers.Infeasible, match="the least peak is"):
        solvers.solve(replace(problem, budget=0.5 * least), log=lines.append)


@SETTINGS
@given(st.integers(0, 10**6), st.sampled_from([None, 60.0, 90.0, 150.0]), st.sampled_from(["one layer", "two layers"]))
def test_the_way_of_large_programmes_finds_the_optimum_of_small_ones(seed, budget, kind):
    """Interior point, dives and fixing by its reduced costs. The least peak of a large programme is found, not proven."""
    problem = layered_problem(seed, budget=budget) if kind == "two layers" else flow_problem(seed, budget=budget)
    truth = outcome(brute_force, problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch, "LARGE_COLUMNS", 0)
        if "objective" in truth:
            assert outcome(highs.solve, problem) == pytest.approx(truth, rel=3e-6)
            return
        with pytest.raises(solvers.Infeasible, match="the least peak") as error:
            highs.solve(problem)
    assert error.value.peak_bytes >= truth["least peak"] * (1 - 1e-9)
    assert not error.value.proven or error.value.peak_bytes == pytest.approx(truth["least peak"], rel=1e-6)
    assert evaluate(problem, error.value.solution.choice, error.value.solution.side).consistent


@SETTINGS
@given(st.integers(0, 10**6), st.booleans())
def test_duals_of_any_kind_prove_a_bound_and_columns_that_a_better_answer_cannot_use(seed, budgeted):
    """Weak duality does not ask where the duals came from: an interior point's are as good as a vertex's."""
    problem = flow_problem(seed, budget=80.0 if budgeted else None)
    model, memory = programme(problem), memory_rows(problem)
    scaled = Scaled(model, memory, 80.0 if budgeted else np.inf, peak=False, gap=1e-6, guess=1.0)
    scaled.times = [0, 2, 3] if budgeted else []
    rng = np.random.default_rng(seed)
    duals = rng.normal(size=len(model.row_lower) + len(scaled.times)) * rng.choice([0.0, 1.0, 300.0])
    bound, reduced = scaled.dual_bound(model.upper, duals)
    try:
        answer = brute_force(problem)
    except solvers.Infeasible:
        return
    assert bound <= answer.objective + 1e-9
    used = column_values(problem, answer.choice, answer.side) > 0.5
    assert np.all(reduced[used] <= answer.objective - bound + 1e-9)


def test_equal_rows_of_a_program_of_equal_layers_are_stated_once():
    usages = [Usage(0, 10 * i, 10 * i + 5, np.array([100.0, 10.0])) for i in range(20)]
    usages += [Usage(1, 0, 200, np.array([50.0, 40.0])), Usage(2, 33, 37, np.array([60.0, 0.0]))]
    memory = memory_rows(Problem((np.zeros(2),) * 3, (), tuple(usages), horizon=200))
    times = memory.worst_times(memory.usage(np.full(6, 0.5)), 0.0)
    assert times == [33, 0]
