"""One op on one device: the primitive on local operands, by the method of the factors that are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.emit.localise import localise
from autopar.emit.lower_effects import acts_on_host, once
from autopar.emit.lower_halo import windows_by_blocks
from autopar.emit.lower_index import add_scattered, keep_operand_once, masked_lookup, shifted_scatter
from autopar.emit.lower_manual import own_region, whole_region
from autopar.emit.lower_random import bits_of_part
from autopar.emit.lower_reduce import pair_by_blocks, prefix_by_blocks
from autopar.emit.place import Bind, Call, Place
from autopar.errors import CheckError
from autopar.ir.dtypes import accumulation_dtype
from autopar.ir.graph import MATMULS, Aval, Constant, Op, Operand
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, operand_sharding, result_sharding
from autopar.rules import local_function
from autopar.trace import compat

__all__ = ["METHODS", "Place", "lower"]

_WIDEN_AFTER = ("gather", "concatenate", "reshape", "transpose", "broadcast_in_dim")


def lower(
    bind: Bind,
    op: Op,
    params: dict[str, Any],
    rule: ShardingRule,
    strategy: Strategy,
    avals_in: Sequence[Aval],
    avals_out: Sequence[Aval],
    operands: Sequence[Any],
    place: Place,
    *,
    as_written: bool = False,
    equation: Any = None,
    ids: tuple[str, ...] = (),
    received: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    """The local results of `op` under `strategy`, from local operands in the shardings that the strategy needs.

    `params` are JAX's own, as is `equation`; `ids` names the collectives that the op itself contains, `received` what those of
    other ops have brought already. Narrow floats that are partial sums arrive and leave in float32, and what makes them is computed in
    float32, unless `as_written`. Raises `CheckError` where a local operand or result is not what rule and strategy say.
    """
    bind = whole_region(equation, op) if op.primitive == "shard_map" else bind
    bind = _on_cpu(bind) if op.primitive in MATMULS and place.platform == "cpu" else bind
    operands = [_typed(o, a, x) for o, a, x in zip(op.operands, avals_in, operands, strict=True)]
    wants = [operand_sharding(rule, strategy, n) for n in range(len(avals_in))]
    gives = [result_sharding(rule, strategy, n) for n in range(len(avals_out))]
    _check("operand", op, rule, strategy, operands, [_local(s, a, place, as_written) for s, a in zip(wants, avals_in, strict=True)])
    expected = [_local(s, a, place, as_written) for s, a in zip(gives, avals_out, strict=True)]
    wide = any(dtype != a.dtype for (_, dtype), a in zip(expected, avals_out, strict=True))
    wide = wide or any(s.local_dtype(a.dtype, as_written) != a.dtype for s, a in zip(wants, avals_in, strict=True))
    function = local_function(op, tuple(avals_in), tuple(avals_out))
    if function is not None:
        results = _users(function, op, params, operands)
    elif acts_on_host(op) and place.mesh.num_devices > 1:
        results = once(bind, op, params, operands, place)
    else:
        method = _method(op, rule, strategy)
        widen = partial(_widened, op.primitive, params, platform=place.platform)
        if wide and method != "halo":  # borders travel as narrow as they come
            params, operands = widen(operands)
        elif wide:
            params, _ = widen(operands)
        shapes = [tuple(jnp.shape(x)) for x in operands], [shape for shape, _ in expected]
        local = localise(op.primitive, params, rule, strategy, place.mesh, *shapes)
        call = Call(op, equation, bind, local, params, rule, strategy, tuple(avals_in), shapes[1], place, wide)
        call = replace(call, ids=ids, received={} if received is None else received, widen=lambda xs: widen(xs)[1] if wide else list(xs))
        results = METHODS[method](call, operands)
    if wide:
        results = [x if x.dtype == dtype else x.astype(dtype) for x, (_, dtype) in zip(results, expected, strict=True)]
    _check("result", op, rule, strategy, results, expected)
    return tuple(results)


def _plain(call: Call, operands: Sequence[Any]) -> list[Any]:
    """The primitive as it is, on local shapes."""
    if call.primitive in ("scatter-add", "scatter-sub"):
        return add_scattered(call, keep_operand_once(call, operands))
    if call.primitive == "fft":  # CPU has no transform of another layout, which a collective beside it may ask for
        return [_row_major(y) for y in call.bind(call.params, [_row_major(x) for x in operands])]
    return list(call.bind(call.params, operands))


def _row_major(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(jnp.ndim(x)))))


def _offset(call: Call, operands: Sequence[Any]) -> list[Any]:
    """Counting from the part's own start. Counted as an integer: large numbers are rounded once, as on one device."""
    d, dtype = call.params["dimension"], call.params["dtype"]
    (factor,) = call.rule.results[0][d]
    start, n = call.start(factor, call.out_shapes[0][d])
    counter = jnp.int64 if n > jnp.iinfo(jnp.int32).max else jnp.int32
    count = jax.lax.broadcasted_iota(counter, call.out_shapes[0], d) + jnp.asarray(start, counter)
    return [count.astype(dtype)]


METHODS: dict[str, Callable[[Call, Sequence[Any]], list[Any]]] = {
    "plain": _plain,
    "offset": _offset,
    "masked_sum": masked_lookup,
    "scatter": shifted_scatter,
    "bits": bits_of_part,
    "manual": own_region,
    "halo": windows_by_blocks,
    "prefix": prefix_by_blocks,
    "arg_pair": pair_by_blocks,
}


def _method(op: Op, rule: ShardingRule, strategy: Strategy) -> str:
    """The one special method among the cut factors, else plain."""
    found = {rule.method[f] for f, axes in strategy.cuts if axes} - {"plain"}
    if len(found) > 1 or not found <= METHODS.keys():
        raise CheckError(f"`{op.primitive}` cannot be lowered under strategy `{strategy}`: no lowering for {sorted(found)}.")
    return found.pop() if found else "plain"


def _widened(primitive: str, params: dict[str, Any], operands: Sequence[Any], platform: str) -> tuple[dict[str, Any], list[Any]]:
    """Parameters and operands for computing in float32 what would be a partial sum of narrow floats.

    Products of narrow operands are accumulated wide without widening the operands; what only moves elements widens them after. On CPUs
    the operands of products are widened too: XLA has no code there for a transposed product of bfloat16 that gives float32.
    """
    float32 = jnp.dtype("float32")
    forced = {"preferred_element_type"} if primitive in MATMULS else set()
    named = {k for k in ("new_dtype", "out_dtype") if params.get(k) is not None and _narrow(params[k])}
    params = params | {k: float32 for k in named | {k for k in forced if params[k] is None or _narrow(params[k])}}
    dtypes = {jnp.result_type(x) for x in operands if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}
    narrow_first = _WIDEN_AFTER if platform == "cpu" else (*MATMULS, *_WIDEN_AFTER)
    if len(dtypes) <= 1 and primitive in narrow_first:
        return params, list(operands)
    return params, [jnp.asarray(x, float32) if _narrow(jnp.result_type(x)) else x for x in operands]


def _on_cpu(bind: Bind) -> Bind:
    """A product as CPUs can run it: with a float32 result, its narrow operands are widened, which changes no number.

    `_widened` does this for partial sums over devices; sums over microbatches stand in the program as such products.
    """

    def bound(params: dict[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
        wanted = params.get("preferred_element_type")
        if wanted is None or jnp.dtype(wanted) != jnp.dtype("float32"):
            return bind(params, operands)
        return bind(params, [jnp.asarray(x, jnp.float32) if _narrow(jnp.result_type(x)) else x for x in operands])

    return bound


def _narrow(dtype: Any) -> bool:
    name = str(jnp.dtype(dtype)) if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else ""
    return accumulation_dtype(name) != name


def _users(function: Callable, op: Op, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The user's per-device function; a jitted call's own parameters mean nothing to it."""
    results = function(*operands) if op.primitive in ("jit", "pjit") else function(*operands, **params)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _typed(operand: Operand, aval: Aval, x: Any) -> Any:
    """A literal in the dtype it has in the program, whatever Python or numpy type carries it."""
    typed = not isinstance(operand, Constant) or hasattr(x, "aval") or aval.dtype == "float0"
    return x if typed else np.asarray(x, jnp.dtype(aval.dtype))


def _local(sharding: TensorSharding, aval: Aval, place: Place, as_written: bool) -> tuple[tuple[int, ...], str]:
    return sharding.local_shape(aval.shape, place.mesh), sharding.local_dtype(aval.dtype, as_written)


def _check(what: str, op: Op, rule: ShardingRule, strategy: Strategy, arrays: Sequence[Any], expected: Sequence[tuple]) -> None:
    found = [(tuple(jnp.shape(x)), compat.dtype_name(jnp.result_type(x))) for x in arrays]
    if len(found) != len(expected) or any(f != e for f, e in zip(found, expected, strict=True)):
        where = f" at {op.source}" if op.source else ""
        raise CheckError(
            f"`{op.primitive}`{where} under strategy `{strategy}` of rule `{rule}` has local {what}s {found} where {list(expected)} "
            "were expected. The rule does not fit this primitive."
        )
