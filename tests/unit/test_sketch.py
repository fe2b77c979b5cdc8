"""Sketches of stages: layers priced alone, memory at a price, and what folds and stands in a stage."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest
from deep_step import deep

import autopar
import cost_models
from autopar import models
from autopar.costs import Pricer
from autopar.errors import InfeasibleError, MicrobatchError
from autopar.interop import fine_layers, ops_of
from autopar.intraop.choose import SolveOptions, choose_on
from autopar.intraop.shape import Shape, shape_of
from autopar.ir.mesh import LogicalMesh
from autopar.rules import rule_for
from autopar.runtime.program import in_microbatches
from autopar.trace.trace import trace

FAST = cost_models.load_cluster("fast-link:4", measure=False)


def arguments(layers: int, examples: int = 2048) -> tuple:
    return [jax.ShapeDtypeStruct((64, 512), jnp.float32)] * layers, jax.ShapeDtypeStruct((examples, 64), jnp.float32)


def shape(layers: int, microbatches: int = 1) -> Shape:
    traced = in_microbatches(trace(deep, arguments(layers)), microbatches)
    return shape_of(traced.graph, [rule_for(op, traced.graph.aval) for op in traced.graph.ops], traced.roles.carried)


def chosen(program: Shape, budget: float, price: float | None = None, least: bool = False):
    pricer = Pricer(FAST, LogicalMesh(("x",), (4,)))
    return choose_on(program, pricer, budget, {}, SolveOptions(memory_price=price), lambda text: None, time.perf_counter, least)


def test_layers_alike_fold_in_a_loop_over_microbatches_too():
    sizes = [len(shape(layers, 4).folded.members) for layers in (6, 12)]
    assert sizes[0] == sizes[1], "more layers that are alike make no more classes"


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_a_price_of_memory_proves_holds_for_the_plan_under_the_budget(share, microbatches):
    program = shape(3, microbatches)
    free = chosen(program, 1e12)
    with pytest.raises(InfeasibleError) as refused:
        chosen(program, 1.0, least=True)
    least = refused.value.peak_bytes
    assert 0 < least < free.peak_bytes
    budget = least + share * (free.peak_bytes - least)
    exact = chosen(program, budget)
    assert exact.price.total_s >= free.price.total_s
    price = free.price.total_s / budget
    fitting = 0
    for worth in (0.0, 0.1, 1.0, 10.0):
        try:
            priced = chosen(program, budget, worth * price)
        except InfeasibleError as error:
            assert error.peak_bytes > budget
            continue
        assert priced.peak_bytes <= budget and priced.price.total_s >= exact.price.total_s * (1 - SolveOptions().gap)
        assert priced.solve.bound <= exact.price.total_s * (1 + 1e-6)
        fitting += 1
    assert fitting, "memory that is dear enough makes a plan fit"


def test_a_dearer_byte_makes_plans_hold_less():
    program = shape(4, 4)
    free = chosen(program, 1e12, 0.0)
    dear = chosen(program, 1e12, 100 * free.price.total_s / free.peak_bytes)
    assert dear.peak_bytes < free.peak_bytes and dear.price.total_s > free.price.total_s


def test_as_many_layers_are_found_as_there_are_blocks():
    traced = trace(*models.build("gpt-tiny", layers=18))
    layers = fine_layers(ops_of(traced.graph, traced.roles.carried), 2)
    assert len(layers.costs) in (18, 19) and max(layers.costs) <= 1.3 * sum(layers.costs) / len(layers.costs)
    assert len(set(layers.chain.classes)) <= 5, "most of them are equal"


def masked(ws, x):
    """Attention-like layers with a mask that is large beside the activations."""

    def loss(ws):
        h = x
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        for w in ws:
            scores = jnp.where(mask, jnp.einsum("bsd,btd->bst", h, h), -1e9)
            h = jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), h) @ w
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value


def test_masks_are_not_kept_for_each_microbatch_in_flight():
    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4, jax.ShapeDtypeStruct((8, 256, 16), jnp.float32)
    options = autopar.Options(stages=2, microbatches=4, schedule="1f1b", axis_names=("x",), remat="full")
    plan = autopar.plan(masked, args, "fast-link:2", options=options)
    scores = 2 * 256 * 256 * 4
    assert all(stage.residual_bytes < 1.25 * scores for stage in plan.stages), "no mask and no fill value of the scores' shape"


@pytest.mark.parametrize("dims", [(None, "x"), ("x", None)])
def test_pins_of_an_optimisers_state_hold_in_stages(dims):
    name = "mu['layer_0']['mlp']['up']['kernel']"
    options = autopar.Options(stages=2, microbatches=2, schedule="1f1b", axis_names=("x",), pins={f"*{name}": dims})
    plan = autopar.plan(*models.build("gpt-tiny"), "fast-link:4", options=options)
    found = [leaf.sharding.dims for leaf in plan.inputs if leaf.path.endswith(name)]
    assert found == [tuple((d,) if d else () for d in dims)]


def test_a_step_that_cannot_run_in_microbatches_has_one_stage():
    def step(ws, x):
        value, grads = jax.value_and_grad(lambda ws: jnp.sum(jnp.tanh(jnp.std(jnp.tanh(x @ ws[0]) @ ws[1], axis=0)) @ ws[0]))(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2, jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.raises(MicrobatchError):
        autopar.plan(step, args, "fast-link:4", options=autopar.Options(stages=2))
    assert not autopar.plan(step, args, "fast-link:4", options=autopar.Options(stages="auto")).stages
