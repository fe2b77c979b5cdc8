"""Steps as loops over microbatches beside one device and the whole batch: numbers, collectives, and what is refused."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from microbatch_steps import (
    OPTIMIZERS,
    SGD,
    B,
    D,
    batch,
    checkpointed,
    dropout,
    embedded,
    forward,
    mean,
    measured,
    recurrent,
    regularised,
    scaled,
    scanned,
    tied,
    total,
    trained,
    two_losses,
    weighted,
    weights,
)
from programs import EXACT, FAST, assert_close

import autopar
from autopar import models
from autopar.errors import MicrobatchError, PlanError, UsageError
from autopar.runtime.program import in_microbatches
from autopar.trace.trace import trace
from benchmarks import forced
from benchmarks.programs import SMALL, divided, zoo


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def run_beside(step, state, b, count, steps=3, **options):
    """Three steps as microbatches beside three of the whole batch; returns the plan."""
    ours = autopar.parallelize(step, FAST, microbatches=count, **options)
    mine = theirs = state
    for _ in range(steps):
        mine, found = ours(mine, b)
        theirs, expected = jax.jit(step)(theirs, b)
        assert_close(found, expected)
    assert_close(mine, theirs)
    plan = ours.plan(state, b)
    assert plan.microbatches == count
    return plan


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("loss", [mean, weighted, measured], ids=lambda f: f.__name__)
def test_losses(loss, count):
    step, state = trained(loss)
    run_beside(step, state, batch(), count)


@pytest.mark.parametrize("loss", [total, regularised, two_losses, tied, scanned], ids=lambda f: f.__name__)
def test_more_losses(loss):
    step, state = trained(loss, optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)))
    run_beside(step, state, batch(), 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    step, state = trained(weighted, OPTIMIZERS[name])
    run_beside(step, state, batch(), 4)


def test_dropout_masks_are_those_of_the_whole_batch():
    run_beside(*dropout(), 4)


def test_keys_per_example():
    def step(ws, b):
        keys = jax.random.split(jax.random.key(3), B)

        def one(w, x, y, key):
            return jnp.mean((jnp.tanh(x @ w) * jax.random.normal(key, (D,), float) - y) ** 2)

        value, grad = jax.value_and_grad(lambda w: jnp.mean(jax.vmap(one, (None, 0, 0, 0))(w, b["x"], b["y"], keys)))(ws)
        return ws - 0.1 * grad, value

    run_beside(step, weights()[0], batch(), 8)


def test_loss_scaling():
    run_beside(*scaled(), 4)


def test_time_major_recurrence():
    run_beside(*recurrent(), 4)


def test_branches_and_embeddings():
    run_beside(*embedded(), 4)


def test_a_users_checkpoint_is_kept():
    step, state = trained(checkpointed)
    run_beside(step, state, batch(), 4)


def test_gradients_of_narrow_floats_are_added_up_wide():
    """Five hundred microbatches of bfloat16 gradients: added up in bfloat16 they lose most of their digits."""

    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32)))(w)

    x = jax.random.uniform(jax.random.key(0), (512, 8), jnp.bfloat16) + 1
    w = jnp.ones((8, 8), jnp.bfloat16)
    exact = gradient(w.astype(float), x.astype(float))
    wide, narrow = (
        np.asarray(autopar.parallelize(gradient, "host:1", microbatches=512, accumulate_dtype=dtype, batch_argnums=1)(w, x), float)
        for dtype in ("float32", "as_written")
    )
    assert np.max(np.abs(wide / exact - 1)) < 0.01 < np.max(np.abs(narrow / exact - 1))


def test_what_is_added_up_is_reduced_once():
    """Two weights and the loss, on eight devices: each gradient is one collective after the loop, not one per microbatch."""
    step, state = trained(mean)
    many = {k: jax.ShapeDtypeStruct((2**20, *x.shape[1:]), x.dtype) for k, x in batch().items()}
    plan = autopar.plan(step, (state, many), "h100-sxm:8", options=autopar.Options(microbatches=4, axis_names=("x",)))
    sums = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert len(sums) == 3 and {c.times for c in sums} == {1}


def test_named_parallelism_in_microbatches():
    """Data parallelism reduces gradients once a step, tensor parallelism its activations once a microbatch."""
    step, args = models.build("gpt-tiny", abstract=False, dtype="float64", param_dtype="float64", layers=1)
    plan = autopar.manual(step, args, FAST, data=4, tensor=2, microbatches=3, accumulate=2)
    report = plan.verify(step, args, steps=1)
    assert plan.microbatches == 6 and report.numbers.agree and report.collectives.agree, report
    times = {axes: {c.times for c in plan.collectives if c.kind == "all_reduce" and c.axes == axes} for axes in (("data",), ("tensor",))}
    assert times[("data",)] == {1} and 6 in times[("tensor",)]


def test_forward_only():
    """Without state the batch is named, and outputs per example are put together again."""

    def predict(ws, x):
        return forward(ws, x), jnp.mean(x)

    ours = autopar.parallelize(predict, FAST, microbatches=4, batch_argnums=1)
    assert_close(ours(weights(), batch()["x"]), jax.jit(predict)(weights(), batch()["x"]))


def batch_norm(ws, b):
    h = b["x"] @ ws[0]
    h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 1e-5)
    return jnp.mean((h @ ws[1] - b["y"]) ** 2)


def contrastive(ws, b):
    z = forward(ws, b["x"])
    return jnp.mean(jax.nn.logsumexp(z @ z.T, -1))


@pytest.mark.parametrize("loss", [batch_norm, contrastive], ids=lambda f: f.__name__)
def test_examples_that_meet_are_refused_by_line(loss):
    step, state = trained(loss)
    with pytest.raises(MicrobatchError, match=r"as 4 microbatches: at .*test_microbatch\.py:\d+.*microbatches=1"):
        autopar.plan(step, (state, batch()), FAST, options=autopar.Options(microbatches=4))
    assert autopar.plan(step, (state, batch()), FAST).microbatches == 1


def test_statistics_of_the_input_are_known_beforehand():
    """Normalising the batch itself couples its examples through inputs only."""

    def loss(ws, b):
        x = (b["x"] - jnp.mean(b["x"], 0)) / (jnp.std(b["x"], 0) + 1e-5)
        return jnp.mean((forward(ws, x) - b["y"]) ** 2)

    step, state = trained(loss)
    run_beside(step, state, batch(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 3}, "batch of 16 does not divide into 3"),
        ({"microbatches": 2, "batch_argnums": 0}, "cannot run as 2 microbatches"),
    ],
)
def test_numbers_that_do_not_fit(options, message):
    step, state = trained(mean)
    with pytest.raises(UsageError, match=message):
        autopar.plan(step, (state, batch()), FAST, options=autopar.Options(**options))


@pytest.mark.parametrize("count", [0, -1, 2.5, "many", True])
def test_bad_counts(count):
    with pytest.raises(UsageError, match="microbatches must be"):
        autopar.Options(microbatches=count)


def test_plans_are_saved_with_their_microbatches(tmp_path):
    step, state = trained(weighted)
    plan = autopar.plan(step, (state, batch()), FAST, options=autopar.Options(microbatches=4))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    ours, expected = autopar.parallelize(step, FAST, plan=loaded)(state, batch()), jax.jit(step)(state, batch())
    assert_close(ours, expected)
    with pytest.raises(PlanError):
        autopar.parallelize(step, FAST, plan=loaded)(state, batch(n=8))


def test_memory_asks_for_microbatches():
    """What does not fit as one batch runs as several, and by the compiler's own figures it holds no more than is predicted."""
    step, _ = trained(mean)
    ws, b = weights(layers=8), batch(n=4096)
    state = ws, SGD.init(ws)
    free = autopar.plan(step, (state, b), "host:1", options=autopar.Options(remat="none"))
    assert free.microbatches == 1
    inputs = free.predicted.argument_bytes
    budget = inputs + (free.predicted.peak_bytes - inputs) // 2
    plan = autopar.plan(step, (state, b), "host:1", options=autopar.Options(remat="none", memory_bytes=budget))
    assert plan.microbatches > 1 and plan.predicted.peak_bytes <= budget
    report = plan.verify(step, (state, b))
    assert report.numbers.agree and report.collectives.agree, report
    assert int(report.memory.actual.replace(",", "").split()[0]) <= 1.05 * plan.predicted.temp_bytes


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_what_is_made_again_is_made_again_per_microbatch(remat):
    """Values are made again inside of the loop, and the compiler's own figures show it."""

    def loss(ws, b):
        x = b["x"]
        for w in ws:
            x = jnp.tanh(jnp.sin(x @ w) @ w.T)
        return jnp.mean((x - b["y"]) ** 2)

    def step(ws, b):
        value, grads = jax.value_and_grad(loss)(ws, b)
        return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value

    keys = jax.random.split(jax.random.key(0), 8)
    args = [jax.random.normal(k, (D, 64), float) for k in keys], batch(n=2048)
    held = {}
    for mode in ("none", remat):
        plan = autopar.plan(step, args, "host:1", options=autopar.Options(microbatches=4, remat=mode, axis_names=("x",)))
        report = plan.verify(step, args, steps=2)
        assert report.numbers.agree and report.collectives.agree, report
        held[mode] = int(report.memory.actual.replace(",", "").split()[0])
        assert bool(plan.recomputed) == (mode != "none")
    assert held[remat] < 0.7 * held["none"]


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_random_plans_of_a_model(name):
    program = divided(zoo(name), 4)
    plan, pricer = forced.plan_for(program, forced.logical((2,)), "random", 3)
    (worst, leaf), found = forced.check(program, plan, pricer)
    assert worst < EXACT and found.agree, (worst, leaf, found)


def test_a_model_of_narrow_floats():
    """Gradients of bfloat16 within twice the error that one device makes; their sums over microbatches are products that give float32."""
    with jax.enable_x64(False):
        row = forced.row(zoo("gpt-tiny", "bfloat16"), (2,), "microbatch", 0, Counter())
    assert row.status == "agree", forced.table([row])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), [((8,), 2), ((2, 4), 4)], ids=str)
@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("wresnet-tiny", "unet-tiny")])
def test_random_plans(name, mesh, count):
    program = divided(zoo(name), count)
    plan, pricer = forced.plan_for(program, forced.logical(mesh), "random", count)
    (worst, leaf), found = forced.check(program, plan, pricer)
    assert worst < EXACT and found.agree, (worst, leaf, found)


def test_models_with_batch_norm_are_refused():
    with pytest.raises(MicrobatchError, match="batch norm"):
        in_microbatches(trace(*models.build("wresnet-tiny")), 2)
