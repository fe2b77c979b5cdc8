"""A U-Net that predicts the noise in an image, with attention to a context (Ronneberger et al. 2015; Rombach et al. 2022).

Images are `(b h w c)`. Levels have 1, 2, 4, ..., and twice the last multiple of the channels, each at half the resolution of
the one above. The encoder's output of a level skips to the decoder of the same level; the top decoder also gets the stem's.
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
from autopar.models.layers import Array, at_least_float32, attend


@dataclass(frozen=True, kw_only=True)
class UNetConfig(Config):
    """`levels` counts resolutions; the deepest has the width of the one above it.

    `attention` puts a transformer at every level but the deepest of the encoder and the top of the decoder; the middle always has one.
    """

    channels: int
    levels: int = 4
    heads: int = 8
    groups: int = 32
    image: int = 32
    pixels: int = 4
    timesteps: int = 1000
    attention: bool = True
    dtype: str = "float32"

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.channels * 2 ** min(level, self.levels - 2) for level in range(self.levels))

    @property
    def context(self) -> tuple[int, int]:
        """Length and width of the context: one vector for each pixel of the deepest level."""
        return quotient(self.image, 2 ** (self.levels - 1), "image over the deepest level's scale") ** 2, self.widths[-1]


def group_norm(c: UNetConfig) -> nn.GroupNorm:
    return nn.GroupNorm(c.groups, epsilon=1e-5, **c.dtypes)


def sinusoids(time: Array, width: int, dtype: Any) -> Array:
    """`(b) -> (b width)`: cosines and sines of `time * 10000^(-i / (width/2))`."""
    half = width // 2
    frequency = jnp.exp(-math.log(10000) * jnp.arange(half, dtype=dtype) / half)
    angle = time.astype(dtype)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class Residual(nn.Module):
    """Two 3x3 convolutions with the time embedding added between them, plus the shortcut: `(b h w c) -> (b h w width)`."""

    config: UNetConfig
    width: int

    @nn.compact
    def __call__(self, x: Array, time: Array) -> Array:
        c = self.config
        y = nn.Conv(self.width, (3, 3), **c.dtypes, name="first")(nn.silu(group_norm(c)(x)))
        y = y + nn.Dense(self.width, **c.dtypes, name="time")(nn.silu(time))[:, None, None, :]
        y = nn.Conv(self.width, (3, 3), **c.dtypes, name="second")(nn.silu(group_norm(c)(y)))
        shortcut = x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1), **c.dtypes, name="shortcut")(x)
        return y + shortcut


class Attention(nn.Module):
    """Attention from `x` to `source`, `(b q m), (b k n) -> (b q m)`."""

    config: UNetConfig

    @nn.compact
    def __call__(self, x: Array, source: Array) -> Array:
        c = self.config
        width = x.shape[-1]
        head_dim = quotient(width, c.heads, "channels over heads")

        def project(y: Array, name: str) -> Array:
            y = nn.Dense(width, use_bias=False, **c.dtypes, name=name)(y)
            return y.reshape(*y.shape[:2], c.heads, head_dim)

        y = attend(project(x, "query"), project(source, "key"), project(source, "value"), scale=head_dim**-0.5)
        return nn.Dense(width, **c.dtypes, name="out")(y.reshape(x.shape))


class SpatialTransformer(nn.Module):
    """Self-attention over pixels, attention to the context, and a gated perceptron: `(b h w m) -> (b h w m)`."""

    config: UNetConfig

    @nn.compact
    def __call__(self, x: Array, context: Array) -> Array:
        c = self.config
        batch, height, width, channels = x.shape
        y = nn.Conv(channels, (1, 1), **c.dtypes, name="enter")(group_norm(c)(x))
        y = y.reshape(batch, height * width, channels)
        z = nn.LayerNorm(**c.dtypes, name="self_norm")(y)
        y = y + Attention(c, name="self")(z, z)
        y = y + Attention(c, name="cross")(nn.LayerNorm(**c.dtypes, name="cross_norm")(y), context)
        z = nn.Dense(8 * channels, **c.dtypes, name="up")(nn.LayerNorm(**c.dtypes, name="mlp_norm")(y))
        linear, gate = jnp.split(z, 2, axis=-1)
        y = y + nn.Dense(channels, **c.dtypes, name="down")(linear * nn.gelu(gate))
        return x + nn.Conv(channels, (1, 1), **c.dtypes, name="leave")(y.reshape(x.shape))


class UNet(nn.Module):
    """Noisy images `(b h w p)`, integer times `(b)`, context `(b k n)` -> predicted noise `(b h w p)`."""

    config: UNetConfig

    @nn.compact
    def __call__(self, x: Array, time: Array, context: Array) -> Array:
        c = self.config
        time = sinusoids(time, c.channels, at_least_float32(c.dtype)).astype(c.dtype)
        time = nn.Dense(4 * c.channels, **c.dtypes, name="time_in")(time)
        time = nn.Dense(4 * c.channels, **c.dtypes, name="time_out")(nn.silu(time))
        context = context.astype(c.dtype)
        x = nn.Conv(c.channels, (3, 3), **c.dtypes, name="stem")(x)
        stem, skips = x, []
        for level, width in enumerate(c.widths):
            x = Residual(c, width, name=f"encode_{level}")(x, time)
            if c.attention and level < c.levels - 1:
                x = SpatialTransformer(c, name=f"encode_attention_{level}")(x, context)
            skips.append(x)
            if level < c.levels - 1:
                x = nn.Conv(width, (3, 3), (2, 2), **c.dtypes, name=f"halve_{level}")(x)
        x = Residual(c, c.widths[-1], name="middle_in")(x, time)
        x = SpatialTransformer(c, name="middle_attention")(x, context)
        x = Residual(c, c.widths[-1], name="middle_out")(x, time)
        for level, width in reversed(list(enumerate(c.widths))):
            x = Residual(c, width, name=f"decode_{level}")(jnp.concatenate([x, skips[level]], axis=-1), time)
            if c.attention and level > 0:
                x = SpatialTransformer(c, name=f"decode_attention_{level}")(x, context)
            if level > 0:
                x = nn.Conv(width, (3, 3), **c.dtypes, name=f"double_{level}")(double(x))
        x = Residual(c, c.channels, name="decode_stem")(jnp.concatenate([x, stem], axis=-1), time)
        return nn.Conv(c.pixels, (3, 3), **c.dtypes, name="head")(nn.silu(group_norm(c)(x)))


def double(x: Array) -> Array:
    """Nearest-neighbour upsampling, `(b h w c) -> (b 2h 2w c)`."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def create(config: UNetConfig, optimizer: optax.GradientTransformation) -> Created:
    model = UNet(config)

    def init(key: Array) -> TrainState:
        example = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in inputs(config, 1).items()}
        params = model.init(key, example["image"], example["time"], example["context"])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        image, noise = batch["image"], batch["noise"]
        # Cosine schedule (Nichol and Dhariwal 2021): the image fades out as the noise comes in, with unit variance throughout.
        phase = (batch["time"].astype(image.dtype) / config.timesteps * (math.pi / 2))[:, None, None, None]
        noisy = jnp.cos(phase) * image + jnp.sin(phase) * noise

        def loss_fn(params: Any) -> Array:
            predicted = state.apply_fn({"params": params}, noisy, batch["time"], batch["context"])
            return jnp.mean(jnp.square(predicted - noise))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return init, train_step


def inputs(config: UNetConfig, batch: int) -> dict[str, Input]:
    image = Input((batch, config.image, config.image, config.pixels), config.param_dtype)
    context = Input((batch, *config.context), config.param_dtype)
    return {"image": image, "noise": image, "time": integers(config.timesteps, batch), "context": context}


ALPA = "the U-Net sizes of Alpa's benchmark suite (Zheng et al. 2022, arXiv:2201.12023)"

SIZES = {
    "unet-470m": Size(UNetConfig(channels=320), 256, ALPA),
    "unet-1b": Size(UNetConfig(channels=480), 2048, ALPA),
    "unet-1.2b": Size(UNetConfig(channels=512), 2048, ALPA),
    "unet-1.8b": Size(UNetConfig(channels=640), 2048, ALPA),
    "unet-2b": Size(UNetConfig(channels=672), 2048, ALPA),
    "unet-tiny": Size(UNetConfig(channels=24, levels=2, groups=8, image=8, pixels=3, attention=False), 24, "for tests"),
}

FAMILY = Family("unet", SIZES, create, inputs)
