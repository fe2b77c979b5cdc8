"""Gates: identities that the compiler cannot see through, so that what is repeated on purpose stays repeated.

Stock XLA merges equal gathers and moves them to the front. On CPU before jax 0.11 it also drops `optimization_barrier`, so
there the gate is a bitwise or with a runtime zero masked by a bit of the value that must come first: exact for every bit
pattern, NaNs and infinities included (`x + 0 * y` is not).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def barrier_is_kept(platform: str) -> bool:
    """Whether this backend keeps `optimization_barrier` through its own rewrites."""
    return platform != "cpu" or tuple(int(p) for p in jax.__version__.split(".")[:2]) >= (0, 11)


def gate(x: Any, after: Sequence[Any], zero: Any, platform: str) -> Any:
    """`x`, available only once all of `after` are. `zero` is an int32 zero that the compiler cannot know."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(gate(jax.random.key_data(x), after, zero, platform), impl=jax.random.key_impl(x))
    if barrier_is_kept(platform) or x.dtype.itemsize not in _UNSIGNED or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.optimization_barrier((x, *after))[0]
    token = reduce(operator.or_, map(_some_bit, after)) & zero
    if x.dtype == bool:
        return x | (token != 0)
    bits = _UNSIGNED[x.dtype.itemsize]
    whole = lax.bitcast_convert_type(x, bits) | token.astype(bits)
    return lax.bitcast_convert_type(whole, x.dtype)


def _some_bit(after: Any) -> Any:
    """An int32 that depends on one element of `after`."""
    element = (jax.random.key_data(after) if jnp.issubdtype(after.dtype, jax.dtypes.prng_key) else after).reshape(-1)[0]
    if element.dtype == bool or jnp.issubdtype(element.dtype, jnp.integer):
        return element.astype(jnp.int32)
    if jnp.issubdtype(element.dtype, jnp.complexfloating):
        element = jnp.real(element)
    return lax.bitcast_convert_type(element.astype(jnp.float32), jnp.int32)
