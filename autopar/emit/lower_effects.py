"""Ops that act on the host (printing, logging, callbacks with side effects): they run once, with whole operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.emit.place import Bind, Place
from autopar.errors import UsageError
from autopar.ir.dtypes import is_key
from autopar.ir.graph import Op

_HOST = frozenset({"io_callback", "debug_callback", "debug_print", "python_callback"})
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def acts_on_host(op: Op) -> bool:
    """Whether running `op` on every device would show: it, or something in its body, calls the host for an effect."""
    return op.effects and any(o.primitive in _HOST for o in _walk(op))


def once(bind: Bind, op: Op, params: dict[str, Any], operands: Sequence[Any], place: Place) -> list[Any]:
    """The op on the first device of the mesh alone, its results handed to all others.

    Raises `UsageError` where the effects are ordered: JAX orders them on one device only.
    """
    if any(o.param("ordered") is True or "Ordered" in str(o.param("effect")) for o in _walk(op)):
        raise UsageError(
            f"`{op.primitive}`{f' at {op.source}' if op.source else ''} keeps the order of its effects, which JAX does not support on "
            "several devices. Use ordered=False, or a mesh of one device."
        )
    results = jax.eval_shape(lambda xs: bind(params, xs), list(operands))
    sent = [r for r in results if r.dtype != jax.dtypes.float0]

    def here(xs: Sequence[Any]) -> list[Any]:
        return [_as_bits(y) for y in bind(params, xs) if y.dtype != jax.dtypes.float0]

    def elsewhere(xs: Sequence[Any]) -> list[Any]:
        return [jnp.zeros(b.shape, b.dtype) for b in jax.eval_shape(lambda: [_as_bits(_zeros(r)) for r in sent])]

    bits = lax.cond(place.index(place.mesh.names) == 0, here, elsewhere, list(operands))
    received = iter(lax.psum(bits, place.mesh.names) if bits else ())
    return [np.zeros(r.shape, r.dtype) if r.dtype == jax.dtypes.float0 else _from_bits(next(received), r) for r in results]


def _walk(op: Op) -> Iterator[Op]:
    yield op
    for graph in op.subgraphs:
        yield from graph.walk()


def _zeros(like: Any) -> Any:
    if is_key(str(like.dtype)):
        return jax.random.key(0, impl=_impl(like)) if not like.shape else jax.random.split(jax.random.key(0, impl=_impl(like)), like.shape)
    return jnp.zeros(like.shape, like.dtype)


def _impl(like: Any) -> Any:
    return {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[str(like.dtype)[4:-1]]


def _as_bits(x: Any) -> Any:
    """A value as unsigned integers: their sum with zeros is exact, whatever the value."""
    if is_key(str(x.dtype)):
        return jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_as_bits(x.real), _as_bits(x.imag)])
    if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def _from_bits(bits: Any, like: Any) -> Any:
    if is_key(str(like.dtype)):
        return jax.random.wrap_key_data(bits, impl=_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        part = jax.ShapeDtypeStruct(like.shape, jnp.finfo(like.dtype).dtype)
        return lax.complex(_from_bits(bits[0], part), _from_bits(bits[1], part))
    if like.dtype == bool or jnp.issubdtype(like.dtype, jnp.integer):
        return bits.astype(like.dtype)
    return lax.bitcast_convert_type(bits, like.dtype)
