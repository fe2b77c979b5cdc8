"""A small zoo of real architectures with ordinary training steps: GPT, Llama, MoE, Wide-ResNet, ViT, U-Net, T5 and a perceptron.

>>> "gpt-2.6b" in names()
True
>>> train_step, (state, batch) = build("mlp-tiny")
>>> batch["x"].shape
(24, 48)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np
import optax

from autopar.models import gpt, llama, mlp, moe, t5, unet, vit, wide_resnet
from autopar.models.base import Config, Created, Family, Init, ModelError, Step, lookup, make_optimizer, override

__all__ = ["ModelError", "ModelInfo", "build", "describe", "names"]

FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in (gpt, llama, moe, wide_resnet, vit, unet, t5, mlp))
_FAMILY_OF = {name: family for family in FAMILIES for name in family.sizes}

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
"""For initialisation, which runs once: compiling takes most of its time."""


@dataclass(frozen=True)
class ModelInfo:
    """What the zoo knows of a model. `batch` is the published global batch, `optimizer` the default one.

    `parameters`, the exact number of weights, is counted from shapes when first asked for.
    """

    name: str
    family: str
    batch: int
    source: str
    optimizer: str
    config: Config = field(repr=False)

    @cached_property
    def parameters(self) -> int:
        family = _FAMILY_OF[self.name]
        init, _ = _create(family, self.config, family.optimizer)
        leaves = jax.tree.leaves(family.parameters(_abstract(init)))
        return sum(math.prod(leaf.shape) for leaf in leaves)


def names() -> tuple[str, ...]:
    """Every model's name, by family; in each the published sizes come first, `tiny` last."""
    return tuple(_FAMILY_OF)


def describe(name: str) -> ModelInfo:
    """Facts about one model. Raises ModelError with close matches for an unknown name."""
    family = lookup("model", name, _FAMILY_OF)
    size = family.sizes[name]
    return ModelInfo(name, family.name, size.batch, size.source, family.optimizer, size.config)


def build(
    name: str,
    *,
    batch: int | None = None,
    abstract: bool = True,
    seed: int = 0,
    dtype: Any = None,
    param_dtype: Any = None,
    optimizer: str | optax.GradientTransformation | None = None,
    **overrides: Any,
) -> tuple[Step, tuple[Any, dict[str, Any]]]:
    """`(train_step, (state, batch))`, where `train_step(state, batch)` gives `(new state, metrics)`.

    `abstract` leaves are `jax.ShapeDtypeStruct`, whatever the size; otherwise real arrays, drawn from `seed`. `dtype` is that of
    the arithmetic, `param_dtype` that of parameters and floating inputs. `optimizer` is an optax transformation, `"adamw"`
    (clipped by global norm) or `"sgd"` (with momentum). `overrides` replace fields of the config, as in `layers=2, seq=64`.
    """
    info = describe(name)
    family = _FAMILY_OF[name]
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    config = override(info.config, overrides | {key: value for key, value in dtypes.items() if value is not None})
    init, train_step = _create(family, config, optimizer or info.optimizer)
    leaves = family.inputs(config, info.batch if batch is None else batch)
    if abstract:
        return train_step, (_abstract(init), {key: leaf.abstract() for key, leaf in leaves.items()})
    random = np.random.default_rng(seed)
    return train_step, (
        jax.jit(init, compiler_options=QUICK_COMPILE)(jax.random.PRNGKey(seed)),
        {key: leaf.draw(random) for key, leaf in leaves.items()},
    )


@cache
def _create(family: Family, config: Config, optimizer: str | optax.GradientTransformation) -> Created:
    """Made once for each config: a TrainState holds the model's function, so abstract and real states must share it to be of one type."""
    return family.create(config, make_optimizer(optimizer, config.learning_rate))


def _abstract(init: Init) -> Any:
    """The state's shapes; no array is made and no device is used."""
    return jax.eval_shape(lambda: init(jax.random.PRNGKey(0)))
