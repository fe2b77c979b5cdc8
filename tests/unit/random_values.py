"""Values of random programs: what is known about their size and their rounding before anything runs.

Numbers are small whole ones, so that sums in any order are equal to the last bit as long as they stay below `2 / eps`. What is not
exact carries a bound on its error, as in a running error analysis, and takes no part in what jumps (comparisons, indices, argmax).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int8", "uint32")
DTYPES = (*FLOATS, *FLOATS, *INTEGERS, "bool", "complex64")
"""Of new leaves. Keys are leaves where an op asks for them."""
SIZES = (0, 1, 2, 2, 3, 4, 4, 5, 6, 8)
KEY = "key"
LARGEST = 2
"""Leaves hold whole numbers up to this."""


@dataclass(frozen=True)
class Value:
    """An array before it is there: no element is larger than `bound`, nor further than `error` from what exact arithmetic gives."""

    shape: tuple[int, ...]
    dtype: str
    bound: float = LARGEST
    error: float = 0.0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def is_inexact(self) -> bool:
        return self.is_float or self.dtype == "complex64"

    @property
    def is_number(self) -> bool:
        return self.dtype not in ("bool", KEY)

    @property
    def is_exact(self) -> bool:
        return self.error == 0


def eps(dtype: str) -> float:
    return float(jnp.finfo(dtype).eps)


def rounded(shape: Any, dtype: Any, bound: float, error: float = 0.0, smooth: int = 0) -> Value | None:
    """A result of this size, computed with `smooth` roundings (0 for what is exact in whole numbers); None where it may overflow."""
    name = KEY if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(jnp.dtype(dtype))
    value = Value(tuple(shape), name, bound)
    if not value.is_inexact:
        return Value(value.shape, name, min(bound, 2.0**32)) if not error else None  # integers wrap round
    if error or smooth or bound > 2 / eps(name):
        error += eps(name) * bound * max(1, smooth)
    limit = float(jnp.finfo(name).max) ** 0.5
    return Value(value.shape, name, bound, error) if bound + error < limit and error < 0.1 * max(bound, 1) else None


@dataclass(frozen=True)
class Step:
    """One call of a random program: `function` of the values at `operands` makes `results`."""

    label: str
    function: Any
    operands: tuple[int, ...]
    results: tuple[Value, ...]


@dataclass
class Pool:
    """A program as it grows: leaves first, each step's results after what it reads. `draw` is hypothesis's."""

    draw: Any
    values: list[Value] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """Each with the number of its first result."""

    def choose(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def leaf(self, shape: Any, dtype: str) -> int:
        """A new argument of the program."""
        self.values.append(Value(tuple(shape), dtype, 1 if dtype in ("bool", KEY) else LARGEST))
        self.leaves.append(len(self.values) - 1)
        return self.leaves[-1]

    def pick(self, fits: Any = lambda v: True, ndim: tuple[int, ...] = (0, 1, 2, 2, 3), dtypes: Any = DTYPES) -> int:
        """A value that fits, mostly one that is there, and rather the newest; else a leaf. `ndim` and `dtypes` are those it may have."""
        there = [i for i, v in enumerate(self.values) if v.ndim in ndim and v.dtype in dtypes and fits(v)]
        how = self.draw(st.integers(0, 5))
        if there and how < 5:
            return there[-1] if how < 3 else self.choose(reversed(there))
        shape = [self.choose(SIZES) for _ in range(self.choose(ndim))]
        dtype = self.choose(dtypes)
        return self.leaf(shape if fits(Value(tuple(shape), dtype)) else [max(1, n) for n in shape], dtype)

    def like(self, i: int, shape: Any = None) -> int:
        """A value with the dtype of value i, of its shape or of another one."""
        wanted = (self.values[i].shape if shape is None else tuple(shape), self.values[i].dtype)
        there = [j for j, v in enumerate(self.values) if (v.shape, v.dtype) == wanted]
        return self.choose(there) if there and self.draw(st.integers(0, 2)) else self.leaf(*wanted)

    def add(self, step: Step | None) -> bool:
        """Keep a step, unless there is none."""
        if step is not None:
            self.steps.append((len(self.values), step))
            self.values += step.results
        return step is not None

    def run(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """All values by number, from arrays for the leaves in order."""
        env = dict(zip(self.leaves, arrays, strict=True))
        for first, step in self.steps:
            env.update(enumerate(jax.tree.leaves(step.function(*(env[i] for i in step.operands))), first))
        return env


def spec(value: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, jax.random.key(0).dtype if value.dtype == KEY else value.dtype)


def array(value: Value, seed: int) -> Any:
    """A leaf's numbers: whole, small, zeros and equal ones among them. On the host, where that can be, which is placed soonest."""
    rng = np.random.default_rng(seed)
    if value.dtype == KEY:
        data = rng.integers(0, 2**32, (*value.shape, 2), np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(data))
    if value.dtype == "bool":
        return rng.integers(0, 2, value.shape).astype(bool)
    low = 0 if value.dtype.startswith("u") else -LARGEST
    numbers = rng.integers(low, LARGEST + 1, value.shape)
    if value.dtype == "complex64":
        return (numbers // 2 + 1j * (rng.integers(low, LARGEST + 1, value.shape) // 2)).astype(value.dtype)
    return numbers.astype(jnp.dtype(value.dtype))


def distance(found: Any, expected: Any, value: Value) -> float:
    """How far two arrays are apart, in units of what rounding allows; what is exact must be equal."""
    if value.dtype == KEY:
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    a, e = np.asarray(found), np.asarray(expected)
    if (a.shape, a.dtype) != (e.shape, e.dtype):
        return float("inf")
    if a.dtype.kind not in "fcV" or value.is_exact:
        return 0.0 if np.array_equal(a, e) else float("inf")
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return float(np.max(np.abs(a.astype(wide) - e.astype(wide)), initial=0.0)) / (2 * value.error)
