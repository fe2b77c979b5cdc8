"""The one file that touches `jax.extend` or private JAX: jaxprs seen through a few plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import source_info_util

_OPENED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
}
_LIBRARIES = ("site-packages", "dist-packages", "autopar/trace/")
CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})


def make_jaxpr(function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """The closed jaxpr of a function of flat arguments. Nothing is executed."""
    return jax.jit(function).trace(*avals).jaxpr


def opened(equation: Any) -> Any | None:
    """The inner jaxpr of a call that tracing opens (jit, custom_jvp, custom_vjp, checkpoint), closed; else None."""
    key = _OPENED.get(equation.primitive.name)
    if key is None or key not in equation.params:
        return None
    inner = equation.params[key]
    return inner if hasattr(inner, "jaxpr") else jex.ClosedJaxpr(inner, ())


def call_name(equation: Any) -> str:
    """Name of the function behind a call equation, as in `jit(gelu)`."""
    return str(equation.params.get("name", ""))


def inner_jaxprs(equation: Any) -> tuple[Any, ...]:
    """The closed jaxprs among an equation's parameters: bodies of scan, while and cond."""
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item)
            elif isinstance(item, jex.Jaxpr) and not item.constvars:
                found.append(jex.ClosedJaxpr(item, ()))
    return tuple(found)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def name_stack(equation: Any) -> str:
    """The equation's own name stack, `jvp` and `transpose` wrappers included."""
    return str(equation.source_info.name_stack)


def source_line(equation: Any) -> str:
    """`file:line` of the innermost frame that is the user's own, libraries left out where possible; or an empty string."""
    traceback = equation.source_info.traceback
    first = ""
    for frame in source_info_util.user_frames(traceback) if traceback is not None else ():
        line = f"{frame.file_name}:{frame.start_line}"
        if not any(part in frame.file_name for part in _LIBRARIES):
            return line
        first = first or line
    return first


def dtype_name(dtype: Any) -> str:
    """A dtype's name: `float32`, `key<fry>`, `float0`."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def bind(equation: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Apply a traced equation's primitive with other operands and parameters, in its own context; always a list of results."""
    primitive = equation.primitive
    params = primitive.get_bind_params(params)
    with equation.ctx.manager:
        out = primitive.bind(*operands, **params)
    return list(out) if primitive.multiple_results else [out]


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array, a NumPy value, a Python scalar or a spec; shardings are dropped."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_array_like(leaf: Any) -> bool:
    """Whether `jax.jit` would trace this leaf."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))
