"""Gathers and scatters whose indexed dimension is cut, and accumulating scatters whose updates are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.emit.place import Call

_CLIP, _FILL = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP
_LAX: dict[str, Any] = {"scatter-add": lax.scatter_add, "scatter-sub": getattr(lax, "scatter_sub", None)}


def masked_lookup(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Each device looks up what its part holds and gives zero (False) elsewhere; the results add up to the global lookup.

    Bounds are the global ones: an index is clamped to them, or, where the gather fills, the fill value comes from the device
    at index 0 alone.
    """
    operand, indices = operands
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    mapped = numbers.start_index_map
    index = _signed(indices, max(call.avals_in[0].shape, default=0))
    last = jnp.asarray([call.avals_in[0].shape[d] - call.whole_params["slice_sizes"][d] for d in mapped], index.dtype)
    inside = jnp.all((index >= 0) & (index <= last), axis=-1)
    local = jnp.clip(index, 0, last) - _starts(call, mapped, operand.shape, index.dtype)
    room = jnp.asarray([operand.shape[d] - sizes[d] for d in mapped], index.dtype)
    mine = jnp.all((local >= 0) & (local <= room), axis=-1)
    params = call.params | {"mode": _CLIP, "fill_value": None, "unique_indices": False, "indices_are_sorted": False}
    (found,) = call.bind(params, [operand, local])
    filled = call.params["mode"] == _FILL
    result = jnp.where(_spread(mine & inside if filled else mine, numbers, found.shape), found, jnp.zeros((), found.dtype))
    if filled:
        fills = ~inside & _at_zero(call, 0, mapped)
        fill = _fill_value(call.params["fill_value"], found.dtype)
        result = jnp.where(_spread(fills, numbers, found.shape), fill, result)
    return [result]


def shifted_scatter(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Each device takes the updates that fall into its part; indices are shifted to it, those outside are dropped."""
    operand, indices, updates = keep_operand_once(call, operands) if call.primitive in _LAX else operands
    mapped = call.params["dimension_numbers"].scatter_dims_to_operand_dims
    index = _signed(indices, max(call.avals_in[0].shape, default=0))
    if call.params["mode"] == _CLIP:
        extent = _window_extents(call)
        last = jnp.asarray([call.avals_in[0].shape[d] - extent[d] for d in mapped], index.dtype)
        index = jnp.clip(index, 0, last)
    local = index - _starts(call, mapped, operand.shape, index.dtype)
    call = _with(call, call.params | {"mode": _FILL, "indices_are_sorted": False})
    if local.size == len(mapped):
        return _single(call, operand, local, updates, mapped)
    return add_scattered(call, [operand, local, updates])


def _single(call: Call, operand: Any, local: Any, updates: Any, mapped: Sequence[int]) -> list[Any]:
    """A scatter of one window, kept within this device's part, and undone where it is not this device's.

    XLA merges such a scatter with the slice that made the part, and then bounds the index by the whole array.
    """
    extent = _window_extents(call)
    room = jnp.asarray([operand.shape[d] - min(extent[d], operand.shape[d]) for d in mapped], local.dtype)
    mine = jnp.all((local >= 0) & (local <= room))
    (found,) = add_scattered(call, [operand, jnp.clip(local, 0, room), updates])
    return [jnp.where(mine, found, operand)]


def keep_operand_once(call: Call, operands: Sequence[Any]) -> list[Any]:
    """When updates are cut along a dimension that the result lacks, the operand is kept on index 0 there, zero elsewhere."""
    lacking = call.rule.in_operands - call.rule.in_results
    axes = tuple(a for f, axes in call.strategy.cuts if f in lacking for a in axes)
    if not axes:
        return list(operands)
    operand = jnp.asarray(operands[0])
    return [jnp.where(call.place.index(axes) == 0, operand, jnp.zeros_like(operand)), *operands[1:]]


def add_scattered(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The scatter itself. Its parameters hold a computation in the traced dtype, so one that is held wider is built anew."""
    build = _LAX.get(call.primitive)
    if not call.wide or build is None:
        return list(call.bind(call.params, operands))
    flags = {k: call.params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    operand, indices, updates = operands
    return [build(operand, indices, updates, call.params["dimension_numbers"], **flags)]


def _with(call: Call, params: dict[str, Any]) -> Call:
    return Call(**{**call.__dict__, "params": params})


def _signed(indices: Any, extent: int) -> Any:
    """Indices in a signed type that holds every bound, and that shifting cannot wrap."""
    indices = jnp.asarray(indices)
    wide = indices.dtype.itemsize == 8 or extent > jnp.iinfo(jnp.int32).max or indices.dtype == jnp.uint32
    signed = jax.dtypes.canonicalize_dtype(jnp.int64 if wide else jnp.int32)
    if indices.dtype.kind == "u" and indices.dtype.itemsize >= signed.itemsize:
        indices = jnp.minimum(indices, jnp.asarray(jnp.iinfo(signed).max, indices.dtype))
    return indices.astype(signed)


def _starts(call: Call, mapped: Sequence[int], shape: Sequence[int], dtype: Any) -> Any:
    """Where this device's part begins along each indexed dimension."""
    starts = []
    for d in mapped:
        cut = [f for f in call.rule.operands[0][d] if call.strategy.axes(f) and call.rule.method[f] != "plain"]
        starts.append(call.start(cut[0], shape[d])[0] if cut else 0)
    return jnp.stack([jnp.asarray(s, dtype) for s in starts]) if starts else jnp.zeros((0,), dtype)


def _at_zero(call: Call, operand: int, mapped: Sequence[int]) -> Any:
    """Whether this device is the first along all axes that cut an indexed dimension."""
    axes = tuple(a for d in mapped for f in call.rule.operands[operand][d] if call.rule.method[f] != "plain" for a in call.strategy.axes(f))
    return call.place.index(axes) == 0 if axes else True


def _spread(mask: Any, numbers: Any, shape: tuple[int, ...]) -> Any:
    """A mask over the indices, laid out over the gathered result."""
    batch = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    return lax.broadcast_in_dim(mask, shape, batch)


def _fill_value(fill: Any, dtype: Any) -> Any:
    """The value that a filling gather reads out of bounds; by default NaN, or the extreme of an integer type."""
    if fill is not None:
        return jnp.asarray(fill, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return jnp.asarray(jnp.iinfo(dtype).min, dtype)
    return jnp.asarray(True if dtype == jnp.bool_ else jnp.iinfo(dtype).max, dtype)


def _window_extents(call: Call) -> dict[int, int]:
    """Extent of an update's window along each dimension of the operand, by global shapes."""
    numbers, updates = call.params["dimension_numbers"], call.avals_in[2].shape
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(call.avals_in[0].ndim) if d not in gone]
    shown = dict(zip(kept, (updates[w] for w in numbers.update_window_dims), strict=True))
    return {d: shown.get(d, 1) for d in range(call.avals_in[0].ndim)}
