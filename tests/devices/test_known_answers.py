"""Programmes whose best plan is known beforehand."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
import cost_models
from autopar.ir.mesh import LogicalMesh


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sgd_step(weights, batch):
    def loss_fn(ws):
        hidden = batch["x"]
        for w in ws[:-1]:
            hidden = jax.nn.relu(hidden @ w)
        return jnp.mean((hidden @ ws[-1] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


OPTIMISER = optax.adamw(1e-3)


def adamw_step(state, batch):
    weights, moments = state

    def loss_fn(ws):
        hidden = batch["x"]
        for w in ws:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean((hidden - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    updates, moments = OPTIMISER.update(grads, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss


def adamw_arguments(layers: int, width: int, batch: int):
    key = jax.random.PRNGKey(0)
    weights = [jax.random.normal(k, (width, width)) / width**0.5 for k in jax.random.split(key, layers)]
    rows = {"x": jax.random.normal(key, (batch, width)), "y": jnp.ones((batch, width)) * 0.1}
    return (weights, OPTIMISER.init(weights)), rows


def kinds(plan) -> Counter:
    return Counter((c.kind, c.phase) for c in plan.collectives)


def test_a_wide_batch_with_small_weights_is_data_parallel_with_one_reduction_per_gradient():
    weights, batch = [spec(64, 64)] * 3, {"x": spec(8192, 64), "y": spec(8192, 64)}
    plan = autopar.plan(sgd_step, (weights, batch), cost_models.load_cluster("host:8", measure=False))
    assert {leaf.path: str(leaf.sharding) for leaf in plan.inputs if leaf.role == "batch"} == {
        "batch['x']": "[x, -]",
        "batch['y']": "[x, -]",
    }
    assert all(leaf.sharding.is_replicated for leaf in plan.inputs if leaf.role == "state")
    assert kinds(plan) == {("all_reduce", "backward"): 3, ("all_reduce", "forward"): 1}


def test_heavy_weights_are_cut_by_column_then_by_row_with_one_reduction_forward():
    weights, batch = [spec(4096, 16384), spec(16384, 4096)], {"x": spec(64, 4096), "y": spec(64, 4096)}
    plan = autopar.plan(sgd_step, (weights, batch), cost_models.load_cluster("h100-sxm:8"))
    assert [str(leaf.sharding) for leaf in plan.inputs if leaf.role == "state"] == ["[-, x]", "[x, -]"]
    assert kinds(plan) == {("all_reduce", "forward"): 1}


def test_a_budget_below_replicated_state_keeps_the_state_cut_and_fits_by_the_compilers_own_figures():
    args = adamw_arguments(layers=4, width=256, batch=64)
    cluster = cost_models.load_cluster("h100-sxm:8")
    loose = autopar.plan(adamw_step, args, cluster)
    state = sum(leaf.sharding.without_partial() is not None and 4 * 256 * 256 for leaf in loose.inputs if leaf.shape == (256, 256))
    budget = int(state * 0.6)
    plan = autopar.plan(adamw_step, args, cluster, options=autopar.Options(memory_bytes=budget))
    moments = [leaf for leaf in plan.inputs if leaf.role == "state" and leaf.shape == (256, 256)]
    assert any(not leaf.sharding.is_replicated for leaf in moments)
    report = plan.verify(adamw_step, args, steps=2)
    assert report.numbers.agree and report.collectives.agree, report
    step = autopar.parallelize(adamw_step, plan=plan)
    compiled = step.lower(*args).compile().memory_analysis()
    used = compiled.argument_size_in_bytes + compiled.output_size_in_bytes - compiled.alias_size_in_bytes + compiled.temp_size_in_bytes
    assert used <= budget


def test_weights_are_gathered_again_for_backward_when_memory_asks_for_it():
    args = adamw_arguments(layers=6, width=512, batch=2048)
    cluster = cost_models.load_cluster("v5e:2x4")
    free = autopar.plan(adamw_step, args, cluster, options=autopar.Options(axis_names=("x",)))
    budget = int(free.predicted.peak_bytes * 0.8)
    tight = autopar.plan(adamw_step, args, cluster, options=autopar.Options(axis_names=("x",), memory_bytes=budget))
    again = [c for c in tight.collectives if c.purpose.endswith("again")]
    assert not [c for c in free.collectives if c.purpose.endswith("again")] and again
    report = tight.verify(adamw_step, args, steps=2)
    assert report.numbers.agree and report.collectives.agree, report
    loose_report = free.verify(adamw_step, args, steps=1)

    def temporaries(check) -> int:
        return int(check.actual.replace(",", "").split()[0])

    assert temporaries(report.memory) < 0.8 * temporaries(loose_report.memory)


def test_an_impossible_budget_says_what_is_live_and_the_smallest_budget_then_works():
    args = adamw_arguments(layers=2, width=64, batch=64)
    cluster = cost_models.load_cluster("fast-link:8", measure=False)
    with pytest.raises(autopar.InfeasibleError) as refused:
        autopar.plan(adamw_step, args, cluster, options=autopar.Options(memory_bytes=1000))
    error = refused.value
    assert error.budget_bytes == 1000 < error.peak_bytes
    assert error.live and error.suggestions and str(error.peak_bytes) in error.suggestions[0]
    plan = autopar.plan(adamw_step, args, cluster, options=autopar.Options(memory_bytes=error.peak_bytes))
    assert plan.predicted.peak_bytes <= error.peak_bytes
    with pytest.raises(autopar.InfeasibleError):
        autopar.plan(adamw_step, args, cluster, options=autopar.Options(memory_bytes=int(error.peak_bytes * 0.98)))


def test_the_logical_mesh_is_searched_over_one_and_two_axes():
    weights, batch = [spec(64, 64)] * 2, {"x": spec(512, 64), "y": spec(512, 64)}
    plan = autopar.plan(sgd_step, (weights, batch), cost_models.load_cluster("host:8", measure=False))
    assert {name.split(",")[0] for name, _ in plan.candidates} == {str(LogicalMesh(("x",), (8,))), str(LogicalMesh(("x", "y"), (2, 4)))}
