"""Programs with loops and branches, in dimensions that divide by 2, 3, 4 and 8; what they return is compared leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

N = 24
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / 5)


def _descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def _layers(remat: bool = False, reverse: bool = False, unroll: int = 1) -> Case:
    """A stack of layers as one scan, weights stacked on a leading dimension."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
            h = h + jnp.tanh(h @ w["a"] + w["b"]) @ w["c"]
            return h, jnp.mean(h, -1)

        h, means = lax.scan(jax.checkpoint(layer) if remat else layer, x, params, reverse=reverse, unroll=unroll)
        return jnp.sum(h**2) + jnp.sum(means)

    return _descent(loss), ({"a": _normal(1, 4, N, 48), "b": _normal(2, 4, 48), "c": _normal(3, 4, 48, N)}, _normal(4, 12, N))


def recurrent() -> Case:
    """A cell with weights from outside the loop: their gradients are carried back through it."""

    def loss(params: Any, xs: jax.Array) -> jax.Array:
        def cell(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, o, g = jnp.split(x @ params["w"] + h @ params["u"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((xs.shape[1], N), xs.dtype)
        (h, _), hs = lax.scan(cell, (zero, zero), xs)
        return jnp.mean(hs**2) + jnp.sum(h)

    return _descent(loss), ({"w": _normal(1, 8, 4 * N), "u": _normal(2, N, 4 * N), "b": _normal(3, 4 * N)}, _normal(4, 6, 12, 8))


def nested() -> Case:
    """A scan in a scan, both with gradients."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def inner(h: jax.Array, row: jax.Array) -> Any:
            return jnp.tanh(h * row), jnp.sum(h)

        def outer(h: jax.Array, rows: jax.Array) -> Any:
            h, sums = lax.scan(inner, h, rows)
            return h @ rows.T[:, :1] * jnp.ones((1, N)), sums

        h, sums = lax.scan(outer, x, w)
        return jnp.sum(h) + jnp.sum(sums**2)

    return _descent(loss), (_normal(1, 3, 4, N), _normal(2, 12, N))


def dynamic() -> Case:
    """A loop that ends when its values are large enough, with a product inside of body and test."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def goes_on(state: Any) -> jax.Array:
            n, h = state
            return (n < 9) & (jnp.sum(jnp.abs(h @ w)) < 400.0)

        def body(state: Any) -> Any:
            n, h = state
            return n + 1, h @ w + 1.5 * h + 0.1

        return lax.while_loop(goes_on, body, (0, x))

    return step, (_normal(1, N, N), _normal(2, 12, N))


def counted() -> Case:
    """`fori_loop` with bounds known and not known, and an array updated at the loop's index."""

    def step(w: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        a = lax.fori_loop(0, 3, lambda i, h: h @ w + i, x)
        b = lax.fori_loop(0, n, lambda i, h: jnp.sin(h) + a, x)
        c = lax.fori_loop(0, 4, lambda i, h: h.at[i].set(b.sum(0) * i), x)
        return a, b, c

    return step, (_normal(1, N, N), _normal(2, 12, N), jnp.int32(5))


def branches() -> Case:
    """Two and three branches, with gradients, outer values, and branches that give literals or what they were given."""

    def loss(w: jax.Array, x: jax.Array, k: jax.Array) -> jax.Array:
        h = lax.cond(jnp.sum(x) > 0, lambda h: h @ w, lambda h: h * 2.0, x)
        h = lax.switch(k, [lambda h: jnp.zeros_like(h), lambda h: h, lambda h: jnp.tanh(h @ w)], h)
        h = h + lax.cond(k > 1, lambda: 1.0, lambda: jnp.sum(w))
        return jnp.sum(h**2)

    return _descent(loss), (_normal(1, N, N), _normal(2, 12, N), jnp.int32(2))


def branch_in_loop() -> Case:
    """A branch inside of a scan inside of a branch, and a loop inside of it all."""

    def step(w: jax.Array, x: jax.Array, flags: jax.Array) -> Any:
        def one(h: jax.Array, flag: jax.Array) -> Any:
            h = lax.cond(flag, lambda h: h @ w, lambda h: lax.fori_loop(0, 2, lambda i, a: a * 0.5, h), h)
            return h, jnp.max(h, 0)

        return lax.cond(jnp.any(flags), lambda: lax.scan(one, x, flags), lambda: (x, jnp.zeros((flags.shape[0], N), x.dtype)))

    return step, (_normal(1, N, N), _normal(2, 12, N), jnp.array([True, False, True, True]))


def odd_carries() -> Case:
    """Carries of every kind: swapped, passed through, counters, flags, keys, complex numbers, literals stacked."""

    def step(x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def body(state: Any, _: None) -> Any:
            a, b, fixed, n, flag, key, z = state
            key, now = jax.random.split(key)
            noise = jax.random.normal(now, a.shape, a.dtype)
            z = z * (1 + 0.5j) + a.T
            return (b + noise, a * fixed, fixed, n + 1, ~flag, key, z), (1.0, n, jnp.sum(a, 0))

        return lax.scan(body, (x, y, x + 1, 0, True, key, x * 1j), None, length=3)

    return step, (_normal(1, N, N), _normal(2, N, N), jax.random.key(0))


def mapped() -> Case:
    """`lax.map`, a scan of one step, one of integers from outside, and a cumulative product by scan."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        a = lax.map(lambda row: jnp.sort(row @ w), x)
        b, _ = lax.scan(lambda h, v: (h * v, None), jnp.ones(N, x.dtype), x[:1])
        c = lax.scan(lambda h, v: (h * v, h), x[0], x)
        d = lax.scan(lambda h, i: (h + x[i], None), jnp.zeros(N, x.dtype), jnp.arange(4))[0]
        return a, b, c, d

    return step, (_normal(1, N, N), _normal(2, 12, N))


def overwritten() -> Case:
    """A carried value that no iteration reads, and one that only the test reads."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        last, _ = lax.scan(lambda _, v: (v @ w, None), jnp.zeros((N, N), x.dtype), x)
        n, h, gone = lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] @ w, s[1] * 2), (0, last, last))
        return n, h, gone

    return step, (_normal(1, N, N), _normal(2, 3, N, N))


def masked_decay() -> Case:
    """A custom derivative and a mask made inside the loop."""

    @jax.custom_vjp
    def soft(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    soft.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * 0.5 * x,))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, v: jax.Array) -> Any:
            mask = jnp.tril(jnp.ones((N, N), h.dtype))
            return soft(h @ (v * mask)), None

        return jnp.sum(lax.scan(body, x, w)[0])

    return _descent(loss), (_normal(1, 3, N, N), _normal(2, 12, N))


REGIONS: dict[str, Callable[[], Case]] = {
    "layers": _layers,
    "layers_remat": partial(_layers, remat=True),
    "layers_reverse": partial(_layers, reverse=True),
    "layers_unrolled": partial(_layers, unroll=2),
    "recurrent": recurrent,
    "nested": nested,
    "dynamic": dynamic,
    "counted": counted,
    "branches": branches,
    "branch_in_loop": branch_in_loop,
    "odd_carries": odd_carries,
    "mapped": mapped,
    "overwritten": overwritten,
    "masked_decay": masked_decay,
}
