"""Named parallelism that nobody named: programs, clusters and budgets that make each the optimum, which the planner finds by itself."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from test_manual import block_step

import autopar
import cost_models
from autopar import Options
from autopar.intraop.price import value_shardings
from autopar.rules import rule_for

NODE = cost_models.load_cluster("h100-sxm:8", measure=False)
TX = optax.adamw(1e-2)
MIB = 2**20


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def descend(loss):
    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def kinds(plan, at_least=1024):
    return Counter((c.kind, c.phase) for c in plan.collectives if c.nbytes >= at_least)


def places(plan):
    """Path -> mesh axes by dimension."""
    return {leaf.path: leaf.sharding.dims for leaf in plan.inputs}


def test_large_experts_stay_where_they_are_and_tokens_are_exchanged():
    groups, tokens, width, experts, hidden, capacity = 256, 256, 256, 64, 8192, 4

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jax.nn.one_hot(((jnp.cumsum(chosen, 1) - 1) * chosen).sum(-1).astype(int), capacity)
        dispatch = jnp.einsum("gse,gsc->gsec", chosen, place)
        slots = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        done = jnp.einsum("egch,ehm->egcm", jax.nn.relu(jnp.einsum("egcm,emh->egch", slots, p["up"])), p["down"])
        combine = dispatch * gates.max(-1)[..., None, None]
        return ((x + jnp.einsum("gsec,egcm->gsm", combine, done)) ** 2).mean()

    params = {"gate": shape(width, experts), "up": shape(experts, width, hidden), "down": shape(experts, hidden, width)}
    plan = autopar.plan(descend(loss), (params, shape(groups, tokens, width)), NODE)
    found = places(plan)
    assert found["params['up']"] == found["params['down']"] == (("x",), (), ())
    assert found["arg1"] == (("x",), (), ())
    assert kinds(plan)["all_to_all", "forward"] == 2 and kinds(plan)["all_to_all", "backward"] >= 1
    assert not any(c.nbytes > 8 * MIB for c in plan.collectives)  # no expert's weight or gradient travels


def test_a_large_vocabulary_is_cut_and_looked_up_in_parts():
    vocab, width = 262_144, 512

    def loss(p, tokens, labels):
        x = p["embed"][tokens]
        logits = (x + jax.nn.gelu(x @ p["up"]) @ p["down"]) @ p["embed"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()

    params = {"embed": shape(vocab, width), "up": shape(width, 2048), "down": shape(2048, width)}
    tokens = shape(8, 256, dtype=jnp.int32)
    plan = autopar.plan(descend(loss), (params, tokens, tokens), NODE)
    assert places(plan)["params['embed']"] == (("x",), ())
    assert {kind for kind, _ in kinds(plan, 64)} == {"all_reduce"}
    assert max(c.nbytes for c in plan.collectives) == 8 * 256 * width * 4  # activations: neither the table nor the logits


def test_one_long_sequence_with_one_head_is_cut_along_the_sequence():
    """There is neither a batch nor are there heads to cut: each device takes some of the queries, and sees all keys and values."""
    seq = 16_384

    def loss(p, x):
        q, k, v = (jnp.einsum("bsm,mhd->bshd", x, p[n]) for n in "qkv")
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        return (jax.nn.gelu(x + jnp.einsum("bqhd,hdm->bqm", mixed, p["out"])) ** 2).mean()

    params = {**{n: shape(512, 1, 128) for n in "qkv"}, "out": shape(1, 128, 512)}
    plan = autopar.plan(descend(loss), (params, shape(1, seq, 512)), NODE)
    graph, sharding = plan._traced.graph, plan.data.sharding
    rules = [rule_for(op, graph.aval) for op in graph.ops]
    made = value_shardings(graph, rules, sharding)
    scores = [s.dims[2:] for v, s in made.items() if graph.avals[v].shape == (1, 1, seq, seq) and v not in graph.free]
    assert scores and all(dims in ((("x",), ()), ((), ("x",))) for dims in scores)
    assert plan.predicted.peak_bytes < seq**2 * 4  # not one matrix of scores is held whole
    assert all(c.nbytes < 10 * MIB for c in plan.collectives)


@pytest.mark.slow
def test_short_memory_turns_tensor_parallelism_into_sequence_parallelism():

    hidden, heads, seq = 4096, 32, 2048
    affine = {"scale": shape(hidden), "bias": shape(hidden)}
    attention = {**{n: shape(hidden, heads, 128) for n in "qkv"}, "out": shape(heads, 128, hidden), "bias": shape(hidden)}
    mlp = {"up": shape(hidden, 4 * hidden), "b1": shape(4 * hidden), "down": shape(4 * hidden, hidden), "b2": shape(hidden)}
    x = shape(1, seq, hidden)
    args = {"attention": attention, "norm1": affine, "norm2": affine, **mlp}, x, x
    named = autopar.manual(block_step, args, NODE, tensor=8, sequence_parallel=True)
    free = autopar.plan(block_step, args, NODE, options=Options(axis_names=("x",)))
    tight = Options(axis_names=("x",), memory_bytes=int(1.02 * named.predicted.peak_bytes))
    found = autopar.plan(block_step, args, NODE, options=tight)
    assert kinds(free, MIB) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}
    assert kinds(found, MIB) == {(k, p): 2 for k in ("all_gather", "reduce_scatter") for p in ("forward", "backward")}
    assert found.predicted.step_time_s <= named.predicted.step_time_s


def adamw_step(params, opt, x, y):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = TX.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, value


def adamw_arguments(rows, width, hidden):
    params = {"w1": shape(width, hidden), "w2": shape(hidden, width)}
    return params, jax.eval_shape(TX.init, params), shape(rows, width), shape(rows, width)


def level(plan, name):
    """How far ZeRO goes for one parameter: which of moments, gradient and parameter are in parts."""
    found = places(plan)
    if any(found[f"params['{name}']"]):
        return 3
    if not any(found[f"opt[0].mu['{name}']"]):
        return 0
    return 2 if ("reduce_scatter", "backward") in kinds(plan) else 1


@pytest.fixture(scope="module")
def by_budget():
    """Share of the memory that data parallelism takes -> the plan, where activations make data parallelism the best there is."""
    args = adamw_arguments(32_768, 1024, 2048)
    free = autopar.plan(adamw_step, args, NODE, options=Options(axis_names=("x",)))

    def within(share):
        memory = int(share * free.predicted.peak_bytes)
        return autopar.plan(adamw_step, args, NODE, options=Options(axis_names=("x",), memory_bytes=memory, remat="none"))

    return {1.0: free} | {share: within(share) for share in (0.92, 0.8, 0.75)}


def test_zero_goes_as_far_as_memory_asks_and_no_further(by_budget):
    levels = {share: sorted(level(plan, name) for name in ("w1", "w2")) for share, plan in by_budget.items()}
    least = levels.pop(0.75)
    assert levels == {1.0: [0, 0], 0.92: [0, 3], 0.8: [3, 3]}
    assert least in ([2, 3], [3, 3])  # versions of JAX write steps that hold more or less, of which it is a share


def test_each_step_down_in_memory_costs_time(by_budget):
    plans = list(by_budget.values())
    assert [p.predicted.peak_bytes for p in plans] == sorted((p.predicted.peak_bytes for p in plans), reverse=True)
    assert [p.predicted.step_time_s for p in plans] == sorted(p.predicted.step_time_s for p in plans)


@pytest.mark.parametrize(("share", "levels"), [(1.0, [0, 0]), (0.9, [0, 3]), pytest.param(0.7, [1, 3], marks=pytest.mark.slow)])
def test_between_slow_nodes_state_is_kept_in_parts_inside_each_node_only(share, levels):
    """Two nodes of four: what is gathered comes from the node, and only gradients cross the network."""
    nodes = cost_models.load_cluster("h100-sxm:2x4", measure=False)
    args = adamw_arguments(32_768, 2048, 4096)
    whole = autopar.manual(adamw_step, args, nodes, data=8).predicted.peak_bytes
    plan = autopar.plan(adamw_step, args, nodes, options=Options(memory_bytes=int(share * whole), remat="none"))
    assert sorted(level(plan, name) for name in ("w1", "w2")) == levels
    if share == 1.0:
        return
    inner = plan.mesh.names[-1]
    assert plan.mesh.by_name[inner] <= 4
    assert {a for path, dims in places(plan).items() if path.startswith(("params", "opt")) for axes in dims for a in axes} == {inner}
    assert {c.axes for c in plan.collectives if c.kind == "all_gather"} == {(inner,)}
