"""T5: encoder and decoder with a relative position bias that all layers of a stack share (Raffel et al. 2020, version 1.0)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers
from autopar.models.layers import Array, at_least_float32, attend, causal_mask, cross_entropy

PAD = 0


@dataclass(frozen=True, kw_only=True)
class T5Config(Config):
    """`layers` in the encoder and as many in the decoder; attention is `heads * head_dim` wide, which need not be `hidden`."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int = 64
    seq: int = 512
    target_seq: int = 128
    vocab: int = 32128
    buckets: int = 32
    max_distance: int = 128


def bucket_of(distance: Array, buckets: int, max_distance: int, two_sided: bool, dtype: Any) -> Array:
    """Signed distances `key - query` -> bucket numbers: one each for the nearer half, then logarithmically wider ones.

    Two-sided buckets are split between past and future; one-sided ones see the past only. `dtype` is that of the logarithm.
    """
    start = jnp.zeros_like(distance)
    if two_sided:
        buckets //= 2
        start = jnp.where(distance > 0, buckets, 0)
    distance = jnp.abs(distance) if two_sided else jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(dtype) / exact) / math.log(max_distance / exact)
    # The small shift keeps a distance that falls on a border in the same bucket however the logarithm is rounded.
    far = jnp.minimum(exact + (ratio * (buckets - exact) + 1e-4).astype(distance.dtype), buckets - 1)
    return start + jnp.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """The bias of attention scores, `(1 h length length)`, looked up by distance."""

    config: T5Config
    two_sided: bool

    @nn.compact
    def __call__(self, length: int) -> Array:
        c = self.config
        places = jnp.arange(length, dtype=jnp.int32)
        precise = at_least_float32(c.dtype)
        buckets = bucket_of(places[None, :] - places[:, None], c.buckets, c.max_distance, self.two_sided, precise)
        table = nn.Embed(c.buckets, c.heads, dtype=precise, param_dtype=c.param_dtype, name="table")
        return table(buckets).transpose(2, 0, 1)[None]


def norm(c: T5Config, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(**c.dtypes, name=name)


class Attention(nn.Module):
    """Unscaled attention without biases from `x` to `source`, `(b q m), (b k m) -> (b q m)`."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Array, source: Array, *, mask: Array | None = None, bias: Array | None = None) -> Array:
        c = self.config
        width = c.heads * c.head_dim

        def project(y: Array, name: str) -> Array:
            # The paper folds the scale 1/sqrt(head_dim) into the query's initialisation.
            std = c.hidden**-0.5 * (c.head_dim**-0.5 if name == "query" else 1)
            y = nn.Dense(width, use_bias=False, kernel_init=nn.initializers.normal(std), **c.dtypes, name=name)(y)
            return y.reshape(*y.shape[:2], c.heads, c.head_dim)

        y = attend(project(x, "query"), project(source, "key"), project(source, "value"), mask=mask, bias=bias)
        return nn.Dense(c.hidden, use_bias=False, **c.dtypes, name="out")(y.reshape(*x.shape[:2], width))


class FeedForward(nn.Module):
    config: T5Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        hidden = nn.relu(nn.Dense(c.ffn, use_bias=False, **c.dtypes, name="up")(x))
        return nn.Dense(c.hidden, use_bias=False, **c.dtypes, name="down")(hidden)


class Encoder(nn.Module):
    """`(b s m) -> (b s m)`; padding is not attended to."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        c = self.config
        bias = RelativeBias(c, two_sided=True, name="bias")(x.shape[1])
        for layer in range(c.layers):
            y = norm(c, f"attention_norm_{layer}")(x)
            x = x + Attention(c, name=f"attention_{layer}")(y, y, mask=mask, bias=bias)
            x = x + FeedForward(c, name=f"mlp_{layer}")(norm(c, f"mlp_norm_{layer}")(x))
        return norm(c, "norm")(x)


class Decoder(nn.Module):
    """`(b t m), (b s m) -> (b t m)`, causal in `t`."""

    config: T5Config

    @nn.compact
    def __call__(self, x: Array, encoded: Array, mask: Array) -> Array:
        c = self.config
        bias = RelativeBias(c, two_sided=False, name="bias")(x.shape[1])
        causal = causal_mask(x.shape[1])
        for layer in range(c.layers):
            y = norm(c, f"attention_norm_{layer}")(x)
            x = x + Attention(c, name=f"attention_{layer}")(y, y, mask=causal, bias=bias)
            x = x + Attention(c, name=f"cross_{layer}")(norm(c, f"cross_norm_{layer}")(x), encoded, mask=mask)
            x = x + FeedForward(c, name=f"mlp_{layer}")(norm(c, f"mlp_norm_{layer}")(x))
        return norm(c, "norm")(x)


class T5(nn.Module):
    """Source tokens `(b s)` and shifted targets `(b t)` -> logits `(b t v)`; one embedding for both and for the head."""

    config: T5Config

    @nn.compact
    def __call__(self, source: Array, shifted: Array) -> Array:
        c = self.config
        embed = nn.Embed(c.vocab, c.hidden, embedding_init=nn.initializers.normal(1.0), **c.dtypes, name="embed")
        mask = (source != PAD)[:, None, None, :]
        encoded = Encoder(c, name="encoder")(embed(source), mask)
        decoded = Decoder(c, name="decoder")(embed(shifted), encoded, mask)
        return embed.attend(decoded * c.hidden**-0.5)


def create(config: T5Config, optimizer: optax.GradientTransformation) -> Created:
    model = T5(config)

    def init(key: Array) -> TrainState:
        source, target = (jnp.zeros((1, length), jnp.int32) for length in (config.seq, config.target_seq))
        return TrainState.create(apply_fn=model.apply, params=model.init(key, source, target)["params"], tx=optimizer)

    return init, train_step


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    labels = batch["labels"]
    shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)

    def loss_fn(params: Any) -> tuple[Array, Array]:
        logits = state.apply_fn({"params": params}, batch["tokens"], shifted)
        loss = cross_entropy(logits, labels)
        weight = (labels != PAD).astype(loss.dtype)
        return (loss * weight).sum() / weight.sum(), weight.sum()

    (loss, tokens), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "tokens": tokens}


def inputs(config: T5Config, batch: int) -> dict[str, Input]:
    return {"tokens": integers(config.vocab, batch, config.seq), "labels": integers(config.vocab, batch, config.target_seq)}


T5_PAPER = "Raffel et al. 2020, arXiv:1910.10683, section 3.7; batch 128 and length 512 of section 3.1"

# Span corruption turns 512 source tokens into 114 target tokens, padded to 128 here.
SIZES = {
    "t5-small": Size(T5Config(layers=6, hidden=512, ffn=2048, heads=8), 128, T5_PAPER),
    "t5-base": Size(T5Config(layers=12, hidden=768, ffn=3072, heads=12), 128, T5_PAPER),
    "t5-large": Size(T5Config(layers=24, hidden=1024, ffn=4096, heads=16), 128, T5_PAPER),
    "t5-3b": Size(T5Config(layers=24, hidden=1024, ffn=16384, heads=32, head_dim=128), 128, T5_PAPER),
    "t5-11b": Size(T5Config(layers=24, hidden=1024, ffn=65536, heads=128, head_dim=128), 128, T5_PAPER),
    "t5-tiny": Size(
        T5Config(layers=2, hidden=96, ffn=192, heads=24, head_dim=4, seq=24, target_seq=24, vocab=96, buckets=16, dtype="float32"),
        24,
        "for tests",
    ),
}

FAMILY = Family("t5", SIZES, create, inputs)
