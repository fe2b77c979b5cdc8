"""Perceptrons in plain JAX: a list of `(weight, bias)`, no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autopar.models.base import Batch, Config, Created, Family, Input, Metrics, Size

Array = jax.Array
Params = list[tuple[Array, Array]]


@dataclass(frozen=True, kw_only=True)
class MLPConfig(Config):
    """`layers` matrices: features to hidden, hidden to hidden, hidden to outputs; ReLU in between."""

    layers: int
    features: int
    hidden: int
    outputs: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.features, *[self.hidden] * (self.layers - 1), self.outputs)


def init_params(config: MLPConfig, key: Array) -> Params:
    shapes = list(zip(config.widths[:-1], config.widths[1:], strict=True))
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(shapes))
    return [(init(k, shape, config.param_dtype), jnp.zeros(shape[1], config.param_dtype)) for k, shape in zip(keys, shapes, strict=True)]


def forward(params: Params, x: Array, dtype: str) -> Array:
    """`(b f) -> (b o)`."""
    *hidden, (last_weight, last_bias) = params
    x = x.astype(dtype)
    for weight, bias in hidden:
        x = jax.nn.relu(x @ weight.astype(dtype) + bias.astype(dtype))
    return x @ last_weight.astype(dtype) + last_bias.astype(dtype)


def create(config: MLPConfig, optimizer: optax.GradientTransformation) -> Created:
    def init(key: Array) -> dict[str, Any]:
        params = init_params(config, key)
        return {"params": params, "optimizer": optimizer.init(params)}

    def train_step(state: dict[str, Any], batch: Batch) -> tuple[dict[str, Any], Metrics]:
        def loss_fn(params: Any) -> Array:
            error = forward(params, batch["x"], config.dtype) - batch["y"]
            return jnp.mean(jnp.square(error))

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state}, {"loss": loss}

    return init, train_step


def inputs(config: MLPConfig, batch: int) -> dict[str, Input]:
    return {"x": Input((batch, config.features), config.param_dtype), "y": Input((batch, config.outputs), config.param_dtype)}


def _size(layers: int, features: int, hidden: int, outputs: int, *, batch: int, source: str, **rest: Any) -> Size:
    return Size(MLPConfig(layers=layers, features=features, hidden=hidden, outputs=outputs, **rest), batch, source)


SIZES = {
    "mlp-small": _size(4, 1024, 4096, 1024, batch=4096, source="activations dominate: data parallelism is best"),
    "mlp-wide": _size(4, 16384, 65536, 16384, batch=64, source="weights dominate: they must be cut"),
    "mlp-tiny": _size(3, 48, 96, 24, batch=24, dtype="float32", source="for tests"),
}

FAMILY = Family("mlp", SIZES, create, inputs, parameters=lambda state: state["params"])
