"""Canonical plans: nothing is moved that need not be, and forced plans are canonical."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.costs import Pricer
from autopar.intraop.canonical import canonicalise
from autopar.intraop.connect import connect, made
from autopar.intraop.forced import random_plan
from autopar.intraop.merges import merging_casts
from autopar.ir.check import check_plan
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy
from autopar.rules import rule_for
from autopar.trace.trace import trace
from cost_models import load_cluster

MESH = LogicalMesh(("x", "y"), (2, 2))
PRICE = Pricer(load_cluster("fast-link:4"), MESH).move
WHOLE_VALUE, ROWS = TensorSharding(((), ())), TensorSharding((("x",), ()))


def program(function, *shapes, dtype=jnp.float32):
    graph = trace(function, [jax.ShapeDtypeStruct(s, dtype) for s in shapes]).graph
    return graph, tuple(rule_for(op, graph.aval) for op in graph.ops)


def test_a_value_is_called_partial_last():
    """The transpose takes the gathered value as a partial max over y; the sine takes it gathered, and need not reduce it for that."""
    graph, rules = program(lambda a: (a.T, jnp.sin(a)), (4, 8))
    as_max = next(n for n, p in enumerate(rules[0].passes) if p.kind == "max")
    strategies = [Strategy(passes=(("y", as_max),)), WHOLE]
    dear_gathers = lambda move, source, aval: 1.0 if move.communicates and not source.partial else 0.1  # noqa: E731
    plan = connect(graph, rules, MESH, strategies, [ROWS], [TensorSharding(((), ())), WHOLE_VALUE], dear_gathers)
    assert [m.move.kind for m in plan.moves_of[0]] == ["to_partial", "all_gather", "all_reduce"]
    canonical = canonicalise(graph, rules, plan)
    check_plan(graph, rules, canonical)
    assert [m.move.kind for m in canonical.moves_of[0]] == ["all_gather", "to_partial"]


def test_moves_that_nobody_reads_are_dropped():
    graph, rules = program(lambda a: jnp.sin(a) + 1, (4, 8))
    plan = connect(graph, rules, MESH, [WHOLE, WHOLE], [ROWS], [WHOLE_VALUE], PRICE)
    with_unread = connect(graph, rules, MESH, [WHOLE, WHOLE], [ROWS], [TensorSharding((("y",), ("x",)))], PRICE)
    mixed = type(plan)(plan.mesh, plan.strategies, plan.inputs, plan.outputs, (*plan.moves, *with_unread.moves[len(plan.moves) :]))
    assert len(mixed.moves) > len(plan.moves)
    assert canonicalise(graph, rules, mixed) == plan


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_are_legal_canonical_and_communicate_no_constants(seed):
    def step(a, b):
        mask = jnp.tril(jnp.ones((8, 8), bool))
        hidden = jnp.where(mask, jax.nn.relu(a @ b), 0.0)
        return (hidden / hidden.max(1, keepdims=True)).sum(0), jnp.flip(hidden.T, 0)

    graph, rules = program(step, (8, 4), (4, 8))
    plan = random_plan(graph, rules, MESH, (), PRICE, seed)
    check_plan(graph, rules, plan)
    assert canonicalise(graph, rules, plan) == plan
    assert not [m for m in plan.moves if m.move.communicates and m.value in graph.free]


def test_axes_of_size_one_cut_nothing():
    graph, rules = program(lambda a, b: a @ b, (8, 4), (4, 8))
    plan = random_plan(graph, rules, LogicalMesh(("x", "y"), (1, 4)), (), PRICE, 0)
    assert not any("x" in s.axes for s in made(graph, rules, plan.strategies, plan.inputs).values())


def merging(function, stop=None):
    """The casts that merge collectives where the first op makes partial sums over x, which pass through all ops before op `stop`, and
    all primitives.
    """
    graph, rules = program(function, (4, 8), (8, 6), dtype=jnp.bfloat16)
    stop = len(graph.ops) if stop is None else stop
    sums = [next((n for n, p in enumerate(r.passes) if p.kind == "sum"), None) for r in rules]
    passing = [Strategy(passes=(("x", n),)) if n is not None and i < stop else WHOLE for i, n in enumerate(sums)]
    product = Strategy(cuts=((rules[0].operands[0][1][0], ("x",)),))
    inputs = [TensorSharding(((), ())) for _ in graph.inputs]
    plan = connect(graph, rules, MESH, [product, *passing[1:]], inputs, [ROWS] * len(graph.outputs), PRICE)
    check_plan(graph, rules, plan)
    return merging_casts(graph, rules, plan), [op.primitive for op in graph.ops]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b, (a @ b).astype(jnp.float32)),
        lambda a, b: (-(a @ b), -(a @ b).astype(jnp.float32)),
        lambda a, b: (-(a @ b).astype(jnp.float32), -(a @ b)),
    ],
)
def test_a_cast_of_partial_sums_makes_two_reductions_one(function):
    found, primitives = merging(function)
    assert found and {primitives[i] for i in found} == {"convert_element_type"}
    assert not merging(function, stop=1)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b).astype(jnp.float32),
        lambda a, b: (-(a @ b), (a @ b).astype(jnp.float32)),
        lambda a, b: (a @ b, jnp.square((a @ b).astype(jnp.float32))),
    ],
)
def test_other_casts_merge_nothing(function):
    assert not merging(function, stop=2)[0]
