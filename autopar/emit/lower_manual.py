"""A user's own `shard_map` region: on its own axes where the plan has them, else all of its devices' work on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from autopar.emit.batched import batched, on_mesh
from autopar.emit.place import Bind, Call
from autopar.errors import AutoparError, UsageError
from autopar.ir.graph import Op
from autopar.ir.sharding import Axes
from autopar.rules.inside import own_axes
from autopar.trace import compat

Dims = Sequence[Axes]


def own_region(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The body on this device's part; axes that the mesh lacks are run as a batch."""
    kept = own_axes(call.op, call.strategy, call.place.mesh)
    lacking = [a for a in call.op.param("axis_sizes") if a[0] not in kept]
    names = tuple(a for a, _ in call.op.param("axis_sizes"))
    here = partial(on_mesh, names=names, sizes=call.place.mesh.by_name)
    body = _named(call.equation, lacking, partial(batched, names=names) if lacking else here)
    with _scopes(call.ids):
        results = _told(call.op, body, operands)
    return [x[(0,) * (len(call.op.param("axis_sizes")) - len(kept))] for x in results]


@contextmanager
def _scopes(ids: Sequence[str]) -> Iterator[None]:
    """All of a region's collectives share their names: their bytes are those of the plan together."""
    with ExitStack() as stack:
        for name in ids:
            stack.enter_context(jax.named_scope(f"autopar.{name}"))
        yield


def whole_region(equation: Any, op: Op) -> Bind:
    """The region on whole operands, as a function of parameters (which do not matter) and operands: each of its axes is a batch."""
    sizes, ins, outs = op.param("axis_sizes"), op.param("in_dims"), op.param("out_dims")
    names = [a for a, _ in sizes]
    form, leading = partial(batched, names=tuple(names)), [[a for a in names if any(a in d for d in dims)] for dims in ins]

    def bind(params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
        parts = [_split(x, dims, dict(sizes)) for x, dims in zip(operands, ins, strict=True)]
        found = _told(op, _named(equation, sizes, form, leading), parts)
        return [_joined(x, dims, names) for x, dims in zip(found, outs, strict=True)]

    return bind


def _named(
    equation: Any, axes: Sequence[tuple[str, int]], form: Callable[..., Any], leading: Sequence[Sequence[str]] | None = None
) -> Callable[..., Any]:
    """The body run as a batch along `axes`, which lead the results; operand n has the axes in `leading[n]` in front.

    `form` gives what runs in the place of some collectives.
    """
    body: Callable[..., Any] = compat.body_of(equation, form)
    for name, size in reversed(axes):
        along = [0 if leading is not None and name in mine else None for mine in leading or equation.invars]
        body = jax.vmap(body, in_axes=tuple(along), out_axes=0, axis_name=name, axis_size=size)
    return body


def _told(op: Op, body: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    """The body's results; what JAX cannot run as a batch is an error with the region's line."""
    try:
        return list(body(*operands))
    except AutoparError:
        raise
    except Exception as error:
        axes = ", ".join(f"{a}={n}" for a, n in op.param("axis_sizes"))
        raise UsageError(
            f"the `shard_map`{f' at {op.source}' if op.source else ''} cannot run on this plan's mesh: {type(error).__name__}: {error}. "
            f"Plan for a mesh with its own axes ({axes}), or write that part of the step for whole arrays."
        ) from error


def _split(x: Any, dims: Dims, sizes: dict[str, int]) -> Any:
    """An operand with the axes that cut it in front, in the order of `sizes`."""
    shape: list[int] = []
    at: dict[str, int] = {}
    for n, axes in zip(jnp.shape(x), dims, strict=True):
        for a in axes:
            at[a] = len(shape)
            shape.append(sizes[a])
            n //= sizes[a]
        shape.append(n)
    order = [at[a] for a in sizes if a in at]
    return jnp.transpose(jnp.reshape(x, shape), [*order, *(d for d in range(len(shape)) if d not in order)])


def _joined(x: Any, dims: Dims, names: Sequence[str]) -> Any:
    """A result whose leading dimensions are all axes, put together; along axes that do not cut it, the first device's."""
    used = [a for axes in dims for a in axes]
    x = x[tuple(slice(None) if a in used else 0 for a in names)]
    left = [a for a in names if a in used]
    local = jnp.shape(x)[len(left) :]
    order: list[int] = []
    for d, axes in enumerate(dims):
        order += [*(left.index(a) for a in axes), len(left) + d]
    sizes = dict(zip(left, jnp.shape(x), strict=False))
    shape = [n * prod(sizes[a] for a in axes) for n, axes in zip(local, dims, strict=True)]
    return jnp.reshape(jnp.transpose(x, order), shape)

