"""Small programs with a `shard_map` of the user's own, each for a mesh of two axes, x of size 2 and y of size 4."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))


def weights(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def region(*, ins, outs, **options):
    """A decorator: the function per device, on the mesh that is there when it is called."""

    def wrap(body):
        return lambda *args: jax.shard_map(body, mesh=mesh(), in_specs=ins, out_specs=outs, **options)(*args)

    return wrap


def column_row():
    """Two matmuls cut along the hidden dimension, summed by hand, and trained."""

    @region(ins=(P("x"), P(None, "y"), P("y")), outs=P("x"))
    def layer(x, w, v):
        return lax.psum(jnp.tanh(x @ w) @ v, "y")

    def step(params, x):
        loss = lambda p: jnp.mean(layer(x, p["w"], p["v"]) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, ({"v": weights(8, 4), "w": weights(6, 8, seed=1)}, weights(4, 6, seed=2))


def every_collective():
    """All collectives that JAX documents, on both axes, with the device's number in it."""

    @region(ins=(P(("y", "x")), P(None, "y")), outs=(P(("x", "y")), P(None, "y"), P()), check_vma=False)
    def mixed(a, b):
        rows = lax.all_gather(a, ("y", "x"), axis=0, tiled=True)
        part = lax.psum_scatter(rows * (1 + lax.axis_index("x")), ("x", "y"), scatter_dimension=0, tiled=True)
        turned = lax.all_to_all(b, "y", split_axis=0, concat_axis=1, tiled=True)
        moved = lax.ppermute(b, "y", [(i, (i + 1) % 4) for i in range(4)])
        top = lax.pmax(a.sum(), ("x", "y")) - lax.pmin(turned.sum(), ("x", "y"))
        return part, moved + lax.pmean(turned.mean(), "y"), top

    return lambda a, b: mixed(jnp.sin(a), b * 2), (weights(16, 3), weights(4, 8, seed=1))


def one_axis():
    """Per device along one axis of two, the other left to the plan."""

    @region(ins=(P("y"), P()), outs=P("y"), axis_names={"y"})
    def layer(x, w):
        return jnp.tanh(x @ w) / lax.psum(jnp.sum(x * x), "y")

    return lambda x, w: jax.grad(lambda w: layer(x, w).sum())(w), (weights(8, 6), weights(6, 4, seed=1))


def in_a_loop():
    """A ring of neighbours inside a scan inside a scan."""

    @region(ins=(P("x", "y"), P("y")), outs=P("x", "y"))
    def turn(x, w):
        def one(carry, _):
            return lax.ppermute(carry, "y", [(i, (i + 1) % 4) for i in range(4)]) * w[0], carry.sum()

        x, sums = lax.scan(one, x, None, length=3)
        return x + lax.psum(sums.sum(), "x")

    def step(x, w):
        return lax.scan(lambda c, w: (jnp.sin(turn(c, w)), c.sum()), x, w)

    return step, (weights(2, 8), weights(3, 4, seed=1))


def unnamed_axis():
    """An axis that no spec names, and that the body reads."""

    @region(ins=P("x"), outs=P("x"), check_vma=False)
    def shifted(x):
        return lax.psum(x * lax.axis_index("y"), "y") + lax.axis_index("x")

    return lambda x: shifted(x * x), (weights(4, 3),)


def keys():
    """Each device draws for itself from a key, and integers and booleans pass."""

    @region(ins=(P(), P("y")), outs=(P("y"), P(("x", "y"))), check_vma=False)
    def noisy(key, x):
        mine = jax.random.fold_in(key, lax.axis_index(("x", "y")))
        count = lax.psum((x > 0).astype(jnp.int32), "x")
        return count, jax.random.normal(mine, x.shape) > 0

    return lambda key, x: noisy(key, x + 1), (jax.random.key(7), weights(8, 3))


def chosen():
    """A region in one branch, a checkpointed one after it."""

    @region(ins=P("x", "y"), outs=P("x", "y"))
    def normed(x):
        return x / jnp.sqrt(lax.psum((x * x).sum(-1, keepdims=True), "y"))

    def loss(x, on):
        y = lax.cond(on, lambda x: normed(x), lambda x: x * 2, x)
        return jnp.sum(jax.checkpoint(normed)(y) * jnp.arange(8.0))

    return partial(jax.grad(loss), on=True), (weights(4, 8),)


def by_pairs():
    """A shift that not every device takes part in."""

    @region(ins=P(None, "y"), outs=P(None, "y"))
    def next_only(x):
        return lax.ppermute(x, "y", [(0, 1), (2, 3)])

    return lambda x: next_only(x) - x, (weights(3, 8),)


def around_both():
    """A ring over both axes."""

    @region(ins=P(("x", "y")), outs=P(("x", "y")))
    def turned(x):
        return lax.ppermute(x, ("x", "y"), [(i, (i + 1) % 8) for i in range(8)])

    return lambda x: turned(jnp.sin(x)) - x, (weights(16, 3),)


STEPS = {f.__name__: f for f in (column_row, every_collective, one_axis, in_a_loop, unnamed_axis, keys, chosen, by_pairs, around_both)}
