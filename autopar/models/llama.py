"""Llama in flax nnx: RMS norm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023; Llama team 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers, quotient
from autopar.models.fused import fused_attention
from autopar.models.layers import Array, at_least_float32, causal_mask, cross_entropy


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """`heads` query heads share `kv_heads` key and value heads, `groups` to each. `fused=True`: attention is one op (`fused`)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int = 8192
    vocab: int = 128256
    rope_theta: float = 500000.0
    fused: bool = False

    @property
    def head_dim(self) -> int:
        return quotient(self.hidden, self.heads, "hidden over heads")

    @property
    def groups(self) -> int:
        return quotient(self.heads, self.kv_heads, "heads over kv_heads")


def rotate(x: Array, theta: float) -> Array:
    """Rotary embedding of `(b s h d)`: turn each pair `(i, i + d/2)` by `position * theta^(-2i/d)` (Su et al. 2021)."""
    precise = at_least_float32(x.dtype)
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=precise) / half)
    angle = jnp.arange(x.shape[1], dtype=precise)[:, None, None] * frequency
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def linear(c: LlamaConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(0.02)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, **c.dtypes, rngs=rngs)


def norm(c: LlamaConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(c.hidden, epsilon=1e-5, **c.dtypes, rngs=rngs)


class Attention(nnx.Module):
    """Causal grouped-query attention, `(b s m) -> (b s m)`."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.config = c
        self.query = linear(c, c.hidden, c.heads * c.head_dim, rngs)
        self.key = linear(c, c.hidden, c.kv_heads * c.head_dim, rngs)
        self.value = linear(c, c.hidden, c.kv_heads * c.head_dim, rngs)
        self.out = linear(c, c.heads * c.head_dim, c.hidden, rngs)

    def __call__(self, x: Array) -> Array:
        c = self.config
        batch, seq, _ = x.shape
        query = rotate(self.query(x).reshape(batch, seq, c.heads, c.head_dim), c.rope_theta)
        key = rotate(self.key(x).reshape(batch, seq, c.kv_heads, c.head_dim), c.rope_theta)
        value = self.value(x).reshape(batch, seq, c.kv_heads, c.head_dim)
        query = query.reshape(batch, seq, c.kv_heads, c.groups, c.head_dim)
        if c.fused:
            return self.out(fused_attention(query * c.head_dim**-0.5, key, value).reshape(batch, seq, -1))
        scores = jnp.einsum("bqngd,bknd->bngqk", query, key).astype(at_least_float32(c.dtype)) * c.head_dim**-0.5
        scores = jnp.where(causal_mask(seq), scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores).astype(value.dtype)
        return self.out(jnp.einsum("bngqk,bknd->bqngd", weights, value).reshape(batch, seq, -1))


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.gate = linear(c, c.hidden, c.ffn, rngs)
        self.up = linear(c, c.hidden, c.ffn, rngs)
        self.down = linear(c, c.ffn, c.hidden, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        self.attention_norm = norm(c, rngs)
        self.attention = Attention(c, rngs)
        self.mlp_norm = norm(c, rngs)
        self.mlp = SwiGLU(c, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """Tokens `(b s)` -> logits `(b s v)`."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(c.vocab, c.hidden, embedding_init=init, **c.dtypes, rngs=rngs)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.layers)])
        self.norm = norm(c, rngs)
        self.head = linear(c, c.hidden, c.vocab, rngs)

    def __call__(self, tokens: Array) -> Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def create(config: LlamaConfig, optimizer: optax.GradientTransformation) -> Created:
    def split(key: Array) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(Llama(config, nnx.Rngs(key)))

    def init(key: Array) -> dict[str, Any]:
        _, params = split(key)
        return {"params": params, "optimizer": optimizer.init(params)}

    @cache
    def graphdef() -> nnx.GraphDef:
        return jax.eval_shape(lambda: split(jax.random.PRNGKey(0)))[0]

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], Metrics]:
        def loss_fn(params: Any) -> Array:
            model = nnx.merge(graphdef(), params)
            return cross_entropy(model(batch["tokens"]), batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, {"loss": loss}

    return init, train_step


def inputs(config: LlamaConfig, batch: int) -> dict[str, Input]:
    return {"tokens": integers(config.vocab, batch, config.seq), "labels": integers(config.vocab, batch, config.seq)}


LLAMA3 = "Llama team 2024, arXiv:2407.21783, table 3"

# The paper gives a batch for its largest model only: 8M tokens at length 8192 for most of training, 1024 sequences; taken here for all.
SIZES = {
    "llama3-8b": Size(LlamaConfig(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336), 1024, LLAMA3),
    "llama3-70b": Size(LlamaConfig(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672), 1024, LLAMA3),
    "llama-tiny": Size(LlamaConfig(layers=2, hidden=96, heads=24, kv_heads=8, ffn=192, seq=24, vocab=96, dtype="float32"), 24, "for tests"),
}

FAMILY = Family("llama", SIZES, create, inputs, parameters=lambda state: state["params"])
