"""Small steps of the kinds that parallelising tools are known to get wrong: one program each, in float64 unless it is about dtypes.

Where dtypes are narrow, all numbers are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) / shape[0] ** 0.5)


def integers(seed: int, high: int, *shape: int, low: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def descent(loss: Callable[..., Any], rate: float = 0.1) -> Callable[..., Any]:
    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value

    return step


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def uneven_vocabulary() -> Case:
    """37 words, which nothing divides, behind 24 features, which much does."""

    def loss(p: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(jax.nn.gelu(p["table"][ids]) @ p["head"] + p["bias"], labels)

    params = {"table": normal(0, 37, 24), "head": normal(1, 24, 37), "bias": normal(2, 37)}
    return descent(loss), (params, integers(3, 37, 8, 6), integers(4, 37, 8, 6))


def tied_table() -> Case:
    """One table reads the words and writes the logits: its gradient comes from a scatter and from a product."""

    def loss(p: Any, ids: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jnp.tanh(p["table"][ids] @ p["w"])
        return cross_entropy(hidden @ p["table"].T, labels)

    return descent(loss), ({"table": normal(0, 24, 16), "w": normal(1, 16, 16)}, integers(2, 24, 8, 3), integers(3, 24, 8, 3))


def dropout() -> Case:
    """Masks from a key that the state carries, shown as they fell."""

    def loss(p: Any, key: jax.Array, x: jax.Array) -> Any:
        first, second = jax.random.split(key)
        kept = jax.random.bernoulli(first, 0.7, (8, 24))
        hidden = jnp.where(kept, jnp.tanh(x @ p["w"]) / 0.7, 0)
        noise = jax.random.normal(second, hidden.shape)
        return jnp.mean((hidden + 0.1 * noise) ** 2), kept

    def step(params: Any, key: jax.Array, x: jax.Array) -> Any:
        key, mine = jax.random.split(key)
        grads, kept = jax.grad(loss, has_aux=True)(params, mine, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), key, kept

    return step, ({"w": normal(0, 16, 24)}, jax.random.key(5), normal(1, 8, 16))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def rounded(x: jax.Array, levels: int, labels: jax.Array) -> jax.Array:
    return jnp.round(x * levels) / levels + labels[:, None]


rounded.defvjp(
    lambda x, levels, labels: (rounded(x, levels, labels), (x, labels)),
    lambda levels, saved, g: (g * (jnp.abs(saved[0]) < 1) * levels, np.zeros(saved[1].shape, jax.dtypes.float0)),
)


def rounding_by_hand() -> Case:
    """A derivative of the user's own, past an argument of integers that has none."""

    def loss(p: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(rounded(x @ p["w"], 4, labels) ** 2)

    return descent(loss, 0.001), ({"w": normal(0, 12, 8)}, normal(1, 16, 12), integers(2, 3, 16))


def kept_by_name() -> Case:
    """A checkpoint that keeps what bears one name."""

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        inner = checkpoint_name(jnp.tanh(x @ w), "inner")
        return x + jnp.sin(checkpoint_name(inner @ w.T, "outer"))

    policy = jax.checkpoint_policies.save_only_these_names("outer")

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.checkpoint(block, policy=policy)(w, x)
        return jnp.mean(x**2)

    return descent(loss), ([normal(0, 12, 24), normal(1, 12, 24)], normal(2, 16, 12))


def batch_statistics() -> Case:
    """Convolution and normalisation by the statistics of the whole batch, running ones in the state."""

    def forward(p: Any, stats: Any, x: jax.Array) -> Any:
        y = lax.conv_general_dilated(x, p["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, var = y.mean((0, 1, 2)), y.var((0, 1, 2))
        stats = jax.tree.map(lambda s, v: 0.9 * s + 0.1 * v, stats, {"mean": mean, "var": var})
        return jax.nn.relu((y - mean) * lax.rsqrt(var + 1e-3) * p["scale"]).mean((1, 2)) @ p["w"], stats

    def step(p: Any, stats: Any, x: jax.Array, t: jax.Array) -> Any:
        def loss(p: Any) -> Any:
            y, new = forward(p, stats, x)
            return jnp.mean((y - t) ** 2), new

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), stats, value

    params = {"kernel": normal(0, 3, 3, 3, 8), "scale": jnp.ones(8), "w": normal(1, 8, 4)}
    return step, (params, {"mean": jnp.zeros(8), "var": jnp.ones(8)}, normal(2, 8, 6, 6, 3), normal(3, 8, 4))


def repeated_words() -> Case:
    """The gradient of a lookup where most words recur, in whole numbers."""

    def step(table: jax.Array, ids: jax.Array) -> Any:
        count = jnp.zeros(table.shape[0], jnp.int32).at[ids.ravel()].add(1)
        grads = jax.grad(lambda t: jnp.sum(t[ids] * jnp.arange(6.0)[None, :, None]))(table)
        return table - grads, count, jnp.max(ids)

    return step, (jnp.round(8 * normal(0, 24, 8)), integers(1, 5, 16, 6))


def routed_experts() -> Case:
    """Two of six experts for each word, places counted over the whole batch, words beyond capacity dropped."""

    def loss(p: Any, x: jax.Array) -> Any:
        gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
        hot = jax.nn.one_hot(chosen, 6)
        place = jnp.cumsum(hot.reshape(-1, 6), 0).reshape(hot.shape) - 1
        fits = (place < 6) * hot
        slots = jax.nn.one_hot(jnp.sum(place * hot, -1).astype(jnp.int32), 6)
        send = jnp.einsum("bke,bkc->bec", fits, slots)
        given = jnp.einsum("bec,bd->ecd", send, x)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", given, p["up"])), p["down"])
        mixed = jnp.einsum("bke,bkc,bk->bec", fits, slots, gates)
        return jnp.mean((x + jnp.einsum("bec,ecd->bd", mixed, made)) ** 2), jnp.sum(hot - fits).astype(jnp.int32)

    def step(p: Any, x: jax.Array) -> Any:
        (value, dropped), grads = jax.value_and_grad(loss, has_aux=True)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value, dropped

    return step, ({"router": normal(0, 8, 6), "up": normal(1, 6, 8, 16), "down": normal(2, 6, 16, 8)}, normal(3, 24, 8))


def _softmax_kernel(x: Any, out: Any) -> None:
    e = jnp.exp(x[...] - jnp.max(x[...], axis=-1, keepdims=True))
    out[...] = e / jnp.sum(e, axis=-1, keepdims=True)


@jax.custom_vjp
def kernel_softmax(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_softmax_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


kernel_softmax.defvjp(
    lambda x: (kernel_softmax(x), kernel_softmax(x)), lambda y, g: (y * (g - jnp.sum(g * y, axis=-1, keepdims=True)),)
)


def own_kernel() -> Case:
    """A Pallas kernel with a derivative by hand."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(kernel_softmax(x @ p["w"]) * jnp.arange(8.0))

    return descent(loss), ({"w": normal(0, 12, 8)}, normal(1, 16, 12))


def groups_of_parameters() -> Case:
    """An optimiser per group, weight decay masked, and steps that are skipped where a gradient is not finite."""
    decay = optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    groups = {"body": optax.chain(decay, optax.adam(0.01)), "head": optax.sgd(0.1)}
    optimizer = optax.apply_if_finite(optax.multi_transform(groups, {"w": "body", "b": "body", "head": "head"}), 2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": normal(0, 12, 24), "b": normal(1, 24), "head": normal(2, 24, 6)}
    return step, (params, optimizer.init(params), normal(3, 8, 12))


def scaled_loss() -> Case:
    """bfloat16 within, a loss scale in the state, and a step that is taken only if everything is finite."""

    def step(params: Any, scale: jax.Array, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            y = x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)
            return jnp.sum(y.astype(jnp.float32)) * scale

        grads = jax.grad(loss)(params) / scale
        finite = jnp.all(jnp.isfinite(grads))
        params = jnp.where(finite, params - grads, params)
        return params, jnp.where(finite, scale * 2, scale / 2), finite

    weights = integers(0, 3, 8, 12, low=-2).astype(jnp.float32)
    return step, (weights, jnp.float32(4), integers(1, 3, 16, 8, low=-2).astype(jnp.float32))


def long_narrow_sum() -> Case:
    """A mean over many bfloat16 numbers, whose sum is beyond what bfloat16 counts."""

    def step(x: jax.Array) -> Any:
        return x.sum(0), x.mean(), x.max(0), jnp.cumsum(x[:8], 1)

    return step, (integers(0, 3, 768, 8).astype(jnp.bfloat16),)


def small_adapters() -> Case:
    """A frozen matrix and two slim ones that learn."""

    def loss(adapter: Any, frozen: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ frozen + (x @ adapter["a"]) @ adapter["b"]) ** 2)

    return descent(loss), ({"a": normal(0, 24, 2), "b": normal(1, 2, 24)}, normal(2, 24, 24), normal(3, 8, 24))


def many_answers() -> Case:
    """Losses by example, a count, an average in the state, and identifiers that only pass through."""

    def step(params: Any, average: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = batch["x"] @ p["w"]
            each = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
            return each.sum(), (each, jnp.sum(jnp.argmax(logits, -1) == batch["y"]))

        grads, (each, right) = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return params, average, {"each": each, "right": right, "uid": batch["uid"], "seen": 7}

    params = {"w": normal(0, 12, 8)}
    return step, (params, params, {"x": normal(1, 24, 12), "y": integers(2, 8, 24), "uid": jnp.arange(24)})


def decoding() -> Case:
    """One word at a time into a cache that is written at a position known at run time."""

    def step(params: Any, cache: Any, word: jax.Array) -> Any:
        x = params["table"][word]
        at = cache["at"]
        k, v = (lax.dynamic_update_slice_in_dim(cache[n], (x @ params[n])[:, None], at, 1) for n in "kv")
        scores = jnp.where(jnp.arange(8) <= at, jnp.einsum("bd,bsd->bs", x, k), -jnp.inf)
        logits = jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), v) @ params["table"].T
        return {"k": k, "v": v, "at": at + 1}, jnp.argmax(logits, -1).astype(jnp.int32), logits

    params = {"table": normal(0, 24, 16), "k": normal(1, 16, 16), "v": normal(2, 16, 16)}
    return step, (params, {"k": normal(3, 8, 8, 16), "v": normal(4, 8, 8, 16), "at": jnp.int32(3)}, integers(5, 24, 8))


def two_players() -> Case:
    """Two gradients in one step, each with the other's parameters fixed."""

    def step(made: Any, judged: Any, z: jax.Array, real: jax.Array) -> Any:
        make = lambda g: jnp.tanh(z @ g)  # noqa: E731
        judge = lambda d, x: jax.nn.softplus(x @ d).mean()  # noqa: E731
        down = jax.grad(lambda d: judge(d, lax.stop_gradient(make(made))) - judge(d, real))(judged)
        up = jax.grad(lambda g: -judge(judged - 0.1 * down, make(g)))(made)
        return made - 0.1 * up, judged - 0.1 * down

    return step, (normal(0, 6, 12), normal(1, 12, 1), normal(2, 16, 6), normal(3, 16, 12))


def masked_mean() -> Case:
    """A mean over as many words as there are, not over as many as there could be."""

    def loss(w: jax.Array, x: jax.Array, mask: jax.Array) -> jax.Array:
        each = jnp.sum(jnp.tanh(x @ w) ** 2, -1)
        return jnp.sum(each * mask) / jnp.maximum(jnp.sum(mask), 1)

    mask = (jnp.arange(6)[None] < integers(2, 7, 16)[:, None]).astype(float)
    return descent(loss), (normal(0, 8, 12), normal(1, 16, 6, 8), mask)


def captured() -> Case:
    """A constant of the program's own, larger than its arguments."""
    basis = np.random.default_rng(0).standard_normal((24, 48))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ basis @ w) ** 2) + 0.1 * jnp.sum(jnp.asarray(basis)[:, 0] ** 2)

    return descent(loss), (normal(1, 48, 6), normal(2, 8, 24))


def one_long_sequence() -> Case:
    """Attention over one sequence, block by block, with positions and a causal mask."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            q, k, v = (x @ w[n] for n in "qkv")

            def block(carry: Any, at: jax.Array) -> Any:
                rows = lax.dynamic_slice_in_dim(q, at * 8, 8, 1)
                s = jnp.einsum("bqd,bkd->bqk", rows, k)
                s = jnp.where(at * 8 + jnp.arange(8)[:, None] >= jnp.arange(24)[None], s, -1e30)
                return carry + 1, jax.nn.softmax(s) @ v

            _, out = lax.scan(block, 0, jnp.arange(3))
            return jnp.sum(out**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    return step, ({n: normal(i, 8, 8) for i, n in enumerate("qkv")}, normal(3, 1, 24, 8))


def six_heads() -> Case:
    """24 columns as six heads of four: cut by two or three, not by eight."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        q, k = ((x @ p[n]).reshape(2, 6, 6, 4).swapaxes(1, 2) for n in "qk")
        mixed = jax.nn.softmax(q @ k.swapaxes(2, 3)) @ k
        return jnp.sum((mixed.swapaxes(1, 2).reshape(12, 24) @ p["o"]) ** 2)

    return descent(loss), ({n: normal(i, 24, 24) for i, n in enumerate("qko")}, normal(3, 2, 6, 24))


def gradients_alone() -> Case:
    """No update; a parameter and a part of the batch that nothing reads."""

    def step(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jnp.mean(jnp.tanh(batch["x"] @ p["w"]) ** 2))(params)

    return step, ({"w": normal(0, 12, 8), "idle": normal(1, 5)}, {"x": normal(2, 8, 12), "unread": integers(3, 9, 7)})


def turned_about() -> Case:
    """Products along words and along channels in turn, with transposes between, and a Gram matrix."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh((x.swapaxes(1, 2) @ p["words"]).swapaxes(1, 2) @ p["channels"])
        flat = y.transpose(0, 2, 1).reshape(-1, 6)
        return jnp.sum((flat.T @ flat) ** 2) + jnp.sum(jnp.moveaxis(y, 0, -1)[::-1])

    return descent(loss, 0.01), ({"words": normal(0, 6, 6), "channels": normal(1, 12, 12)}, normal(2, 4, 6, 12))


def factorised() -> Case:
    """Linear solves for each row, and an update made orthonormal."""

    def step(w: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            spd = jnp.einsum("bij,bkj->bik", a @ w, a @ w) + 3 * jnp.eye(4)
            half = jnp.linalg.cholesky(spd)
            x = jax.scipy.linalg.solve_triangular(half, b[..., None], lower=True)[..., 0]
            return jnp.sum(x**2) + jnp.sum(jnp.linalg.solve(spd, b[..., None]) ** 2)

        q, r = jnp.linalg.qr(jax.grad(loss)(w))
        return w - 0.1 * q * jnp.sign(jnp.diagonal(r)), jnp.linalg.eigvalsh(w + w.T)

    return step, (normal(0, 4, 4), normal(1, 8, 4, 4), normal(2, 8, 4))


def unequal_layers() -> Case:
    """A convolution, a wide layer, a recurrent one and a slim head, none like another."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")))
        wide = jax.nn.gelu(y.reshape(8, -1) @ p["wide"])
        last, _ = lax.scan(lambda h, t: (jnp.tanh(h @ p["turn"] + t), None), jnp.zeros((8, 6)), y.swapaxes(0, 1))
        return jnp.mean((jnp.concatenate([wide, last], 1) @ p["head"]) ** 2)

    shapes = {"kernel": (3, 4, 6), "wide": (36, 24), "turn": (6, 6), "head": (30, 3)}
    return descent(loss), ({n: normal(i, *s) for i, (n, s) in enumerate(shapes.items())}, normal(9, 8, 6, 4))


STEPS: dict[str, Callable[[], Case]] = {
    f.__name__: f
    for f in (
        *(uneven_vocabulary, tied_table, dropout, rounding_by_hand, kept_by_name, batch_statistics, repeated_words, routed_experts),
        *(own_kernel, groups_of_parameters, scaled_loss, long_narrow_sum, small_adapters, many_answers, decoding, two_players),
        *(masked_mean, captured, one_long_sequence, six_heads, gradients_alone, turned_about, factorised, unequal_layers),
    )
}
