"""Wide residual networks of bottleneck blocks with batch norm (He et al. 2016; Zagoruyko and Komodakis 2016), images `(b h w c)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size, integers
from autopar.models.layers import Array, at_least_float32, cross_entropy


@dataclass(frozen=True, kw_only=True)
class WideResNetConfig(Config):
    """Stage `i` has `stages[i]` blocks of `channels * 2^i`; the 3x3 convolution of a block is `width` times wider."""

    channels: int
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 2
    image: int = 224
    classes: int = 1024
    dtype: str = "float32"


class Bottleneck(nn.Module):
    """1x1, 3x3 (strided), 1x1 to four times the channels, plus the shortcut."""

    config: WideResNetConfig
    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        c = self.config
        stride = (self.stride, self.stride)

        def convolve(y: Array, channels: int, kernel: int, stride: tuple[int, int] = (1, 1)) -> Array:
            y = nn.Conv(channels, (kernel, kernel), stride, use_bias=False, **c.dtypes)(y)
            return batch_norm(c, train)(y)

        y = nn.relu(convolve(x, self.channels, 1))
        y = nn.relu(convolve(y, self.channels * c.width, 3, stride))
        y = convolve(y, 4 * self.channels, 1)
        shortcut = x if x.shape == y.shape else convolve(x, 4 * self.channels, 1, stride)
        return nn.relu(y + shortcut)


def batch_norm(c: WideResNetConfig, train: bool) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9, **c.dtypes)


class WideResNet(nn.Module):
    """Images `(b h w 3)` -> logits `(b classes)`."""

    config: WideResNetConfig

    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        c = self.config
        x = nn.Conv(c.channels, (7, 7), (2, 2), use_bias=False, **c.dtypes)(x)
        x = nn.relu(batch_norm(c, train)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(c.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(c, c.channels * 2**stage, stride, name=f"stage_{stage}_block_{block}")(x, train)
        return nn.Dense(c.classes, **c.dtypes, name="head")(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def create(config: WideResNetConfig, optimizer: optax.GradientTransformation) -> Created:
    model = WideResNet(config)

    def init(key: Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, config.image, config.image, 3), config.param_dtype))
        # flax makes running statistics in float32 whatever the dtype; under float64 they would change type in the first step.
        precise = at_least_float32(config.param_dtype)
        stats = jax.tree.map(lambda leaf: leaf.astype(precise), variables["batch_stats"])
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer, batch_stats=stats)

    return init, train_step


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    def loss_fn(params: Any) -> tuple[Array, tuple[Array, Any]]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]).mean(), (logits, new["batch_stats"])

    (loss, (logits, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    correct = jnp.argmax(logits, axis=-1) == batch["label"]
    return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss, "accuracy": correct.mean(dtype=loss.dtype)}


def inputs(config: WideResNetConfig, batch: int) -> dict[str, Input]:
    image = Input((batch, config.image, config.image, 3), config.param_dtype)
    return {"image": image, "label": integers(config.classes, batch)}


ALPA = "Zheng et al. 2022 (Alpa), arXiv:2201.12023, and its benchmark suite"

SIZES = {
    "wresnet-250m": Size(WideResNetConfig(channels=160), 1536, ALPA),
    "wresnet-500m": Size(WideResNetConfig(channels=224), 1536, ALPA),
    "wresnet-1b": Size(WideResNetConfig(channels=320), 1536, ALPA),
    "wresnet-2b": Size(WideResNetConfig(channels=448), 1536, ALPA),
    "wresnet-4b": Size(WideResNetConfig(channels=640), 1536, ALPA),
    "wresnet-6.8b": Size(WideResNetConfig(channels=320, width=16), 1536, ALPA),
    "wresnet-13b": Size(WideResNetConfig(channels=320, width=16, stages=(3, 4, 23, 3)), 1520, ALPA),
    "wresnet-tiny": Size(WideResNetConfig(channels=24, stages=(1, 1), image=24, classes=24), 24, "for tests"),
}

FAMILY = Family("wresnet", SIZES, create, inputs, optimizer="sgd")
