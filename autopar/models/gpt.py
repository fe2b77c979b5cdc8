"""GPT: a decoder with learned positions and layer norm before each sublayer (Radford et al. 2019; Brown et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers, quotient
from autopar.models.layers import Array, Perceptron, SelfAttention, cross_entropy


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    """`tied=True`: the head is the transposed embedding, as in GPT-3. `tied=False`: a matrix of its own.

    `head_size` and `ffn` are by default `hidden / heads` and `4 hidden`. `fused=True`: attention is one op (`fused`). `scanned=True`: one
    `scan` over the layers, whose weights are stacked.
    """

    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    vocab: int = 51200
    tied: bool = True
    head_size: int | None = None
    ffn: int | None = None
    fused: bool = False
    scanned: bool = False

    @property
    def head_dim(self) -> int:
        return self.head_size or quotient(self.hidden, self.heads, "hidden over heads")


class Block(nn.Module):
    """One layer, `(b s m) -> (b s m)`."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        attention = SelfAttention(c.heads, c.head_dim, **c.dtypes, fused=c.fused, name="attention")
        x = x + attention(nn.LayerNorm(**c.dtypes, name="attention_norm")(x))
        return x + Perceptron(c.ffn or 4 * c.hidden, **c.dtypes, name="mlp")(nn.LayerNorm(**c.dtypes, name="mlp_norm")(x))


class ScannedBlock(nn.Module):
    """One layer as the body of a scan."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: Array, _: None) -> tuple[Array, None]:
        return Block(self.config, name="layer")(x), None


class GPT(nn.Module):
    """Tokens `(b s)` -> logits `(b s v)`."""

    config: GPTConfig

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        c = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.hidden, embedding_init=init, **c.dtypes, name="embed")
        positions = self.param("positions", init, (c.seq, c.hidden), c.param_dtype)
        x = embed(tokens) + positions.astype(c.dtype)
        if c.scanned:
            every = nn.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
            x, _ = every(c, name="layers")(x, None)
        for layer in () if c.scanned else range(c.layers):
            x = Block(c, name=f"layer_{layer}")(x)
        x = nn.LayerNorm(**c.dtypes, name="norm")(x)
        return embed.attend(x) if c.tied else nn.Dense(c.vocab, use_bias=False, **c.dtypes, name="head")(x)


def create(config: GPTConfig, optimizer: optax.GradientTransformation) -> Created:
    model = GPT(config)

    def init(key: Array) -> TrainState:
        tokens = jnp.zeros((1, config.seq), jnp.int32)
        return TrainState.create(apply_fn=model.apply, params=model.init(key, tokens)["params"], tx=optimizer)

    return init, train_step


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    def loss_fn(params: Any) -> Array:
        logits = state.apply_fn({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def inputs(config: GPTConfig, batch: int) -> dict[str, Input]:
    return {"tokens": integers(config.vocab, batch, config.seq), "labels": integers(config.vocab, batch, config.seq)}


def _size(layers: int, hidden: int, heads: int, *, batch: int, source: str, **rest: Any) -> Size:
    return Size(GPTConfig(layers=layers, hidden=hidden, heads=heads, **rest), batch, source)


GPT3 = "Brown et al. 2020, arXiv:2005.14165, table 2.1; vocabulary padded to 51200"
ALPA = "Zheng et al. 2022 (Alpa), arXiv:2201.12023, and its benchmark suite"
MEGATRON = "Narayanan et al. 2021 (Megatron-LM), arXiv:2104.04473, table 1"

# GPT-3's batches are given in tokens: 0.5M, 2M for 125M, 13B. Its 13B row has width 5140, which 40 heads of 128 make 5120.
SIZES = {
    "gpt-125m": _size(12, 768, 12, batch=256, seq=2048, source=GPT3),
    "gpt-350m": _size(24, 1024, 16, batch=1024, source=ALPA),
    "gpt-760m": _size(24, 1536, 16, batch=1024, source=ALPA),
    "gpt-1.3b": _size(24, 2048, 32, batch=1024, source=ALPA),
    "gpt-2.6b": _size(32, 2560, 32, batch=1024, source=ALPA),
    "gpt-6.7b": _size(32, 4096, 32, batch=1024, source=ALPA),
    "gpt-13b": _size(40, 5120, 40, batch=1024, seq=2048, source=GPT3),
    "gpt-15b": _size(48, 5120, 40, batch=1024, source=ALPA),
    "gpt-39b": _size(48, 8192, 64, batch=1024, source=ALPA),
    "gpt-76b": _size(60, 10240, 80, batch=1792, seq=2048, source=MEGATRON),
    "gpt-175b": _size(96, 12288, 96, batch=1536, seq=2048, source=MEGATRON),
    "gpt-demo": _size(3, 160, 8, batch=32, seq=128, vocab=256, dtype="float32", learning_rate=6e-3, source="byte-level, for the demo"),
    "gpt-tiny": _size(2, 96, 24, batch=24, seq=24, vocab=96, dtype="float32", source="for tests"),
}

FAMILY = Family("gpt", SIZES, create, inputs)
