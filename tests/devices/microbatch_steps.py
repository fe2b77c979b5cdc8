"""Losses, optimisers and steps that a batch in microbatches must leave as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

B, D = 16, 8
SGD = optax.sgd(0.1)


def weights(seed=0, layers=2):
    keys = jax.random.split(jax.random.key(seed), layers)
    return [jax.random.normal(k, (D, D), float) * 0.5 for k in keys]


def batch(seed=1, n=B):
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    mask = jnp.asarray(np.random.default_rng(seed).integers(0, 2, n), float).at[: n // 4].set(0)  # the first microbatch of four has none
    return {"x": jax.random.normal(a, (n, D), float), "y": jax.random.normal(b, (n, D), float), "mask": mask}


def forward(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def errors(ws, b):
    return jnp.sum((forward(ws, b["x"]) - b["y"]) ** 2, -1)


def trained(loss, tx=SGD, layers=2):
    """A step of a loss `(weights, batch) -> value` or `(value, metrics)`, and its state."""

    def step(state, b):
        ws, opt = state
        found, grads = jax.value_and_grad(lambda w: _pair(loss(w, b)), has_aux=True)(ws)
        updates, opt = tx.update(grads, opt, ws)
        return (optax.apply_updates(ws, updates), opt), found

    ws = weights(layers=layers)
    return step, (ws, tx.init(ws))


def _pair(found):
    return found if isinstance(found, tuple) else (found, {})


def mean(ws, b):
    return jnp.mean(errors(ws, b))


def total(ws, b):
    return jnp.sum(errors(ws, b))


def weighted(ws, b):
    """A mean over what the mask leaves: its sum couples the examples, and is known beforehand."""
    return jnp.sum(errors(ws, b) * b["mask"]) / jnp.sum(b["mask"])


def regularised(ws, b):
    return mean(ws, b) + 0.01 * sum(jnp.sum(w**2) for w in ws)


def two_losses(ws, b):
    return mean(ws, b) + 0.3 * weighted(ws[::-1], b)


def tied(ws, b):
    h = jnp.tanh(b["x"] @ ws[0])
    return jnp.mean((h @ ws[0].T - b["y"]) ** 2)


def scanned(ws, b):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b["x"], jnp.stack(ws))
    return jnp.mean((x - b["y"]) ** 2)


def checkpointed(ws, b):
    x = b["x"]
    for w in ws:
        x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w) @ w.T))(w, x)
    return jnp.mean((x - b["y"]) ** 2)


def measured(ws, b):
    """Metrics of every kind."""
    e = errors(ws, b)
    aux = {
        "count": jnp.sum(b["mask"]),
        "largest": jnp.max(e),
        "smallest": jnp.min(e),
        "any": jnp.any(e > 3.0),
        "all": jnp.all(e > 0.1),
        "each": e,
        "where": jnp.argmax(e),
        "perplexity": jnp.exp(jnp.mean(e)),
        "rms": jnp.sqrt(jnp.mean(e**2)),
        "constant": jnp.float32(3),
        "median": jnp.median(e),
        "by feature": jnp.mean(forward(ws, b["x"]), 0).T,
        "columns": forward(ws, b["x"]).T,
        "weights": sum(jnp.sum(w) for w in ws),
    }
    return jnp.mean(e), aux


def every_other(ws):
    """Labels by which every second weight is kept as it is."""
    return ["train", "keep"] * (len(ws) // 2)


OPTIMIZERS = {
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "frozen": optax.multi_transform({"train": optax.adam(1e-2), "keep": optax.set_to_zero()}, every_other),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "average": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def dropout(layers=2):
    """A mask after each layer but the last, and noise of the whole batch's shape."""

    def step(state, b):
        ws, key = state
        key, now = jax.random.split(key)

        def loss(ws):
            h = b["x"]
            for n, w in enumerate(ws[:-1]):
                h = jnp.tanh(h @ w)
                h = jnp.where(jax.random.bernoulli(jax.random.fold_in(now, n), 0.5, h.shape), 2 * h, 0.0)
            noise = jax.random.normal(jax.random.fold_in(now, len(ws)), (B, D), float)
            return jnp.mean((h @ ws[-1] + 0.1 * noise - b["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(ws)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), key), value

    return step, (weights(layers=layers), jax.random.key(7)), batch()


def scaled(layers=2):
    """A loss scaled up, and the scale down where a gradient is not finite."""

    def step(state, b):
        ws, scale = state
        value, grads = jax.value_and_grad(lambda w: scale * mean(w, b))(ws)
        grads = jax.tree.map(lambda g: g / scale, grads)
        fine = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
        new = jax.tree.map(lambda w, g: jnp.where(fine, w - 0.1 * g, w), ws, grads)
        return (new, jnp.where(fine, scale * 1.5, scale / 2)), value / scale

    return step, (weights(layers=layers), jnp.asarray(1024.0, float)), batch()


def averaged(layers=4):
    """A moving average of the weights beside them; the step gives a constant and an argument back among its metrics."""

    def step(state, b):
        ws, average = state
        value, grads = jax.value_and_grad(mean)(ws, b)
        ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)
        average = jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, ws)
        return (ws, average), {"loss": value, "rate": jnp.float32(0.1), "given": b["mask"], "largest": jnp.max(b["x"])}

    return step, (weights(layers=layers), weights(layers=layers)), batch()


def recurrent():
    """A scan over time whose carry is cut along the batch; examples stand second."""

    def step(w, b):
        def loss(w):
            def cell(h, x):
                return jnp.tanh(x @ w + h), jnp.sum(h)

            h, sums = jax.lax.scan(cell, jnp.zeros((B, D)), jnp.swapaxes(b["x"], 0, 1))
            return jnp.mean((h - b["y"]) ** 2) + 1e-3 * jnp.sum(sums)

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    x = jax.random.normal(jax.random.key(0), (B, 5, D), float)
    return step, weights()[0], {"x": x, "y": batch()["y"]}


def embedded():
    """An embedding that is the head too, and a branch that the weights decide."""

    def step(state, b):
        table, w = state

        def loss(table, w):
            x = table[b["tokens"]]
            x = jax.lax.cond(jnp.sum(w) > 0, lambda x: jnp.tanh(x @ w), lambda x: x * 2, x)
            logits = x @ table.T
            return optax.softmax_cross_entropy_with_integer_labels(logits, b["tokens"]).mean()

        value, grads = jax.value_and_grad(loss, (0, 1))(table, w)
        return (table - 0.1 * grads[0], w - 0.1 * grads[1]), value

    tokens = jax.random.randint(jax.random.key(0), (B, 6), 0, 32)
    state = jax.random.normal(jax.random.key(1), (32, D), float), weights()[0]
    return step, state, {"tokens": tokens}
