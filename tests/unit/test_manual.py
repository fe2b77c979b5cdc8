"""Parallelism by name: what each axis may cut, in collectives and in bytes. No devices."""

from __future__ import annotations

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
import cost_models
from autopar import Options, UsageError, models
from autopar.intraop.labels import cut_labels, find_labels
from autopar.rules import rule_for
from autopar.trace.trace import trace

HIDDEN, HEADS, BATCH, SEQ = 1024, 16, 8, 512
ACTIVATION = BATCH * SEQ * HIDDEN * 4
H100 = cost_models.load_cluster("h100-sxm:8", measure=False)
FAST = cost_models.load_cluster("fast-link:8", measure=False)
TX = optax.adamw(1e-2)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def norm(p, x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def attend(p, x):
    q, k, v = (jnp.einsum("bsm,mhd->bshd", x, p[n]) for n in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
    return jnp.einsum("bshd,hdm->bsm", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["out"]) + p["bias"]


def block(p, x):
    x = x + attend(p["attention"], norm(p["norm1"], x))
    return x + jax.nn.gelu(norm(p["norm2"], x) @ p["up"] + p["b1"]) @ p["down"] + p["b2"]


def block_step(params, x, dy):
    """One block of a transformer, forward and backward, with the gradient of its input."""
    loss, (grads, dx) = jax.value_and_grad(lambda p, x: jnp.mean(block(p, x) * dy), (0, 1))(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, (dx**2).mean()


def block_arguments():
    affine = {"scale": shape(HIDDEN), "bias": shape(HIDDEN)}
    kernels = {n: shape(HIDDEN, HEADS, HIDDEN // HEADS) for n in "qkv"}
    attention = {**kernels, "out": shape(HEADS, HIDDEN // HEADS, HIDDEN), "bias": shape(HIDDEN)}
    mlp = {"up": shape(HIDDEN, 4 * HIDDEN), "b1": shape(4 * HIDDEN), "down": shape(4 * HIDDEN, HIDDEN), "b2": shape(HIDDEN)}
    x = shape(BATCH, SEQ, HIDDEN)
    return {"attention": attention, "norm1": affine, "norm2": affine, **mlp}, x, x


def block_plan(**named):
    return autopar.manual(block_step, block_arguments(), H100, **named)


def kinds(plan, at_least=0):
    return Counter((c.kind, c.axes, c.phase) for c in plan.collectives if c.nbytes >= at_least)


def two_layers(params, opt, x, y):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["w1"] + p["b"]) @ p["w2"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value


def two_layer_arguments(rows=16):
    params = {"w1": shape(256, 512), "b": shape(512), "w2": shape(512, 128)}
    return params, jax.eval_shape(TX.init, params), shape(rows, 256), shape(rows, 128)


WEIGHTS = 4 * (256 * 512 + 512 + 512 * 128)


def state_bytes(plan, of):
    """Bytes of state on one device, of leaves whose path starts so."""
    found = 0
    for leaf in plan.inputs:
        if leaf.path.startswith(of):
            found += 4 * prod(leaf.sharding.local_shape(leaf.shape, plan.mesh))
    return found


def test_a_megatron_block_has_two_all_reduces_forward_and_two_backward():
    plan = block_plan(tensor=8)
    assert kinds(plan) == {("all_reduce", ("tensor",), "forward"): 2, ("all_reduce", ("tensor",), "backward"): 2}
    assert {c.nbytes for c in plan.collectives} == {ACTIVATION}


def test_sequence_parallelism_turns_each_all_reduce_into_a_reduce_scatter_and_an_all_gather():
    plan = block_plan(tensor=8, sequence_parallel=True)
    large = {(k, ("tensor",), p): 2 for k in ("reduce_scatter", "all_gather") for p in ("forward", "backward")}
    assert kinds(plan, ACTIVATION // 8) == large
    assert {c.nbytes for c in plan.collectives if c.kind == "reduce_scatter"} == {ACTIVATION}
    assert plan.predicted.peak_bytes < block_plan(tensor=8).predicted.peak_bytes


def test_data_and_tensor_axes_keep_to_what_they_are_for():
    plan = block_plan(data=2, tensor=4)
    found = kinds(plan, ACTIVATION // 8)
    assert found["all_reduce", ("tensor",), "forward"] == found["all_reduce", ("tensor",), "backward"] == 2
    assert sum(n for (kind, axes, phase), n in kinds(plan).items() if axes == ("data",) and phase == "backward") == 13
    assert plan.mesh.names == ("data", "tensor")
    assert all(leaf.sharding.dims[0] == ("data",) for leaf in plan.inputs if leaf.role == "batch")


def test_context_parallelism_gathers_keys_and_values_alone():
    plan = block_plan(context=8)
    assert kinds(plan, ACTIVATION // 8)["all_gather", ("context",), "forward"] == 2
    assert all(leaf.sharding.dims[1] == ("context",) for leaf in plan.inputs if leaf.role == "batch")


@pytest.mark.parametrize("zero", range(4))
def test_data_parallelism_reduces_each_gradient_once(zero):
    plan = autopar.manual(two_layers, two_layer_arguments(), FAST, data=8, zero=zero)
    found = kinds(plan, 64)
    assert found[("all_reduce" if zero < 2 else "reduce_scatter", ("data",), "backward")] == 3
    assert found["all_gather", ("data",), "update"] == (3 if zero in (1, 2) else 0)
    assert found["all_gather", ("data",), "forward"] == (3 if zero == 3 else 0)
    assert sum(found.values()) == {0: 3, 1: 6, 2: 6, 3: 6}[zero] + found["all_gather", ("data",), "backward"]


@pytest.mark.parametrize("zero", range(4))
def test_each_level_of_zero_holds_the_bytes_of_its_paper(zero):
    """Rajbhandari et al. 2020 (arXiv:1910.02054), figure 1: state, gradients and parameters, in that order, over all devices."""
    plan = autopar.manual(two_layers, two_layer_arguments(), FAST, data=8, zero=zero)
    assert state_bytes(plan, "params") == WEIGHTS // (8 if zero == 3 else 1)
    assert state_bytes(plan, "opt[0].mu") == state_bytes(plan, "opt[0].nu") == WEIGHTS // (8 if zero >= 1 else 1)
    reduced = sum(c.nbytes for c in plan.collectives if c.kind == "all_reduce" and c.phase == "backward")
    assert reduced == (WEIGHTS if zero < 2 else 0)  # what is reduced whole is held whole


def test_peaks_fall_from_level_to_level():
    peaks = [autopar.manual(two_layers, two_layer_arguments(8), FAST, data=8, zero=z).predicted.peak_bytes for z in range(4)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.9 * peaks[2]


def test_experts_are_cut_by_their_axis_and_tokens_exchanged():
    step, args = models.build("moe-tiny", layers=1, optimizer="sgd")
    plan = autopar.manual(step, args, FAST, data=2, expert=4)
    assert kinds(plan)["all_to_all", ("expert",), "forward"] >= 2
    weights = [leaf for leaf in plan.inputs if leaf.path.startswith("state.params") and leaf.path.endswith(("['up']", "['down']"))]
    assert weights and all(leaf.sharding.dims[0] == ("expert",) for leaf in weights)


def test_zero_alone_limits_what_ordinary_plans_may_keep_in_parts():
    step, args = two_layers, two_layer_arguments(64)
    tight = Options(memory_bytes=int(2.2 * WEIGHTS))
    free = autopar.plan(step, args, FAST, options=tight)
    assert state_bytes(free, "params") < WEIGHTS
    plans = [autopar.plan(step, args, FAST, options=Options(zero=z)) for z in range(4)]
    for zero, plan in enumerate(plans):
        gathered = {c.phase for c in plan.collectives if c.kind == "all_gather" and any(n in c.purpose for n in ("params", "add"))}
        assert zero >= 3 or not gathered & {"forward", "backward"}
        assert zero >= 1 or not gathered
        assert zero >= 2 or not any(c.kind == "reduce_scatter" and c.phase == "backward" for c in plan.collectives)
    seconds = [plan.predicted.step_time_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True)


def test_labels_follow_the_batch_and_the_sequence_through_merged_dimensions():
    def step(w, x):
        flat = x.reshape(-1, 16) @ w
        return 2 * w, flat.reshape(4, 6, 32).transpose(1, 0, 2) + jnp.zeros((6, 4, 1))

    traced = trace(step, (shape(16, 32), shape(4, 6, 16)))
    graph = traced.graph
    labels = find_labels(graph, [rule_for(op, graph.aval) for op in graph.ops], traced.roles.carried)
    flat = next(op for op in graph.ops if op.primitive == "dot_general").results[0]
    assert labels.dims[flat] == ((("batch", 4), ("sequence", 6)), (("", 32),))
    assert labels.dims[graph.outputs[1]] == ((("sequence", 6),), (("batch", 4),), (("", 32),))


def test_an_axis_cuts_what_its_place_among_the_pieces_says():
    pieces = (("batch", 4), ("sequence", 6))
    assert cut_labels(pieces, 1, 4) == {"batch"} and cut_labels(pieces, 4, 2) == {"sequence"}
    assert cut_labels(pieces, 1, 8) == {"batch", "sequence"}


def test_batch_argnums_says_what_the_batch_is_where_nothing_is_state():
    def apply(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    args = ({"a": shape(64, 64), "b": shape(64, 64)}, shape(16, 64))
    plan = autopar.manual(apply, args, FAST, data=8, options=Options(batch_argnums=1))
    assert [leaf.sharding.dims for leaf in plan.inputs] == [((), ()), ((), ()), (("data",), ())]


def test_a_constraint_in_the_program_outranks_what_an_axis_is_for():
    def step(w, x):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), jax.P("tensor", None))
        return w - 0.1 * (x.T @ hidden), hidden.sum()

    plan = autopar.manual(step, (shape(64, 64), shape(16, 64)), FAST, tensor=8)
    assert plan.solve.status == "optimal" and any(c.axes == ("tensor",) for c in plan.collectives)


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"data": 4}, "8"),
        ({"data": 3, "tensor": 3}, "9 devices"),
        ({"data": 0}, "data must be"),
        ({"data": 8, "zero": 4}, "zero"),
        ({"data": 8, "zero": "auto"}, "autopar.plan"),
        ({"data": 8, "pipeline": 2}, "data=8 x pipeline=2 makes 16 devices"),
        ({"data": 8, "microbatches": 3}, "does not divide into 3"),
        ({"data": 8, "interleave": 2}, "interleave=2"),
        ({"data": 8, "accumulate": 0}, "accumulate must be a whole number"),
        ({"data": 8, "schedule": "1f1b"}, "1f1b"),
        ({"data": 8, "sequence_parallel": 1}, "sequence_parallel"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(named, word):
    with pytest.raises(UsageError, match=word):
        autopar.manual(two_layers, two_layer_arguments(), FAST, **named)


@pytest.mark.parametrize("zero", [4, -1, True, 1.5, "all", None])
def test_a_level_of_zero_that_is_none_is_refused(zero):
    with pytest.raises(UsageError, match="zero"):
        Options(zero=zero)


def test_the_plan_says_within_what_limits_it_was_made():
    plan = autopar.manual(two_layers, two_layer_arguments(), FAST, data=8, zero=1)
    assert any("data parallelism over data, zero 1" in note for note in plan.notes) and plan.data.options["zero"] == 1


def test_replicas_share_nothing_out_and_data_within_them_does():
    """Hierarchical ZeRO: state in four parts on each of two replicas, gradients scattered within and summed between them."""
    plan = autopar.manual(two_layers, two_layer_arguments(), FAST, replica=2, data=4, zero=3)
    assert state_bytes(plan, "params") == state_bytes(plan, "opt[0].mu") == WEIGHTS // 4
    assert all("replica" not in leaf.sharding.axes for leaf in plan.inputs if leaf.role == "state")
    between = [c for c in plan.collectives if c.axes == ("replica",) and c.phase == "backward"]
    assert {c.kind for c in between} == {"all_reduce"} and sum(c.nbytes for c in between) == WEIGHTS // 4
