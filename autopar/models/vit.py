"""Vision Transformer (Dosovitskiy et al. 2021), with one fused projection for query, key and value, images `(b h w c)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers, quotient
from autopar.models.layers import Array, Perceptron, attend, cross_entropy


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Config):
    """`pool`: `"token"` reads the class from a learned first token, as published; `"mean"` averages over the patches."""

    layers: int
    hidden: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000
    pool: str = "token"

    @property
    def head_dim(self) -> int:
        return quotient(self.hidden, self.heads, "hidden over heads")

    @property
    def patches(self) -> int:
        return quotient(self.image, self.patch, "image over patch") ** 2


class Block(nn.Module):
    """One layer, `(b s m) -> (b s m)`."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        y = nn.LayerNorm(**c.dtypes, name="attention_norm")(x)
        fused = nn.Dense(3 * c.hidden, **c.dtypes, name="qkv")(y)
        query, key, value = (part.reshape(*x.shape[:2], c.heads, c.head_dim) for part in jnp.split(fused, 3, axis=-1))
        y = attend(query, key, value, scale=c.head_dim**-0.5).reshape(x.shape)
        x = x + nn.Dense(c.hidden, **c.dtypes, name="out")(y)
        return x + Perceptron(4 * c.hidden, **c.dtypes, name="mlp")(nn.LayerNorm(**c.dtypes, name="mlp_norm")(x))


class ViT(nn.Module):
    """Images `(b h w 3)` -> logits `(b classes)`."""

    config: ViTConfig

    @nn.compact
    def __call__(self, images: Array) -> Array:
        c = self.config
        window = (c.patch, c.patch)
        x = nn.Conv(c.hidden, window, strides=window, padding="VALID", **c.dtypes, name="embed")(images)
        x = x.reshape(x.shape[0], c.patches, c.hidden)
        if c.pool == "token":
            token = self.param("token", nn.initializers.zeros, (1, 1, c.hidden), c.param_dtype).astype(c.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, c.hidden)), x], axis=1)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], c.hidden), c.param_dtype)
        x = x + positions.astype(c.dtype)
        for layer in range(c.layers):
            x = Block(c, name=f"layer_{layer}")(x)
        x = nn.LayerNorm(**c.dtypes, name="norm")(x)
        x = x[:, 0] if c.pool == "token" else x.mean(axis=1)
        return nn.Dense(c.classes, **c.dtypes, name="head")(x)


def create(config: ViTConfig, optimizer: optax.GradientTransformation) -> Created:
    model = ViT(config)

    def init(key: Array) -> TrainState:
        images = jnp.zeros((1, config.image, config.image, 3), config.param_dtype)
        return TrainState.create(apply_fn=model.apply, params=model.init(key, images)["params"], tx=optimizer)

    return init, train_step


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    def loss_fn(params: Any) -> tuple[Array, Array]:
        logits = state.apply_fn({"params": params}, batch["image"])
        return cross_entropy(logits, batch["label"]).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    correct = jnp.argmax(logits, axis=-1) == batch["label"]
    return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": correct.mean(dtype=loss.dtype)}


def inputs(config: ViTConfig, batch: int) -> dict[str, Input]:
    image = Input((batch, config.image, config.image, 3), config.param_dtype)
    return {"image": image, "label": integers(config.classes, batch)}


VIT = "Dosovitskiy et al. 2021, arXiv:2010.11929, table 1; batch 4096 of its table 3"

SIZES = {
    "vit-b16": Size(ViTConfig(layers=12, hidden=768, heads=12, patch=16), 4096, VIT),
    "vit-l16": Size(ViTConfig(layers=24, hidden=1024, heads=16, patch=16), 4096, VIT),
    "vit-h14": Size(ViTConfig(layers=32, hidden=1280, heads=16, patch=14), 4096, VIT),
    "vit-tiny": Size(
        ViTConfig(layers=2, hidden=96, heads=24, patch=4, image=24, classes=24, pool="mean", dtype="float32"), 24, "for tests"
    ),
}

FAMILY = Family("vit", SIZES, create, inputs)
