"""A small training step, and three steps of anything beside one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
import cost_models

FAST = cost_models.load_cluster("fast-link:8", measure=False)
"""Eight devices with links so fast that even tiny programs are worth cutting."""

TX = optax.adamw(1e-2)
EXACT = 1e-9


def parameters(seed=0):
    a, b = jax.random.split(jax.random.key(seed))
    return {"b": jnp.full(32, 0.01, float), "w1": jax.random.normal(a, (16, 32)) * 0.1, "w2": jax.random.normal(b, (32, 8)) * 0.1}


def create(seed=0):
    params = parameters(seed)
    return params, TX.init(params)


def examples(n=16, seed=1):
    a, b = jax.random.split(jax.random.key(seed))
    return {"x": jax.random.normal(a, (n, 16)), "y": jax.random.normal(b, (n, 8))}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w1"] + params["b"]) @ params["w2"] - batch["y"]) ** 2)


def train(state, batch):
    """One step of adamw on a two-layer perceptron."""
    params, opt = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt = TX.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": value}


def assert_close(actual, expected, tolerance=EXACT):
    """Same tree, dtypes and numbers; relative to the largest entry of each leaf."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        if not hasattr(e, "dtype"):
            assert a == e, where
            continue
        assert a.dtype == e.dtype and a.shape == e.shape, where
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a), np.asarray(e)
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * float(np.max(np.abs(e), initial=0)), err_msg=where)


def assert_trains(function, state, *rest, mesh=FAST, steps=3, **options):
    """Three steps equal those of one device, under a plan that cuts: the compiled program has collectives. Returns the parallel step."""
    step, reference = autopar.parallelize(function, mesh, **options), jax.jit(function)
    ours = theirs = state
    for _ in range(steps):
        ours, found = step(ours, *rest)
        theirs, expected = reference(theirs, *rest)
        assert_close((ours, found), (theirs, expected))
    assert_cuts(step.plan(state, *rest))
    text = step.lower(state, *rest).compile().as_text()
    assert any(kind in text for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"))
    assert len({id(p.plan.data.solve) for p in step._programs.values()}) == 1  # solved once
    return step


def assert_cuts(plan):
    """The plan has collectives, and some state is cut."""
    assert plan.collectives
    assert any(leaf.sharding.axes for leaf in plan.inputs if leaf.role == "state")
