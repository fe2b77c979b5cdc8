"""What every family of the zoo is made of: a config, sizes by name, inputs, and an optimizer."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.errors import ModelError

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Init = Callable[[jax.Array], Any]
Step = Callable[[Any, Batch], tuple[Any, Metrics]]
Created = tuple[Init, Step]
"""What a family makes: `init(key)` gives the state, and `train_step(state, batch)` the new state and metrics."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fields that every family has. Parameters and floating inputs are `param_dtype`, arithmetic is `dtype`.

    `learning_rate=None` takes the optimizer's own, see `OPTIMIZERS`.
    """

    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    learning_rate: float | None = None

    @property
    def dtypes(self) -> dict[str, Any]:
        """What a flax layer takes."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


@dataclass(frozen=True)
class Size:
    """A published size: its config, global batch, and where both come from."""

    config: Any
    batch: int
    source: str


@dataclass(frozen=True)
class Input:
    """One leaf of a batch: integers in `[0, below)`, or normally distributed numbers if `below` is None."""

    shape: tuple[int, ...]
    dtype: str
    below: int | None = None

    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def draw(self, random: np.random.Generator) -> jax.Array:
        values = random.standard_normal(self.shape) if self.below is None else random.integers(0, self.below, self.shape)
        return jnp.asarray(values, self.dtype)


def integers(below: int, *shape: int) -> Input:
    return Input(shape, "int32", below)


@dataclass(frozen=True, eq=False)
class Family:
    """One architecture. `create(config, optimizer)` gives `(init, train_step)`, where `init(key)` makes the state.

    `inputs(config, batch)` names the leaves of a batch; `parameters(state)` picks the model's weights out of the state.
    """

    name: str
    sizes: Mapping[str, Size]
    create: Callable[[Any, optax.GradientTransformation], Created]
    inputs: Callable[[Any, int], dict[str, Input]]
    optimizer: str = "adamw"
    parameters: Callable[[Any], Any] = attrgetter("params")


def clipped_adamw(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, b2=0.95, weight_decay=0.1))


def momentum_sgd(learning_rate: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=0.9, nesterov=True)


OPTIMIZERS = {"adamw": (clipped_adamw, 1e-3), "sgd": (momentum_sgd, 1e-2)}
"""Name to (constructor, default learning rate)."""


def make_optimizer(optimizer: str | optax.GradientTransformation, learning_rate: float | None) -> optax.GradientTransformation:
    """The named optimizer; one that is given already is returned as it is, and sets its own learning rate."""
    if not isinstance(optimizer, str):
        return optimizer
    make, usual = lookup("optimizer", optimizer, OPTIMIZERS)
    return make(usual if learning_rate is None else learning_rate)


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with some fields replaced, checked by name and kind and, for dtypes, by whether jax can hold them now."""
    known = {field.name: field for field in fields(config)}
    given = {name: _as(name, lookup(f"field of {type(config).__name__}", name, known).type, value) for name, value in changes.items()}
    changed = replace(config, **given)
    return replace(changed, dtype=floating(changed.dtype), param_dtype=floating(changed.param_dtype))


def _as(name: str, kind: Any, value: Any) -> Any:
    """A field's value as its kind, the text of an annotation, says. Sizes are positive."""
    if name in ("dtype", "param_dtype"):
        return value
    if isinstance(value, list):
        value = tuple(value)
    wanted, fits = _KINDS[kind]
    if not fits(value):
        raise ModelError(f"{name} must be {wanted}, not {value!r}.")
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number of at least 1", _is_size),
    "tuple[int, ...]": ("whole numbers of at least 1, as in (3, 4)", lambda v: isinstance(v, tuple) and bool(v) and all(map(_is_size, v))),
    "int | None": ("a whole number of at least 1, or None", lambda v: v is None or _is_size(v)),
    "float": ("a number", _is_number),
    "float | None": ("a number or None", lambda v: v is None or _is_number(v)),
    "bool": ("True or False", lambda v: isinstance(v, bool)),
    "str": ("text", lambda v: isinstance(v, str)),
}
"""Annotation of a config's field -> what its values are, in words and as a test."""


def floating(dtype: Any) -> str:
    """The name of a floating dtype, from any of the ways to write one."""
    try:
        name = np.dtype(dtype).name
    except TypeError:
        raise ModelError(f"there is no dtype {dtype!r}; dtype and param_dtype are floating, such as bfloat16 or float32.") from None
    if not jnp.issubdtype(name, jnp.floating):
        raise ModelError(f"dtype and param_dtype must be floating; `{name}` is not.")
    if jax.dtypes.canonicalize_dtype(name) != name:
        raise ModelError(f"`{name}` needs jax.config.update('jax_enable_x64', True); without it jax would use 32 bits in silence.")
    return name


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """`table[name]`, or a ModelError that lists the close matches, or everything if nothing is close."""
    if name in table:
        return table[name]
    raise ModelError(f"no {kind} is called {name!r}; {suggestion(name, table)}.")


def suggestion(name: str, candidates: Iterable[str]) -> str:
    candidates = list(candidates)
    close = difflib.get_close_matches(str(name), candidates, n=4, cutoff=0.5)
    return "close matches: " + ", ".join(close) if close else "there are: " + ", ".join(candidates)


def quotient(whole: int, part: int, what: str) -> int:
    """`whole / part` where that is exact; `what` names both sides in the error."""
    if part < 1 or whole % part:
        raise ModelError(f"{what}: {whole} does not divide by {part}.")
    return whole // part
