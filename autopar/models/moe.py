"""A decoder whose every other layer is a mixture of experts with top-2 gating and capacity (GShard, Lepikhin et al. 2020).

Routing happens within groups of tokens and is written with one-hot masks and einsums. Letters: `g` group, `s` token of a group,
`e` expert, `c` slot of an expert, `m` model width, `h` expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers, quotient
from autopar.models.layers import Array, Perceptron, SelfAttention, at_least_float32, cross_entropy


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """`group` tokens are routed together; each expert takes `2 * group / experts` of them and drops the rest."""

    layers: int
    hidden: int
    heads: int
    experts: int
    group: int = 2048
    ffn_factor: int = 8
    seq: int = 1024
    vocab: int = 32000
    balance_weight: float = 0.01

    @property
    def head_dim(self) -> int:
        return quotient(self.hidden, self.heads, "hidden over heads")

    @property
    def capacity(self) -> int:
        return max(1, 2 * self.group // self.experts)


def top2(gates: Array, capacity: int) -> tuple[Array, Array]:
    """Gate probabilities `(g s e)` -> combine weights `(g s e c)` and the balance loss, a scalar.

    Every token's first choices queue before any second choice; whoever finds the queue full is dropped. Balance: the mean over
    experts of (share of tokens whose first choice it is) * (mean gate), times the square of their number, so 1 when even.
    """
    experts = gates.shape[-1]
    first = jax.nn.one_hot(jnp.argmax(gates, axis=-1), experts, dtype=jnp.int32)
    second = jax.nn.one_hot(jnp.argmax(jnp.where(first == 1, -1, gates), axis=-1), experts, dtype=jnp.int32)
    balance = jnp.mean(first.astype(gates.dtype).mean(axis=1) * gates.mean(axis=1)) * experts**2

    place_of_first = jnp.cumsum(first, axis=1) - first
    place_of_second = jnp.cumsum(second, axis=1) - second + first.sum(axis=1, keepdims=True)
    kept = [first * (place_of_first < capacity), second * (place_of_second < capacity)]
    weights = [(gates * mask).sum(axis=-1) for mask in kept]
    total = weights[0] + weights[1]
    total = jnp.where(total > 0, total, 1)

    combine = jnp.zeros((*gates.shape, capacity), gates.dtype)
    for mask, place, weight in zip(kept, (place_of_first, place_of_second), weights, strict=True):
        slot = jax.nn.one_hot((place * mask).sum(axis=-1), capacity, dtype=gates.dtype)
        combine += jnp.einsum("gse,gsc->gsec", mask * (weight / total)[..., None], slot)
    return combine, balance


class Experts(nn.Module):
    """`(b s m)` -> `(b s m)` and the balance loss."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        c = self.config
        width = c.ffn_factor * c.hidden
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (c.experts, c.hidden, width), c.param_dtype).astype(c.dtype)
        down = self.param("down", init, (c.experts, width, c.hidden), c.param_dtype).astype(c.dtype)

        groups = quotient(x.shape[0] * x.shape[1], c.group, "tokens of the batch over group")
        tokens = x.reshape(groups, c.group, c.hidden)
        precise = at_least_float32(c.dtype)
        gates = nn.Dense(c.experts, use_bias=False, dtype=precise, param_dtype=c.param_dtype, name="gate")(tokens)
        combine, balance = top2(jax.nn.softmax(gates), c.capacity)

        dispatch = (combine > 0).astype(c.dtype)
        slots = jnp.einsum("gsec,gsm->egcm", dispatch, tokens)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", slots, up))
        done = jnp.einsum("egch,ehm->egcm", hidden, down)
        return jnp.einsum("gsec,egcm->gsm", combine.astype(c.dtype), done).reshape(x.shape), balance


class MoE(nn.Module):
    """Tokens `(b s)` -> logits `(b s v)` and the mean balance loss of the expert layers."""

    config: MoEConfig

    @nn.compact
    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        c = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.hidden, embedding_init=init, **c.dtypes, name="embed")
        positions = self.param("positions", init, (c.seq, c.hidden), c.param_dtype)
        x = embed(tokens) + positions.astype(c.dtype)
        expert_layers = (c.layers + 1) // 2
        balance = jnp.zeros((), at_least_float32(c.dtype))
        for layer in range(c.layers):
            y = nn.LayerNorm(**c.dtypes, name=f"attention_norm_{layer}")(x)
            x = x + SelfAttention(c.heads, c.head_dim, **c.dtypes, name=f"attention_{layer}")(y)
            y = nn.LayerNorm(**c.dtypes, name=f"ffn_norm_{layer}")(x)
            if layer % 2 == 0:
                y, one = Experts(c, name=f"experts_{layer}")(y)
                balance += one / expert_layers
            else:
                y = Perceptron(c.ffn_factor * c.hidden, **c.dtypes, name=f"mlp_{layer}")(y)
            x = x + y
        return embed.attend(nn.LayerNorm(**c.dtypes, name="norm")(x)), balance


def create(config: MoEConfig, optimizer: optax.GradientTransformation) -> Created:
    model = MoE(config)

    def init(key: Array) -> TrainState:
        shortest = config.group // math.gcd(config.group, config.seq)
        params = model.init(key, jnp.zeros((shortest, config.seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any) -> tuple[Array, Metrics]:
            logits, balance = state.apply_fn({"params": params}, batch["tokens"])
            loss = cross_entropy(logits, batch["labels"]).mean()
            return loss + config.balance_weight * balance, {"loss": loss, "balance": balance}

        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), metrics

    return init, train_step


def inputs(config: MoEConfig, batch: int) -> dict[str, Input]:
    quotient(batch * config.seq, config.group, "batch * seq over group")
    return {"tokens": integers(config.vocab, batch, config.seq), "labels": integers(config.vocab, batch, config.seq)}


def _size(layers: int, hidden: int, experts: int, **rest: Any) -> Size:
    return Size(MoEConfig(layers=layers, hidden=hidden, heads=16, experts=experts, **rest), 1024, ALPA)


ALPA = "Zheng et al. 2022 (Alpa), arXiv:2201.12023, and its benchmark suite"

SIZES = {
    "moe-380m": _size(8, 768, 8),
    "moe-690m": _size(8, 768, 16),
    "moe-1.3b": _size(16, 768, 16),
    "moe-2.4b": _size(16, 1024, 16),
    "moe-10b": _size(16, 1536, 32),
    "moe-27b": _size(16, 2048, 48),
    "moe-70b": _size(32, 2048, 64),
    "moe-tiny": Size(
        MoEConfig(layers=2, hidden=48, heads=24, experts=24, group=48, ffn_factor=2, seq=24, vocab=96, dtype="float32"), 48, "for tests"
    ),
}

FAMILY = Family("moe", SIZES, create, inputs)
