"""Loops and branches under any plan: numbers of one device, and as many collectives as planned, inside loops too."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from region_steps import REGIONS
from test_forced_plans import assert_agrees

import autopar
from autopar.trace.trace import trace
from benchmarks.programs import Program, program

QUICK = ("layers", "branches", "dynamic")


@cache
def subject(name: str) -> Program:
    with jax.enable_x64(True):
        step, args = REGIONS[name]()
        return program(name, step, args)


@pytest.mark.parametrize("name", REGIONS)
def test_the_optimum_of_a_program_with_loops_runs_as_planned(name):
    assert_agrees(subject(name), (2, 4), "fast-link")


@pytest.mark.parametrize("sizes", [(2, 4), (3,)], ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in REGIONS])
def test_random_plans_of_a_program_with_loops_run_as_planned(name, sizes):
    for seed in range(2 if name in QUICK else 6):
        assert_agrees(subject(name), sizes, "random", seed)


def test_a_stack_of_layers_is_cut_inside_the_loop_and_its_body_is_counted_once_per_layer():
    def step(w, x):
        h, _ = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)
        return h

    specs = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.float32)
    plan = autopar.plan(step, specs, "fast-link:8")
    assert plan.predicted.flops > 6 * 2 * 512**3
    assert any("x" in str(s) for s in plan.in_specs[0])
    assert not plan.whole


def test_weights_cut_by_a_memory_budget_are_gathered_layer_by_layer():
    def step(w, x):
        def loss(w):
            h, _ = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, w)
            return jnp.mean(h**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    specs = jax.ShapeDtypeStruct((16, 256, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    weights = 16 * 256 * 256 * 4
    free = autopar.plan(step, specs, "slow-link:8")
    tight = autopar.plan(step, specs, "slow-link:8", options=autopar.Options(memory_bytes=free.predicted.peak_bytes - weights))
    assert tight.predicted.peak_bytes <= free.predicted.peak_bytes - weights
    assert any(c.times == 16 for c in tight.collectives)


def test_a_loop_that_never_runs_and_one_with_effects_stay_closed():
    def step(x):
        a, _ = jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=0)
        b = jax.lax.fori_loop(0, 3, lambda i, c: c + 1, a)
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: (jax.debug.callback(lambda: None), c * 2)[1], b)

    graph = trace(step, (jnp.ones(4),)).graph
    assert [op.primitive for op in graph.ops if op.subgraphs] == ["scan", "while"]
    assert {r.kind for r in graph.regions} == {"scan"}


def test_values_that_no_iteration_changes_are_made_before_the_loop():
    def step(w, x):
        return jax.lax.fori_loop(0, 5, lambda i, h: jnp.sin(h) + jnp.tanh(w), x)

    graph = trace(step, (jnp.ones(4), jnp.ones(4))).graph
    (tanh,) = [op for op in graph.ops if op.primitive == "tanh"]
    assert tanh.region == -1


def test_of_a_branching_that_is_decided_only_the_branch_taken_stands_in_the_program():
    def step(w, x):
        return jax.lax.cond(jnp.array(False), lambda: jnp.tanh(x @ w), lambda: jnp.sin(x))

    graph = trace(step, (jnp.ones((8, 8)), jnp.ones((8, 8)))).graph
    assert [(op.primitive, op.region) for op in graph.ops] == [("sin", -1)]


def accumulated():
    """The user's own gradient accumulation."""

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p) @ p) ** 2)

    def step(p, xs):
        def micro(total, x):
            value, grad = jax.value_and_grad(loss)(p, x)
            return total + grad, value

        total, values = jax.lax.scan(micro, jnp.zeros_like(p), xs)
        return p - 0.1 * total, values

    return step, (jnp.full((64, 64), 0.1), jax.random.normal(jax.random.key(0), (4, 8192, 64)))


def recurrent():
    def loss(p, xs):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ p + x), None), jnp.zeros(xs.shape[1:]), xs)
        return jnp.mean(h**2)

    def step(p, xs):
        return p - 0.1 * jax.grad(loss)(p, xs)

    return step, (jnp.full((64, 64), 0.1), jax.random.normal(jax.random.key(0), (6, 512, 64)))


@pytest.mark.parametrize("case", [accumulated, recurrent], ids=lambda c: c.__name__)
def test_what_a_loop_adds_up_is_reduced_once_after_it(case):
    step, args = case()
    plan = autopar.plan(step, args, "slow-link:8")
    sums = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter") and c.nbytes > 1024]
    assert sums and all(c.times == 1 for c in sums)
    assert plan.verify(step, args).agree
