"""Moves as JAX: what each elementary conversion does to the local part of a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.sharding import Axes, Move, Reduction

Index = Callable[[Axes], Any]


def apply_move(move: Move, x: Any, size: int, index: Index) -> Any:
    """The local part after `move`. `size` is the number of devices along its axes, `index` a device's position along axes.

    Runs under `shard_map`. Dtypes are left alone: the caller widens and narrows partial sums.
    """
    match move.kind:
        case "all_gather":
            return _as_numbers(lambda y: lax.all_gather(y, move.axes, axis=move.dim, tiled=True), x)
        case "all_to_all":
            return _as_numbers(
                lambda y: lax.all_to_all(y, move.axes, split_axis=move.to_dim, concat_axis=move.dim, tiled=True), x
            )
        case "all_reduce":
            return _all_reduce(move.reduction, x, move.axes)
        case "reduce_scatter":
            return lax.psum_scatter(x, move.axes, scatter_dimension=move.to_dim, tiled=True)
        case "slice":
            part = x.shape[move.dim] // size
            return lax.dynamic_slice_in_dim(x, index(move.axes) * part, part, move.dim)
        case "to_partial":
            if move.reduction != "sum":
                return x
            return jnp.where(index(move.axes) == 0, x, jnp.zeros_like(x))


def permute(x: Any, axes: Axes, pairs: Sequence[tuple[int, int]], sizes: Mapping[str, int]) -> Any:
    """What the source of this device has, zero where it has none. `pairs` count devices along `axes`, major to minor, in any order;
    JAX counts them in the order of the mesh, which is that of `sizes`.
    """
    order, shape = [a for a in sizes if a in axes], [sizes[a] for a in axes]

    def counted(device: int) -> int:
        place = dict(zip(axes, np.unravel_index(device, shape), strict=True))
        return int(np.ravel_multi_index([place[a] for a in order], [sizes[a] for a in order]))

    return lax.ppermute(x, tuple(order) if len(order) > 1 else order[0], [(counted(a), counted(b)) for a, b in pairs])


def _as_numbers(exchange: Callable[[Any], Any], x: Any) -> Any:
    """Booleans travel as bytes, since some backends have no collective for them."""
    return exchange(x.astype(jnp.uint8)).astype(bool) if x.dtype == bool else exchange(x)


def _all_reduce(kind: Reduction, x: Any, axes: Axes) -> Any:
    if kind == "sum":
        return lax.psum(x, axes)
    if kind in ("or", "and"):
        reduce = lax.pmax if kind == "or" else lax.pmin
        return reduce(x.astype(jnp.uint8), axes).astype(x.dtype)
    return lax.pmax(x, axes) if kind == "max" else lax.pmin(x, axes)


def axis_index(axes: Axes) -> Any:
    """Row-major position of this device along `axes`."""
    return lax.axis_index(axes if len(axes) > 1 else axes[0])


def named(identifier: str, compute: Callable[[], Any]) -> Any:
    """Run `compute` inside the scope `autopar.<identifier>`, by which the compiled collective is found again."""
    if not identifier:
        return compute()
    with jax.named_scope(f"autopar.{identifier}"):
        return compute()
