"""Steps in plain JAX, a few dozen ops each, with dimensions that divide by 2, 3, 4 and 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _normal(random: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape) / shape[0] ** 0.5)


def _descend(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def perceptron() -> Case:
    """Two layers, adamw, clipping by global norm."""
    random = np.random.default_rng(1)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - y) ** 2)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {"w1": _normal(random, 24, 48), "b1": _normal(random, 48), "w2": _normal(random, 48, 24)}
    return step, (params, optimizer.init(params), _normal(random, 24, 24), _normal(random, 24, 24))


def attention() -> Case:
    """One causal layer with its residual."""
    random = np.random.default_rng(2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, params[n]) for n in "qkv")
        scores = jnp.einsum("bhqk,bhsk->bhqs", q, k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mixed = jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ v
        return jnp.sum(jnp.tanh(x + jnp.einsum("bhsk,hkd->bsd", mixed, params["o"])) ** 2)

    params = {n: _normal(random, 24, 24, 3) for n in "qkv"} | {"o": _normal(random, 24, 3, 24)}
    return _descend(loss), (params, _normal(random, 24, 24, 24))


def convolution() -> Case:
    """A strided convolution, batch norm, pooling and a pixel-wise one."""
    random = np.random.default_rng(3)

    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        y = conv(x, params["first"], 2)
        mean, variance = jnp.mean(y, (0, 1, 2)), jnp.var(y, (0, 1, 2))
        y = jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"])
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = conv(y, params["second"], 1).mean((1, 2))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    params = {"first": _normal(random, 3, 3, 3, 24), "scale": jnp.ones(24), "second": _normal(random, 1, 1, 24, 24)}
    return _descend(loss), (params, _normal(random, 24, 8, 8, 3), jnp.asarray(random.integers(0, 24, 24)))


def experts() -> Case:
    """An embedding, each token sent to its best expert, and the head tied to the embedding."""
    random = np.random.default_rng(4)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens]
        gates = jax.nn.softmax(x @ params["gate"])
        best = jnp.argmax(gates, -1)
        chosen = jax.nn.one_hot(best, 24, dtype=x.dtype)
        place = jnp.cumsum(chosen, 0) * chosen
        sent = jnp.einsum("te,tc,td->ecd", chosen, jax.nn.one_hot(place.sum(-1).astype(int) - 1, 24, dtype=x.dtype), x)
        back = jnp.einsum("ecf,efd,te->td", jax.nn.gelu(jnp.einsum("ecd,edf->ecf", sent, params["up"])), params["down"], chosen)
        logits = (x + back * gates.max(-1, keepdims=True)) @ params["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, 1)).mean()

    params = {
        "embedding": _normal(random, 48, 24),
        "gate": _normal(random, 24, 24),
        "up": _normal(random, 24, 24, 12),
        "down": _normal(random, 24, 12, 24),
    }
    return _descend(loss), (params, jnp.asarray(random.integers(0, 48, 24)))


STEPS: dict[str, Callable[[], Case]] = {f.__name__: f for f in (perceptron, attention, convolution, experts)}
