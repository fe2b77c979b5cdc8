"""Cumulative ops and argmax cut along their own dimension: each device does its part, and hears of what the others found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.emit.place import Call
from autopar.ir.sharding import Axes

Reduce = Callable[..., Any]


def _sum(x: Any, axis: int) -> Any:
    return jnp.sum(x, axis, keepdims=True, dtype=x.dtype)


def _prod(x: Any, axis: int) -> Any:
    return jnp.prod(x, axis, keepdims=True, dtype=x.dtype)


def _logsumexp(x: Any, axis: int) -> Any:
    """By pairs, so that it rounds and treats infinities as the op itself does."""
    parts = [lax.slice_in_dim(x, n, n + 1, axis=axis) for n in range(jnp.shape(x)[axis])]
    total = parts[0]
    for part in parts[1:]:
        total = jnp.logaddexp(total, part)
    return total


_OPS: dict[str, tuple[Reduce, Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "cumsum": (_sum, lax.add, lambda dtype: jnp.zeros((), dtype)),
    "cumprod": (_prod, lax.mul, lambda dtype: jnp.ones((), dtype)),
    "cummax": (lambda x, axis: jnp.max(x, axis, keepdims=True), lax.max, lambda dtype: extreme(dtype, -1)),
    "cummin": (lambda x, axis: jnp.min(x, axis, keepdims=True), lax.min, lambda dtype: extreme(dtype, 1)),
    "cumlogsumexp": (_logsumexp, jnp.logaddexp, lambda dtype: jnp.asarray(-jnp.inf, dtype)),
}
"""Per cumulative op: how totals of blocks combine, how a total combines with a block, and what changes nothing."""


def extreme(dtype: Any, sign: int) -> Any:
    """The greatest number of a dtype, or with sign -1 the least one."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(sign * jnp.inf, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(sign > 0)
    return jnp.asarray(jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min, dtype)


def prefix_by_blocks(call: Call, operands: Sequence[Any]) -> list[Any]:
    """This device's block by itself, combined with the totals of all blocks before it (after it, where the op runs backward)."""
    axis, reverse = call.params["axis"], call.params["reverse"]
    axes = _cut(call, axis)
    (block,) = call.bind(call.params, operands)
    end = 0 if reverse else jnp.shape(block)[axis] - 1
    totals = call.gather(0, lax.slice_in_dim(block, end, end + 1, axis=axis), axes, axis)
    reduce, combine, unit = _OPS[call.primitive]
    place, here = lax.broadcasted_iota(jnp.int32, jnp.shape(totals), axis), call.place.index(axes)
    before = place > here if reverse else place < here
    return [combine(block, jnp.broadcast_to(reduce(jnp.where(before, totals, unit(totals.dtype)), axis), jnp.shape(block)))]


def pair_by_blocks(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The extreme of each block with its place, then the first extreme of these; NaN counts as extreme, as for one device."""
    (axis,), (x,) = call.params["axes"], operands
    axes, dtype = _cut(call, axis), call.params["index_dtype"]
    (local,) = call.bind(call.params, [x])
    (factor,) = call.rule.operands[0][axis]
    start, _ = call.start(factor, jnp.shape(x)[axis])
    found = jnp.take_along_axis(x, jnp.expand_dims(local, axis), axis)
    values = call.gather(0, found, axes, axis)
    places = call.gather(1, jnp.expand_dims(local + jnp.asarray(start, dtype), axis), axes, axis)
    (block,) = call.bind(call.params, [values])
    return [jnp.squeeze(jnp.take_along_axis(places, jnp.expand_dims(block, axis), axis), axis)]


def _cut(call: Call, axis: int) -> Axes:
    return call.operand_axes(0, axis)
