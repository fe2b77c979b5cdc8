"""The integer programme on small graphs against brute force over all strategies and all conversion trees."""

from __future__ import annotations

import itertools
import random

import pytest

import cost_models
from autopar.costs import Pricer, pricer_of
from autopar.intraop import solvers
from autopar.intraop.choose import SolveOptions, choose_on
from autopar.intraop.enumerate import enumerate_problem
from autopar.intraop.evaluate import Infeasible
from autopar.intraop.lift import lift
from autopar.intraop.price import price_plan
from autopar.intraop.reshard import border_shardings, cheapest, moves_from
from autopar.intraop.shape import shape_of
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.check import check_plan
from autopar.ir.graph import Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding, result_sharding
from autopar.rules import rule_for

CLUSTER = cost_models.load_cluster("slow-link:4", measure=False)
FAST = cost_models.load_cluster("fast-link:4", measure=False)
MATMUL = (("dimension_numbers", (((1,), (0,)), ((), ()))), ("precision", None), ("preferred_element_type", "float32"))


def matmul(a: int, b: int, out: int) -> Op:
    return Op("dot_general", MATMUL, (a, b), (out,))


def random_graph(seed: int) -> Graph:
    """Two to four matmuls of square matrices over two or three inputs, some values with several users."""
    rng = random.Random(seed)
    n = rng.choice([4, 8])
    avals = [Aval((n, n), "float32") for _ in range(rng.choice([2, 3]))]
    inputs = tuple(range(len(avals)))
    ops = []
    for _ in range(rng.choice([2, 3])):
        a, b = rng.choice(range(len(avals))), rng.choice(range(len(avals)))
        avals.append(Aval((n, n), "float32"))
        ops.append(matmul(a, b, len(avals) - 1))
    used = {o for op in ops for o in op.inputs}
    outputs = tuple(v for v in range(len(inputs), len(avals)) if v not in used)
    names = tuple(f"in{i}" for i in inputs)
    return Graph(tuple(avals), inputs, outputs, tuple(ops), names, tuple(f"out{i}" for i in range(len(outputs))))


def tree_cost(source: TensorSharding, targets: frozenset[TensorSharding], aval: Aval, pricer: Pricer) -> float:
    """The cheapest tree of moves from `source` to all of `targets`: exact, by trying every set of intermediate stops in turn."""
    targets = targets - {source}
    if not targets:
        return 0.0

    def distance(a: TensorSharding, b: TensorSharding) -> float:
        return cheapest([(a, 0.0)], b, aval, pricer.mesh, pricer.move)[1].seconds

    kinds = tuple(sorted({k for s in (source, *targets) for _, k in s.partial}))
    stops, queue = {source}, [source]
    while queue:
        for _, there in moves_from(queue.pop(), aval, pricer.mesh, kinds):
            if there not in stops:
                stops.add(there)
                queue.append(there)
    known: dict[tuple[TensorSharding, frozenset[TensorSharding]], float] = {}

    def best(at: TensorSharding, need: frozenset[TensorSharding]) -> float:
        """Dreyfus and Wagner: walk to a stop, then split what is needed in two."""
        if (at, need) not in known:
            if len(need) == 1:
                known[at, need] = distance(at, next(iter(need)))
            else:
                halves = [frozenset(c) for r in range(1, len(need)) for c in itertools.combinations(need, r)]
                known[at, need] = min(distance(at, s) + best(s, h) + best(s, need - h) for s in stops for h in halves)
        return known[at, need]

    return best(source, targets)


def brute_force(graph: Graph, pricer: Pricer) -> float:
    """The least seconds over all strategies of all ops and all shardings of inputs, with the best tree for each value."""
    rules = [rule_for(op, graph.aval) for op in graph.ops]
    shape = shape_of(graph, rules, ())
    options = [enumerate_strategies(r, pricer.mesh) for r in rules]
    places = [border_shardings(graph.avals[v], pricer.mesh) for v in graph.inputs]
    op_cost = [
        [
            pricer.op(op, rules[i], s, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results],
                      shape.charges.reads[i], shape.charges.writes[i])
            for s in options[i]
        ]
        for i, op in enumerate(graph.ops)
    ]  # fmt: skip
    trees: dict[object, float] = {}

    def tree(source: TensorSharding, targets: frozenset[TensorSharding], aval: Aval) -> float:
        key = (source, targets, aval)
        if key not in trees:
            trees[key] = tree_cost(source, targets, aval, pricer)
        return trees[key]

    best = float("inf")
    for choice in itertools.product(*(range(len(o)) for o in options)):
        strategies = [options[i][s] for i, s in enumerate(choice)]
        total = sum(op_cost[i][s] for i, s in enumerate(choice))
        if total >= best:
            continue
        for v, aval in enumerate(graph.avals):
            targets = {operand_sharding(rules[i], strategies[i], k) for i, k in graph.uses.get(v, ())}
            if v in graph.inputs:
                total += min(tree(s, frozenset(targets), aval) for s in places[v])
                continue
            p = graph.producer[v]
            source = result_sharding(rules[p], strategies[p], 0)
            if v in graph.output_values:
                total += min(tree(source, frozenset(targets | {s}), aval) for s in border_shardings(aval, pricer.mesh))
            else:
                total += tree(source, frozenset(targets), aval)
        best = min(best, total)
    return best + pricer.cluster.launch_seconds * shape.charges.launches


@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("cluster", [CLUSTER, FAST], ids=["slow-link", "fast-link"])
def test_the_programme_finds_the_optimum_that_brute_force_finds(seed, cluster):
    graph = random_graph(seed)
    pricer = Pricer(cluster, LogicalMesh(("x",), (4,)))
    rules = [rule_for(op, graph.aval) for op in graph.ops]
    problem, layout = enumerate_problem(shape_of(graph, rules, (), folding=False), pricer)
    solution = solvers.solve(problem, gap=0.0)
    assert solution.objective == pytest.approx(brute_force(graph, pricer), rel=1e-7)
    plan = check_plan(graph, rules, lift(layout, solution))
    assert price_plan(graph, rules, plan, pricer, layout.shape.charges).total_s == pytest.approx(solution.objective, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_pulp_agrees_with_the_array_solver_on_two_axes(seed):
    graph = random_graph(seed)
    pricer = Pricer(FAST, LogicalMesh(("x", "y"), (2, 2)))
    problem, _ = enumerate_problem(shape_of(graph, [rule_for(op, graph.aval) for op in graph.ops], ()), pricer)
    assert solvers.solve(problem, "pulp").objective == pytest.approx(solvers.solve(problem, "highs").objective, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_a_budget_is_kept_and_the_least_budget_is_found(seed):
    graph = random_graph(seed)
    pricer = Pricer(CLUSTER, LogicalMesh(("x",), (4,)))
    shape = shape_of(graph, [rule_for(op, graph.aval) for op in graph.ops], ())
    free, _ = enumerate_problem(shape, pricer, 8192.0)
    loose = solvers.solve(free)
    tight, _ = enumerate_problem(shape, pricer, 1.0)
    with pytest.raises(Infeasible) as refused:
        solvers.solve(tight)
    least = refused.value.peak_bytes
    assert least <= loose.peak_bytes
    fitting, _ = enumerate_problem(shape, pricer, least)
    solution = solvers.solve(fitting)
    assert solution.peak_bytes <= least and solution.objective >= loose.objective * (1 - 1e-9)
    below, _ = enumerate_problem(shape, pricer, least * 0.99)
    with pytest.raises(Infeasible):
        solvers.solve(below)


def test_folding_costs_nothing_when_memory_does_not_bind():
    layers = 5
    avals = [Aval((8, 8), "float32")] * (2 * layers + 1)
    ops = []
    value = 0
    for n in range(layers):
        out = layers + 1 + n
        ops.append(matmul(value, n + 1, out))
        value = out
    inputs = tuple(range(layers + 1))
    graph = Graph(tuple(avals), inputs, (value,), tuple(ops), tuple(f"in{i}" for i in inputs), ("out",))
    rules = [rule_for(op, graph.aval) for op in graph.ops]
    pricer = Pricer(FAST, LogicalMesh(("x",), (4,)))
    costs = []
    for folding in (True, False):
        shape = shape_of(graph, rules, (), folding=folding)
        costs.append(choose_on(shape, pricer, None, {}, SolveOptions(gap=0.0), lambda text: None, lambda: 0.0).solve.objective)
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)


def test_what_is_remembered_of_a_mesh_is_what_would_be_found_anew():
    """One pricer for many programs gives the problems that a fresh one gives for each."""
    mesh = LogicalMesh(("x", "y"), (2, 2))
    shared = pricer_of(FAST, mesh)
    assert shared is pricer_of(FAST, mesh) and shared is not pricer_of(CLUSTER, mesh)
    for seed in (*range(6), *range(6)):
        graph = random_graph(seed)
        shape = shape_of(graph, [rule_for(op, graph.aval) for op in graph.ops], ())
        (ours, _), (anew, _) = (enumerate_problem(shape, pricer, 1e6) for pricer in (shared, Pricer(FAST, mesh)))
        assert all((a == b).all() for a, b in zip(ours.node_costs, anew.node_costs, strict=True))
        assert (ours.side.cost == anew.side.cost).all() and (ours.rows.column == anew.rows.column).all()
        assert (ours.rows.value == anew.rows.value).all() and (ours.side.usage_bytes == anew.side.usage_bytes).all()
