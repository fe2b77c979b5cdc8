"""Training steps whose layers are a `scan` over stacked weights, for tests of pipelines: every way of writing one that matters."""

from __future__ import annotations

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

D, B = 8, 16
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def weights(layers=4, seed=0):
    r = np.random.default_rng(seed)
    return {
        "embed": r.standard_normal((D, D)),
        "w": 0.5 * r.standard_normal((layers, D, D)),
        "b": 0.1 * r.standard_normal((layers, D)),
        "out": r.standard_normal((D, D)),
    }


def batch(seed=1):
    x, y = np.random.default_rng(seed).standard_normal((2, B, D))
    return {"x": x, "y": y}


def trained(loss, tx=CLIPPED, params=None, layers=4):
    """A step of this loss, which may give metrics beside it, and its arguments."""
    params = weights(layers) if params is None else params

    def step(state, b):
        p, o = state
        (value, metrics), grads = jax.value_and_grad(lambda p: _two(loss(p, b)), has_aux=True)(p)
        updates, o = tx.update(grads, o, p)
        return (optax.apply_updates(p, updates), o), {"loss": value, "metrics": metrics}

    return step, ((params, tx.init(params)), batch())


def _two(found):
    return found if isinstance(found, tuple) else (found, ())


def _layer(h, p):
    return h + jnp.tanh(h @ p["w"] + p["b"])


def _stack(p, *names):
    return {k: p[k] for k in names or ("w", "b")}


def _error(h, p, b):
    return jnp.mean((h @ p["out"] - b["y"]) ** 2)


def plain(p, b):
    h, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), jnp.sin(b["x"] @ p["embed"]), _stack(p))
    return _error(h, p, b)


def backwards(p, b):
    """From the last layer to the first, and three layers of the four in one turn of the loop."""
    h, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), b["x"] @ p["embed"], _stack(p), reverse=True, unroll=3)
    return _error(h, p, b)


def checkpointed(p, b):
    layer = jax.checkpoint(lambda h, q: (_layer(jnp.sin(h), q), None))
    h, _ = jax.lax.scan(layer, b["x"] @ p["embed"], _stack(p))
    return _error(h, p, b)


def carried(p, b):
    """A loss per layer and a count go round beside the activation, and each layer gives a metric."""

    def layer(carry, q):
        h, aux, n = carry
        h = _layer(h, q) * (1 + 0.1 * n)
        return (h, aux + jnp.mean(h**2), n + 1), jnp.sum(jnp.abs(h))

    (h, aux, n), each = jax.lax.scan(layer, (b["x"] @ p["embed"], 0.0, 0), _stack(p))
    return _error(h, p, b) + 0.01 * aux, {"aux": aux, "count": n, "each": each, "last": each[-1]}


def shared(p, b):
    """A weight that all layers read, and a mask."""
    mask = jnp.tril(jnp.ones((D, D)))

    def layer(h, q):
        return _layer(h @ (p["embed"] * mask), q), None

    h, _ = jax.lax.scan(layer, b["x"], _stack(p))
    return _error(h, p, b)


def cast(p, b):
    """Weights that are cast, scaled and regularised before the loop, and a norm of each layer's."""
    q = jax.tree.map(lambda w: (w * 0.9).astype("float32").astype("float64"), _stack(p))
    h, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), b["x"] @ p["embed"], q)
    norms = jnp.sqrt(jnp.sum(p["w"] ** 2, (1, 2)))
    flat = p["w"].reshape(-1)
    return _error(h, p, b) + 1e-3 * jnp.vdot(flat, flat) + 1e-3 * jnp.sum(norms), {"norms": norms, "largest": jnp.max(jnp.abs(p["b"]))}


def summed(p, b):
    """What each layer gives is added up, read by the layer, and given out."""

    def layer(carry, q):
        h, s, t = carry
        t = t + 0.1
        h = _layer(h, q) * jnp.cos(t)
        s = s + h
        return (h, s, t), s

    h = b["x"] @ p["embed"]
    (h, s, _), each = jax.lax.scan(layer, (h, jnp.zeros_like(h), jnp.mean(p["embed"])), _stack(p))
    return _error(h + jnp.sin(s), p, b) + 1e-3 * jnp.mean(each**3)


def within(p, b):
    """Layers stand along the second dimension, as flax' `param_scan_axis=1` has them."""
    q = {"w": jnp.moveaxis(p["w"], 1, 0), "b": jnp.moveaxis(p["b"], 1, 0)}
    h, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), b["x"] @ p["embed"], q)
    return _error(h, p, b)


def twice(p, b):
    """An encoder and a decoder that reads what the encoder gives in each of its layers."""
    e, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), b["x"] @ p["embed"], _stack(p))
    h, _ = jax.lax.scan(lambda h, q: (jnp.tanh(h @ q + e), None), b["y"], p["more"])
    return _error(h, p, b)


def repeated(p, b):
    """No weights of its own in any layer: nothing is stacked."""
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["embed"]), None), b["x"], None, length=4)
    return _error(h, p, b)


def hidden(p, b):
    """The whole stack inside of a checkpoint."""

    @jax.checkpoint
    def stack(h, q):
        return jax.lax.scan(lambda h, q: (_layer(h, q), None), h, q)[0]

    return _error(stack(b["x"] @ p["embed"], _stack(p)), p, b)


def tied(p, b):
    h, _ = jax.lax.scan(lambda h, q: (_layer(h, q), None), b["x"] @ p["embed"], _stack(p))
    return jnp.mean((h @ p["embed"].T - b["y"]) ** 2)


def dropout(layers=4, split=True):
    """A key per layer, from one that goes round with the state."""
    params = weights(layers)

    def loss(p, b, key):
        keys = jax.random.split(key, layers)

        def layer(h, q):
            p, k = q
            return jnp.where(jax.random.bernoulli(k, 0.8, h.shape), _layer(h, p) / 0.8, 0.0), None

        h, _ = jax.lax.scan(layer, b["x"] @ p["embed"], (_stack(p), keys))
        return _error(h, p, b)

    def step(state, b):
        p, o, key = state
        key, mine = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(p, b, mine)
        updates, o = CLIPPED.update(grads, o, p)
        return (optax.apply_updates(p, updates), o, key), {"loss": value}

    return step, ((params, CLIPPED.init(params), jax.random.key(3)), batch())


def gradients(layers=4):
    """No state: gradients come back."""

    def step(p, b):
        return jax.grad(plain)(p, b)

    return step, (weights(layers), batch())


def forward(layers=4):
    """Forward alone, with what each layer gives."""

    def evaluate(p, b):
        h, each = jax.lax.scan(lambda h, q: (_layer(h, q), jnp.mean(h)), b["x"] @ p["embed"], _stack(p))
        return {"loss": _error(h, p, b), "each": each, "h": h}

    return evaluate, (weights(layers), batch())


def _moved():
    p = weights()
    return p | {"w": np.moveaxis(p["w"], 0, 1), "b": np.moveaxis(p["b"], 0, 1)}


def _more():
    return weights() | {"more": 0.4 * np.random.default_rng(5).standard_normal((4, D, D))}


STEPS = {f.__name__: lambda f=f: trained(f) for f in (plain, backwards, checkpointed, carried, shared, summed, cast, tied)}
STEPS |= {"within": lambda: trained(within, params=_moved()), "twice": lambda: trained(twice, params=_more())}
STEPS |= {f.__name__: f for f in (dropout, gradients, forward)}
STEPS |= {f"{f.__name__} {n}": lambda f=f, n=n: trained(f, layers=n) for f, n in ((plain, 5), (carried, 7), (checkpointed, 3))}
STEPS |= {name: lambda tx=tx: trained(plain, tx) for name, tx in {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.lamb(1e-2),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(1e-3),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
}.items()}  # fmt: skip
WHOLE = {f.__name__: lambda f=f: trained(f) for f in (repeated, hidden)}


class Block(flax.linen.Module):
    """A transformer's block as flax scans it: pre-norm attention and perceptron, with dropout."""

    rate: float = 0.1

    @flax.linen.compact
    def __call__(self, x, _):
        wide = {"param_dtype": jnp.float64, "dtype": jnp.float64}
        kept = flax.linen.Dropout(self.rate, deterministic=False)
        norm = flax.linen.LayerNorm(**wide)
        mask = flax.linen.make_causal_mask(x[..., 0])
        x = x + kept(flax.linen.MultiHeadDotProductAttention(2, deterministic=True, **wide)(norm(x), mask=mask))
        h = flax.linen.gelu(flax.linen.Dense(4 * x.shape[-1], **wide)(flax.linen.LayerNorm(**wide)(x)))
        return x + kept(flax.linen.Dense(x.shape[-1], **wide)(h)), None


class Gpt(flax.linen.Module):
    """Tied embeddings around scanned blocks, each under `remat` where asked for; `axis` is where the stacked weights count layers."""

    layers: int = 4
    vocabulary: int = 32
    width: int = 16
    remat: bool = False
    axis: int = 0

    @flax.linen.compact
    def __call__(self, tokens):
        embed = flax.linen.Embed(self.vocabulary, self.width, param_dtype=jnp.float64, dtype=jnp.float64)
        where = self.param("where", flax.linen.initializers.normal(0.02), (tokens.shape[1], self.width), jnp.float64)
        block = flax.linen.remat(Block, prevent_cse=False) if self.remat else Block
        rngs = {"params": True, "dropout": True}
        scanned = flax.linen.scan(block, variable_axes={"params": self.axis}, split_rngs=rngs, length=self.layers)
        x, _ = scanned(name="blocks")(embed(tokens) + where, None)
        return embed.attend(flax.linen.LayerNorm(param_dtype=jnp.float64, dtype=jnp.float64)(x))


def gpt(layers=4, examples=8, length=8, **fields):
    """A GPT of flax linen with adamw, clipping by global norm and dropout, in float64."""
    model = Gpt(layers, **fields)
    tokens = np.random.default_rng(2).integers(0, model.vocabulary, (examples, length + 1))

    def loss(params, key, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt, key = state
        key, mine = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, mine, tokens)
        updates, opt = CLIPPED.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, key), {"loss": value}

    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens[:, :-1])["params"]
    params = jax.tree.map(np.asarray, params)
    return step, ((params, CLIPPED.init(params), jax.random.key(7)), tokens)


STEPS |= {"gpt": gpt, "gpt remat": lambda: gpt(remat=True), "gpt axis 1": lambda: gpt(axis=1)}
