"""Collectives along axes that are run as a batch, in terms of those that JAX has for batches: gathers and sums along one axis at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.emit.collectives import permute
from autopar.ir.sharding import Axes

Form = Callable[[Any], Any]


def batched(primitive: str, params: Mapping[str, Any], names: Axes) -> Form | None:
    """What to run in the place of a collective, on its operand; None where JAX runs it as a batch by itself.

    `names` are the region's axes in the order of its mesh.
    """
    make, axes = _FORMS.get(primitive), _axes(params)
    if make is None or (len(axes) == 1 and primitive != "ppermute"):
        return None
    return partial(make, axes=_in_order(axes, names) if primitive == "ppermute" else axes, params=params)


def on_mesh(primitive: str, params: Mapping[str, Any], names: Axes, sizes: Mapping[str, int]) -> Form | None:
    """The same on the plan's own mesh, whose axes with `sizes` may stand in another order: permutations count in that of the mesh."""
    axes = _in_order(_axes(params), names)
    if primitive != "ppermute" or len(axes) == 1:
        return None
    return lambda x: permute(x, axes, params["perm"], sizes)


def _axes(params: Mapping[str, Any]) -> Axes:
    axes = params.get("axis_name")
    return axes if isinstance(axes, tuple) else (axes,) if isinstance(axes, str) else ()


def _in_order(axes: Axes, names: Axes) -> Axes:
    return tuple(a for a in names if a in axes)


def _stacked(x: Any, axes: Axes) -> Any:
    """All devices' operands, those along the last axis side by side, in a new first dimension."""
    for a in reversed(axes):
        x = lax.all_gather(x, a, axis=0)
    return jnp.reshape(x, (-1, *jnp.shape(x)[len(axes) :]))


def _all_gather(x: Any, *, axes: Axes, params: Mapping[str, Any]) -> Any:
    dim, every = params["all_gather_dimension"], _stacked(x, axes)
    moved = jnp.moveaxis(every, 0, dim)
    shape = jnp.shape(x)
    return jnp.reshape(moved, (*shape[:dim], -1, *shape[dim + 1 :])) if params["tiled"] else moved


def _reduce_scatter(x: Any, *, axes: Axes, params: Mapping[str, Any]) -> Any:
    dim = params["scatter_dimension"]
    return _part(lax.psum(x, axes), axes, dim, params["axis_size"], params["tiled"])


def _all_to_all(x: Any, *, axes: Axes, params: Mapping[str, Any]) -> Any:
    """Device i takes block i of everyone."""
    split, concat, every = params["split_axis"], params["concat_axis"], _stacked(x, axes)
    mine = jnp.moveaxis(_part(every, axes, split + 1, jnp.shape(every)[0], params["tiled"]), 0, concat)
    if not params["tiled"]:
        return mine
    shape = jnp.shape(mine)
    return jnp.reshape(mine, (*shape[:concat], -1, *shape[concat + 2 :]))


def _part(x: Any, axes: Axes, dim: int, count: int, tiled: bool) -> Any:
    """This device's block of a dimension; a dimension that is not tiled goes."""
    size = jnp.shape(x)[dim] // count
    block = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
    return block if tiled else lax.squeeze(block, (dim,))


def _ppermute(x: Any, *, axes: Axes, params: Mapping[str, Any]) -> Any:
    """What the source of this device has; zero where it has none."""
    every, here = _stacked(x, axes), lax.axis_index(axes)
    pairs: Sequence[tuple[int, int]] = params["perm"]
    source = sum((jnp.where(here == to, int(source), 0) for source, to in pairs), jnp.zeros((), jnp.int32))
    found = lax.squeeze(lax.dynamic_slice_in_dim(every, source, 1, 0), (0,))
    receives = sum((here == to for _, to in pairs), jnp.zeros((), bool))
    return jnp.where(receives, found, jnp.zeros_like(found))


_FORMS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
}
