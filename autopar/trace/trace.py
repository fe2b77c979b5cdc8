"""Trace a user's function to a graph, with what is needed to call it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import AutoparError, TraceError
from autopar.ir.graph import Graph
from autopar.trace import arguments, compat
from autopar.trace.flatten import flatten
from autopar.trace.program import Program
from autopar.trace.roles import Roles, find_state


@dataclass(frozen=True, eq=False)
class Traced:
    """A function traced for one signature.

    `out_tree` and `out_statics` rebuild the output from its array leaves (`out_positions` gives their places).
    """

    function: Callable[..., Any]
    signature: arguments.Signature
    graph: Graph
    program: Program
    roles: Roles
    out_tree: Any
    out_positions: tuple[int, ...]
    out_statics: tuple[tuple[int, Any], ...]

    def rebuild_output(self, leaves: Sequence[Any]) -> Any:
        """The function's output tree with `leaves` as its arrays."""
        every: list[Any] = [None] * self.out_tree.num_leaves
        for i, value in self.out_statics:
            every[i] = value
        for i, leaf in zip(self.out_positions, leaves, strict=True):
            every[i] = leaf
        return jax.tree.unflatten(self.out_tree, every)


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> Traced:
    """Trace `function` at these arguments (arrays or `jax.ShapeDtypeStruct`). Nothing is executed.

    Raises `TraceError` when the function raises, with the original error as its cause.
    """
    leaves, signature = arguments.split(args, kwargs or {}, static_argnums, static_argnames)
    out: dict[str, Any] = {}

    def flat(*traced: Any) -> list[Any]:
        positional, keyword = signature.rebuild(traced)
        result, out["tree"] = jax.tree.flatten(function(*positional, **keyword))
        out["positions"] = tuple(i for i, r in enumerate(result) if compat.is_array_like(r))
        out["statics"] = tuple((i, r) for i, r in enumerate(result) if not compat.is_array_like(r))
        return [r for r in result if compat.is_array_like(r)]

    try:
        closed = compat.make_jaxpr(flat, [compat.abstract(x) for x in leaves])
    except AutoparError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise TraceError(
            f"`{name}` raised {type(error).__name__} while it was traced with {_shapes(signature)}: {error}\n"
            "It must run under jax.jit with these arguments; try `jax.make_jaxpr` on it first."
        ) from error
    in_names = arguments.names(function, signature)
    out_names = _output_names(out["tree"], out["positions"])
    flattened = flatten(closed, in_names, out_names)
    roles = _roles(signature, out, flattened.graph)
    return Traced(
        function, signature, flattened.graph, flattened.program, roles, out["tree"], out["positions"], out["statics"]
    )


def _shapes(signature: arguments.Signature) -> str:
    shown = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype, _ in signature.avals]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more leaves" if len(shown) > 6 else "")


def _output_names(tree: Any, positions: Sequence[int]) -> tuple[str, ...]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(tree.num_leaves))))[0]
    found = {i: "out" + jax.tree_util.keystr(path) for path, i in paths}
    return tuple(found[i] for i in positions)


def _roles(signature: arguments.Signature, out: Mapping[str, Any], graph: Graph) -> Roles:
    """Roles over the flat traced leaves; static leaves are left out of both trees."""

    def indexed(tree: Any, positions: Sequence[int]) -> Any:
        every: list[Any] = [None] * tree.num_leaves
        for k, i in enumerate(positions):
            every[i] = k
        return jax.tree.unflatten(tree, every)

    args, kwargs = indexed(signature.tree, signature.positions)
    outputs = indexed(out["tree"], out["positions"])
    in_avals = [(graph.avals[v].shape, graph.avals[v].dtype) for v in graph.inputs]
    out_avals = [(graph.aval(o).shape, graph.aval(o).dtype) for o in graph.outputs]
    return find_state((*args, *kwargs.values()), outputs, in_avals, out_avals)
