"""Steps in pipeline stages beside one device: numbers, collectives, memory, state that comes and goes, and what is refused."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_steps
from jax.sharding import Mesh
from microbatch_steps import (
    OPTIMIZERS,
    SGD,
    B,
    averaged,
    batch,
    checkpointed,
    dropout,
    embedded,
    errors,
    mean,
    measured,
    recurrent,
    regularised,
    scaled,
    tied,
    total,
    trained,
    two_losses,
    weighted,
    weights,
)
from pipelines import check, forced, in_stages
from programs import FAST, assert_close

import autopar
from autopar import MeshError, StateError, UsageError, models
from autopar.errors import MicrobatchError
from autopar.trace.trace import trace

CLIPPED = OPTIMIZERS["clipped adamw"]
ZERO_GRADIENT = ("['key']['bias']",)
"""Attention's scores do not change with the keys' bias."""


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


def of_loss(loss, tx=SGD):
    step, state = trained(loss, tx, layers=4)
    return step, (state, batch())


def of_step(found):
    step, *args = found
    return step, tuple(args)


STEPS = {f.__name__: lambda f=f: of_loss(f) for f in (mean, weighted, measured, checkpointed)}
STEPS |= {f.__name__: lambda f=f: of_loss(f, CLIPPED) for f in (total, regularised, two_losses, tied)}
STEPS |= {name: lambda tx=tx: of_loss(weighted, tx) for name, tx in OPTIMIZERS.items()}
STEPS |= {f.__name__: lambda f=f: of_step(f(4)) for f in (dropout, scaled, averaged)}
STEPS |= {f.__name__: lambda f=f: of_step(f()) for f in (recurrent, embedded)}
STEPS |= {name: small_steps.STEPS[name] for name in ("perceptron", "attention")}

# step, stages, microbatches, schedule, sizes of each stage's mesh, whether all is made again
FORCED = [
    ("mean", 2, 1, "1f1b", (2,), False),
    ("mean", 4, 8, "zero_bubble", (1,), False),
    ("weighted", 4, 4, "interleaved", (1,), False),  # more stages than weights: some have no op in the loop
    ("measured", 2, 4, "eager_1f1b", (1,), False),
    ("tied", 2, 2, "1f1b", (2,), False),
    ("clipped adamw", 2, 2, "interleaved", (1,), False),
    ("frozen", 2, 4, "zero_bubble", (1,), False),
    ("several steps", 4, 4, "1f1b", (1,), True),
    ("dropout", 2, 4, "gpipe", (1,), False),
    ("scaled", 2, 2, "zero_bubble", (1,), False),
    ("averaged", 2, 4, "gpipe", (1,), False),
    ("embedded", 2, 2, "zero_bubble", (1,), False),
    ("attention", 2, 2, "eager_1f1b", (2,), False),
]


@pytest.mark.parametrize(("name", "stages", "count", "schedule", "sizes", "again"), FORCED)
def test_random_plans_inside_stages_give_the_numbers_of_one_device(name, stages, count, schedule, sizes, again):
    step, args = STEPS[name]()
    check(forced(step, args, stages, count, schedule, sizes, again=again), args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("name", STEPS)
def test_more_random_plans(name, seed):
    random = np.random.default_rng([seed, *name.encode()])
    stages, sizes = [(2, (2,)), (2, (4,)), (2, (2, 2)), (4, (2,)), (4, (1,))][random.integers(5)]
    schedule = ["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"][random.integers(5)]
    count = int(random.choice([1, 2, 4, 8] if schedule != "interleaved" else [stages, 8]))
    step, args = STEPS[name]()
    check(forced(step, args, stages, count, schedule, sizes, seed, again=bool(random.integers(2))), args)


MODELS = [
    ("gpt-tiny", 2, 4, "1f1b", (2,), False),
    ("gpt-tiny", 4, 8, "zero_bubble", (2,), False),
    ("moe-tiny", 4, 4, "eager_1f1b", (1,), False),
    ("t5-tiny", 4, 2, "zero_bubble", (1,), False),
]


def small(name, **shape):
    """A model of the zoo with plain gradient descent."""
    layers = {} if name == "unet-tiny" else {"layers": 2}
    return models.build(name, abstract=False, dtype="float64", param_dtype="float64", optimizer="sgd", batch=8, **layers, **shape)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages", "count", "schedule", "sizes", "again"), MODELS)
def test_random_plans_of_models(name, stages, count, schedule, sizes, again):
    step, args = small(name)
    check(forced(step, args, stages, count, schedule, sizes, again=again), args, leave_out=ZERO_GRADIENT)


# --- chosen plans ---------------------------------------------------------------------------------------------------------------------


def planned(step, args, **options):
    return autopar.plan(step, args, FAST, options=autopar.Options(**options))


def assert_verified(plan, step, args):
    report = plan.verify(step, args)
    assert report.agree, report
    return report


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"stages": 2, "microbatches": 4, "axis_names": ("x",)}, 2),
        ({"stages": 4, "schedule": "zero_bubble", "microbatches": 4, "axis_names": ("x",), "remat": "full"}, 4),
        ({"stages": 2, "schedule": "interleaved", "microbatches": 2, "axis_names": ("x",)}, 4),
    ],
)
def test_chosen_plans_run_as_planned(options, stages):
    step, args = of_loss(weighted, CLIPPED)
    plan = planned(step, args, **options)
    assert len(plan.stages) == stages and plan.microbatches == options["microbatches"]
    assert_verified(plan, step, args)
    if options.get("remat") == "full":
        assert plan.remat == "full" and any(stage.recomputed for stage in plan.stages)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny", "t5-tiny", "unet-tiny"])
def test_chosen_plans_of_models_run_as_planned(name):
    step, args = small(name)
    assert_verified(planned(step, args, stages=2, microbatches=2), step, args)


def wide(ws, b):
    """Layers whose activations are much larger than their weights."""
    x = b["x"]
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w) @ w.T)
    return jnp.mean((x - b["y"]) ** 2)


def test_memory_that_is_short_has_stages_recompute():
    step, state = trained(wide, layers=12)
    args = state, batch(n=4096)
    free = planned(step, args, stages=2, microbatches=2, schedule="1f1b", axis_names=("x",), remat="none")
    budget = int(0.6 * free.predicted.peak_bytes)
    tight = planned(step, args, stages=2, microbatches=2, schedule="1f1b", axis_names=("x",), memory_bytes=budget)
    assert tight.predicted.peak_bytes <= budget and any(stage.recomputed for stage in tight.stages)
    assert_verified(tight, step, args)


def test_memory_that_is_a_little_short_moves_layers_to_the_stage_that_has_fewer_microbatches_in_flight():
    step, state = trained(wide, layers=12)
    args = state, batch(n=4096)
    asked = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "axis_names": ("x",), "remat": "none"}
    free = planned(step, args, **asked)
    budget = int(0.85 * free.predicted.peak_bytes)
    tight = planned(step, args, memory_bytes=budget, **asked)
    assert tight.predicted.peak_bytes <= budget and tight.stages[0].layers[1] < free.stages[0].layers[1]
    assert tight.predicted.step_time_s > free.predicted.step_time_s
    assert_verified(tight, step, args)


def test_a_budget_that_no_stage_can_meet_is_refused_with_a_way_out():
    step, args = of_loss(mean)
    with pytest.raises(autopar.InfeasibleError) as refused:
        planned(step, args, stages=2, microbatches=2, axis_names=("x",), memory_bytes=500)
    assert refused.value.peak_bytes > 500


def test_layers_that_do_not_divide_make_uneven_stages():
    step, state = trained(mean, layers=7)
    args = state, batch()
    for stages in (2, 4):
        staged = in_stages(trace(step, args), stages, 4)
        counts = [sum(op.primitive == "tanh" for op in s.graph.ops) for s in staged.stages]
        assert sum(counts) == 7 and min(counts) >= 1
    check(forced(step, args, 4, 4), args)


def test_a_batch_that_does_not_divide_is_refused():
    step, args = of_loss(mean)
    with pytest.raises(MicrobatchError, match="a batch of 16 does not divide into 3"):
        planned(step, args, stages=2, microbatches=3)


@pytest.mark.parametrize("tokens", [(1, 5, 0, 7)])
def test_tokens_count_as_often_as_they_stand_in_the_batch(tokens):
    """Microbatches with 1, 5, 0 and 7 valid tokens: their means must not be averaged."""

    def loss(ws, b):
        each = jnp.sum((jnp.tanh(jnp.tanh(b["x"] @ ws[0]) @ ws[1]) - b["y"]) ** 2, -1)
        return jnp.sum(each * b["mask"]) / jnp.sum(b["mask"])

    mask = np.concatenate([np.arange(8) < n for n in tokens]).astype(float).reshape(4, 8)
    x, y = np.random.default_rng(0).standard_normal((2, 4, 8, 8))
    step, state = trained(loss)
    args = state, {"x": x, "y": y, "mask": mask}
    check(forced(step, args, 2, 4), args)


@pytest.mark.parametrize("threshold", [0.999999, 1.000001])
def test_clipping_sees_the_norm_of_all_stages(threshold):
    """The norm just above and just below the threshold: a share of it would be clipped otherwise."""
    ws, b = weights(layers=4), batch()
    norm = float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.grad(mean)(ws, b))))
    step, args = of_loss(mean, optax.chain(optax.clip_by_global_norm(threshold * norm), optax.sgd(0.1)))
    check(forced(step, args, 4, 4), args, steps=1)


# --- state that comes and goes --------------------------------------------------------------------------------------------------------


def running(loss=mean, tx=CLIPPED, **options):
    step, state = trained(loss, tx, layers=4)
    asked = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "axis_names": ("x",), **options}
    return step, state, autopar.parallelize(step, FAST, **asked)


def assert_same_steps(step, ours, state, mine=None, steps=3, given=None):
    """So many steps, each beside one device; returns the last state of both."""
    theirs, mine, reference = state, state if mine is None else mine, jax.jit(step)
    for _ in range(steps):
        (mine, found), (theirs, expected) = ours(mine, given or batch()), reference(theirs, given or batch())
        assert_close(found, expected)
    assert_close(mine, theirs)
    return mine, theirs


def test_state_is_born_on_its_stage_and_given_away_step_by_step():
    step, state, ours = running()

    def create(key):
        del key
        ws = weights(layers=4)
        return ws, CLIPPED.init(ws)

    born = ours.init(create, jax.random.key(0), batch=jax.eval_shape(batch))
    plan = ours.plan(state, batch())
    for leaf, where in zip(jax.tree.leaves(born), plan.inputs, strict=False):
        first, count = plan.stages[where.stage].devices
        assert {d.id for d in leaf.devices()} == set(range(first, first + count)), where.path
    assert len({frozenset(w.devices()) for w in born[0]}) == 2  # no stage holds all
    mine, _ = assert_same_steps(step, ours, state, born)
    assert all(x.is_deleted() for x in jax.tree.leaves(born) if x.size > 1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))


def test_state_that_was_given_away_is_refused_before_the_call():
    step, state, ours = running()
    first, _ = ours(state, batch())
    second, _ = ours(first, batch())
    with pytest.raises(StateError, match="was donated to an earlier step"):
        ours(first, batch())
    third, _ = ours(second, batch())  # nothing was lost on the way
    reference = state
    for _ in range(3):
        reference, _ = jax.jit(step)(reference, batch())
    assert_close(third, reference)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))  # the caller's own


def test_donate_false_keeps_everything():
    _, state, ours = running(donate=False)
    first, _ = ours(state, batch())
    second, _ = ours(first, batch())
    again, _ = ours(first, batch())
    assert_close(second, again, 0)


def test_an_array_that_is_state_twice_or_batch_too_is_split():
    def step(state, x):
        value, grads = jax.value_and_grad(lambda s: jnp.mean((jnp.tanh(x @ s["a"]) @ s["b"] + s["c"]) ** 2))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": value, "given": x}

    ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, axis_names=("x",), batch_argnums=1)
    w, x = weights()[0], batch(n=8)["x"]
    state, found = ours({"a": w, "b": w, "c": w}, x)
    expected, _ = jax.jit(step)({"a": w, "b": w, "c": w}, x)
    assert_close(state, expected)
    assert found["given"] is not x and not x.is_deleted()
    twice = {"a": state["a"], "b": state["a"], "c": state["b"]}
    expected, _ = jax.jit(step)(jax.tree.map(np.asarray, twice), np.asarray(expected["a"]))
    after, _ = ours(twice, state["a"])
    assert_close(after, expected)


def test_python_numbers_and_weak_types_go_round():
    def step(state, b):
        ws, n = state
        value, grads = jax.value_and_grad(mean)(ws, b)
        return (jax.tree.map(lambda w, g: w - 0.1 * g / (n + 1), ws, grads), n + 1), {"loss": value, "count": n * 2}

    state = weights(layers=4), 0
    ours = autopar.parallelize(step, FAST, stages=2, microbatches=2, axis_names=("x",))
    mine = theirs = state
    for _ in range(3):
        (mine, found), (theirs, expected) = ours(mine, batch()), jax.jit(step)(theirs, batch())
        assert_close((mine, found), (theirs, expected))
        assert jax.typeof(mine[1]).weak_type == jax.typeof(theirs[1]).weak_type
    assert len({id(p.plan.data.solve) for p in ours._programs.values()}) == 1  # solved once


def test_a_saved_plan_runs(tmp_path):
    step, args = of_loss(weighted, CLIPPED)
    plan = planned(step, args, stages=2, microbatches=4, axis_names=("x",))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    ours = autopar.parallelize(step, plan=tmp_path / "plan.json")
    assert_same_steps(step, ours, args[0])
    assert ours.plan(*args).data == plan.data


def test_a_users_mesh_with_a_stage_axis():
    """Its devices, in its order; state given on other devices comes over."""
    devices = np.array(jax.devices())[::-1].reshape(2, 4)
    step, state = trained(mean, CLIPPED, layers=4)
    ours = autopar.parallelize(step, Mesh(devices, ("stage", "x")), stages=2, microbatches=4)
    there = jax.device_put(state, jax.devices()[3])
    mine, _ = assert_same_steps(step, ours, state, there)
    plan = ours.plan(state, batch())
    assert plan.mesh_shape == {"stage": 2, "x": 4}
    lies = {n: set(d.id for d in devices[n]) for n in range(2)}
    for leaf, where in zip(jax.tree.leaves(mine), plan.inputs, strict=False):
        assert {d.id for d in leaf.devices()} == lies[where.stage], where.path
    with pytest.raises(UsageError, match="let its first axis be 'stage', of size 4"):
        autopar.parallelize(step, Mesh(devices, ("stage", "x")), stages=4).plan(state, batch())


def test_a_plan_for_more_devices_than_here_is_refused():
    step, args = of_loss(mean)
    plan = autopar.plan(step, args, "fast-link:16", options=autopar.Options(stages=4, microbatches=4, axis_names=("x",)))
    with pytest.raises(MeshError, match="needs 16 devices"):
        plan.verify(step, args)


def test_batches_of_two_sizes_take_turns():
    """Each has its own programs; state goes from one to the other and back, its placement kept."""
    step, state, ours = running()
    mine = theirs = state
    for n in (16, 8, 16, 8):
        (mine, found), (theirs, expected) = ours(mine, batch(n=n)), jax.jit(step)(theirs, batch(n=n))
        assert_close(found, expected)
    assert_close(mine, theirs)
    places = [{leaf.path: (leaf.sharding, leaf.stage) for leaf in p.plan.inputs if leaf.role == "state"} for p in ours._programs.values()]
    assert len(places) == 2 and places[0] == places[1]


def test_an_evaluation_step_takes_the_trained_state():
    step, state, ours = running()
    trained_state, _ = ours(state, batch())
    evaluate = autopar.parallelize(lambda ws, b: jnp.mean(errors(ws, b)), FAST)
    assert_close(evaluate(trained_state[0], batch()), jax.jit(mean)(jax.tree.map(np.asarray, trained_state[0]), batch()))
    assert_same_steps(step, ours, jax.tree.map(np.asarray, trained_state), trained_state, steps=1)


def test_one_microbatch_with_metrics_constants_and_a_frozen_parameter():
    step, state = trained(lambda ws, b: (mean(ws[1:], b), {"rate": 0.1, "given": b["mask"], "frozen": jnp.sum(ws[0])}), layers=3)
    check(forced(step, (state, batch()), 2, 1), (state, batch()))


# --- many steps -----------------------------------------------------------------------------------------------------------------------


def test_nothing_leaks():
    _, state, ours = running()
    b = batch()
    counts = {}
    for n in range(1, 21):
        state, found = ours(state, b)
        if n in (2, 20):
            jax.block_until_ready((state, found))
            gc.collect()
            counts[n] = len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())
    assert counts[2] == counts[20]


UNBLOCKED = """
import jax
jax.config.update("jax_enable_x64", True)
import sys
sys.path.insert(0, {here!r})
from microbatch_steps import OPTIMIZERS, batch, mean, trained
from programs import FAST
import autopar
import numpy as np
step, state = trained(mean, OPTIMIZERS["clipped adamw"], layers=4)
ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, schedule="1f1b", axis_names=("x",), pins={{"b['x']": (None, "x")}})
for n in range(50):
    state, loss = ours(state, batch())
collectives = ours.plan(state, batch()).collectives
assert any(c.times > 1 for c in collectives), collectives
print("done", float(loss[0]))
"""


def test_fifty_steps_that_nobody_waits_for_do_not_block_each_other():
    """More programs with collectives than JAX 0.10 can have waiting on CPUs; a subprocess, since a deadlock ends the process."""
    here = Path(__file__).parent
    run = [sys.executable, "-c", UNBLOCKED.format(here=str(here))]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=here.parents[1])
    assert done.returncode == 0 and done.stdout.startswith("done"), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the custom call that sleeps is compiled with g++")
def test_stages_that_sleep_do_so_at_the_same_time():
    command = "benchmarks.pipeline --schedule 1f1b --microbatches 4 --milliseconds 10 --leaves 2 --steps 5 --json -"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = [sys.executable, "-m", *command.split()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], env=environment)
    (row,) = json.loads(done.stdout)["rows"]
    assert 0.9 * row["simulated"] <= row["seconds"] <= 0.75 * row["serial"], row  # 210 ms by the simulator, 480 ms one after the other


def test_no_two_examples_are_mixed_up():
    """Outputs per example come back in the batch's order, whatever the schedule."""

    def predict(ws, b):
        value, grads = jax.value_and_grad(mean)(ws, b)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), errors(ws, b) + jnp.arange(B) * 100

    args = weights(layers=4), batch()
    check(forced(predict, args, 2, 8, "zero_bubble"), args)
