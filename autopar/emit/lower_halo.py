"""Convolutions and windows cut along space: each device adds the borders of its neighbours' blocks to its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.emit.lower_reduce import extreme
from autopar.emit.place import Call
from autopar.rules.halo import RETURNING, Reach, filler, reaches


def windows_by_blocks(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The op on the block with its borders, padded only where windows reach beyond these."""
    found, ids = reaches(call.op, call.rule, call.strategy, call.place.mesh), count()
    params = call.params | _params(call, found)
    if call.primitive == "select_and_scatter_add":
        source, x = operands
        (wide,) = call.bind(params, call.widen([source, _own(call, _bordered(call, x, found, ids), found)]))
        return [_returned(call, _put_back(call, wide, found), found, ids)]
    return list(call.bind(params, call.widen([_own(call, _bordered(call, operands[0], found, ids), found), *operands[1:]])))


def _params(call: Call, found: Sequence[Reach]) -> dict[str, Any]:
    """The op's padding and dilation, along cut dimensions those of the part. A convolution lists its spatial dimensions only."""
    named = "lhs_dilation" if call.primitive == "conv_general_dilated" else "base_dilation"
    padding = list(call.params["padding"])
    dilation = list(call.params.get(named) or (1,) * len(padding))
    for r in found:
        n = call.params["dimension_numbers"].lhs_spec.index(r.dim) - 2 if call.primitive == "conv_general_dilated" else r.dim
        low, high = _idle(call, r)
        padding[n], dilation[n] = ((0, 0), 1) if r.drift else ((r.padding[0] + low, r.padding[1] + high), dilation[n])
    return {"padding": tuple(padding)} | ({named: tuple(dilation)} if named in call.params else {})


def _own(call: Call, x: Any, found: Sequence[Reach]) -> Any:
    """Of a block with its borders what this device's windows read, where that differs between devices."""
    what = filler(call.op)
    fill = jnp.zeros((), x.dtype) if what == "zero" else jnp.asarray(extreme(x.dtype, 1 if what == "greatest" else -1), x.dtype)
    for r in (r for r in found if r.drift):
        config = [(*r.padding, r.dilation - 1) if d == r.dim else (0, 0, 0) for d in range(jnp.ndim(x))]
        x = lax.dynamic_slice_in_dim(lax.pad(x, fill, config), _begin(call, r), r.extent, r.dim)
    for r in (r for r in found if not r.drift and any(_idle(call, r))):
        low, high = _idle(call, r)
        x = lax.slice_in_dim(x, low, jnp.shape(x)[r.dim] - high, axis=r.dim)
    return x


def _idle(call: Call, r: Reach) -> tuple[int, int]:
    """Elements at either end of a block with its borders that no window reads; ops that put something back take no negative padding."""
    return (max(0, -r.padding[0]), max(0, -r.padding[1])) if call.primitive in RETURNING else (0, 0)


def _put_back(call: Call, x: Any, found: Sequence[Reach]) -> Any:
    """What came of `_own`, in its place in the block with borders, zero elsewhere."""
    for r in (r for r in reversed(found) if not r.drift and any(_idle(call, r))):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(*_idle(call, r), 0) if d == r.dim else (0, 0, 0) for d in range(jnp.ndim(x))])
    for r in (r for r in reversed(found) if r.drift):
        shape = list(jnp.shape(x))
        shape[r.dim] = r.left + r.block + r.right + sum(r.padding)
        x = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, _begin(call, r), r.dim)
        x = lax.pad(x, jnp.zeros((), x.dtype), [(-r.padding[0], -r.padding[1], 0) if d == r.dim else (0, 0, 0) for d in range(x.ndim)])
    return x


def _begin(call: Call, r: Reach) -> Any:
    """Where this device begins to read."""
    return r.begin + call.place.index(r.axes) * r.drift


def _bordered(call: Call, x: Any, found: Sequence[Reach], ids: Iterator[int]) -> Any:
    """A block with borders; one dimension after the other, so that corners come along."""
    for r in found:
        size = jnp.shape(x)[r.dim]
        left = [_shifted(call, lax.slice_in_dim(x, size - n, size, axis=r.dim), r, hop, ids) for hop, n in _hops(r, r.left)]
        right = [_shifted(call, lax.slice_in_dim(x, 0, n, axis=r.dim), r, -hop, ids) for hop, n in _hops(r, r.right)]
        x = lax.concatenate([*reversed(left), x, *right], r.dim) if left or right else x
    return x


def _returned(call: Call, x: Any, found: Sequence[Reach], ids: Iterator[int]) -> Any:
    """The block, with what the neighbours' windows put into it; the last dimension first."""
    for r in reversed(found):
        size, at, block = jnp.shape(x)[r.dim], r.left, lax.slice_in_dim(x, r.left, r.left + r.block, axis=r.dim)
        for hop, n in _hops(r, r.left):
            sent = _shifted(call, lax.slice_in_dim(x, at - n, at, axis=r.dim), r, -hop, ids, fill=False)
            block, at = block + _placed(sent, r, r.block - n), at - n
        at = r.left + r.block
        for hop, n in _hops(r, r.right):
            sent = _shifted(call, lax.slice_in_dim(x, at, at + n, axis=r.dim), r, hop, ids, fill=False)
            block, at = block + _placed(sent, r, 0), at + n
        assert at == size
        x = block
    return x


def _placed(x: Any, r: Reach, at: int) -> Any:
    """A border as long as the block, zero elsewhere."""
    after = r.block - at - jnp.shape(x)[r.dim]
    config = [(at, after, 0) if d == r.dim else (0, 0, 0) for d in range(jnp.ndim(x))]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _hops(r: Reach, elements: int) -> Iterator[tuple[int, int]]:
    return enumerate(r.hops(elements), 1)


def _shifted(call: Call, x: Any, r: Reach, by: int, ids: Iterator[int], fill: bool = True) -> Any:
    """What the device `by` places before has; where there is none, what padding has."""
    received, what = call.shift(next(ids), x, r.axes, by), filler(call.op)
    if what == "zero" or not fill:
        return received  # zero is what comes from nowhere
    source = call.place.index(r.axes) - by
    return jnp.where((source >= 0) & (source < r.parts), received, extreme(x.dtype, 1 if what == "greatest" else -1))
