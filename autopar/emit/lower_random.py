"""A part of one key's random bits: the same bits as the whole has there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.emit.place import Call
from autopar.trace import compat

_WORD = 1 << 32
Pair = tuple[Any, Any]


def bits_of_part(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Threefry's bits are a hash of the key and each element's position in the whole array."""
    width, shape = call.whole_params["bit_width"], tuple(call.whole_params["shape"])
    batch = call.avals_in[0].ndim
    factors = [dim[0] if dim else None for dim in call.rule.results[0][batch:]]
    local = tuple(call.out_shapes[0][batch:])
    starts = [0 if f is None else call.start(f, n)[0] for f, n in zip(factors, local, strict=True)]
    high, low = _positions(shape, local, starts)

    def one(key: Any) -> Any:
        return _combined(*compat.threefry(key, high, low), width)

    draw = one
    for _ in range(batch):
        draw = jax.vmap(draw)
    return [draw(jax.random.key_data(operands[0]))]


def _positions(shape: tuple[int, ...], local: tuple[int, ...], starts: Sequence[Any]) -> Pair:
    """Row-major positions of the part's elements in the whole, as the high and low words of 64 bits."""
    high, low = jnp.zeros(local, jnp.uint32), jnp.zeros(local, jnp.uint32)
    stride = 1
    for d in range(len(shape) - 1, -1, -1):
        index = jnp.asarray(starts[d]).astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, local, d)
        high, low = _added((high, low), _times(index, stride))
        stride *= shape[d]
    return high, low


def _times(a: Any, stride: int) -> Pair:
    """A 32-bit word times a constant, modulo 2^64."""
    if stride == 1:
        return jnp.zeros_like(a), a
    lowest, highest = stride % _WORD, stride // _WORD
    b0, b1 = lowest & 0xFFFF, lowest >> 16
    a0, a1 = a & 0xFFFF, a >> 16
    cross = _product(a1, b0) + (_product(a0, b0) >> 16)  # cannot overflow: (2^16-1)^2 + 2^16-1 < 2^32
    other = _product(a0, b1) + (cross & 0xFFFF)
    high = _product(a1, b1) + (cross >> 16) + (other >> 16)
    return high + _product(a, highest % _WORD), _product(a, lowest)


def _product(a: Any, n: int) -> Any:
    """A word times a constant. Nothing times zero is written: a compiler would drop it, and with it a collective that brings the word."""
    return a * jnp.uint32(n) if n else jnp.zeros_like(a)


def _added(x: Pair, y: Pair) -> Pair:
    low = x[1] + y[1]
    return x[0] + y[0] + (low < x[1]).astype(jnp.uint32), low


def _combined(first: Any, second: Any, width: int) -> Any:
    """Two hashed words as one number of this width."""
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        return lax.shift_left(first.astype(dtype), jnp.asarray(32, dtype)) | second.astype(dtype)
    return (first ^ second).astype(dtype)
