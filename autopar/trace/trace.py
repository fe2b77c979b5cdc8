"""Trace a user's function to a graph, with what is needed to call it again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autopar.errors import AutoparError, TraceError
from autopar.ir.graph import Graph, Op
from autopar.trace import arguments, compat
from autopar.trace.flatten import flatten
from autopar.trace.parts import Pieces
from autopar.trace.program import Program
from autopar.trace.roles import Roles, find_state


@dataclass(frozen=True, eq=False)
class Traced:
    """A function traced for one signature; `flat` is the function of its traced leaves, `closed` the jaxpr that the graph is made of.

    `pieces` say which leaves the graph has in parts, if its scans over layers are cut.
    """

    function: Callable[..., Any]
    signature: arguments.Signature
    graph: Graph
    program: Program
    roles: Roles
    flat: arguments.FlatFunction
    closed: Any = None
    pieces: Pieces = field(default_factory=Pieces)

    @property
    def out_positions(self) -> tuple[int, ...]:
        """Where the traced leaves stand among all leaves of the result."""
        return self.flat.positions

    def rebuild_output(self, leaves: Sequence[Any]) -> Any:
        """The function's output tree with `leaves` as its arrays."""
        return self.flat.rebuild(leaves)


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    axes: Mapping[str, int] | None = None,
) -> Traced:
    """Trace `function` at these arguments (arrays or `jax.ShapeDtypeStruct`). Nothing is executed.

    `axes` are the mesh axes (name -> size) that sharding constraints in the function may name. Constraints become pins, but for those
    within loops and branches with effects, which the roles' notes list. Raises `TraceError` when the function raises, with its error
    as the cause.
    """
    leaves, signature = arguments.split(args, kwargs or {}, static_argnums, static_argnames)
    flat = arguments.FlatFunction(function, signature)
    closed = _jaxpr(flat, [compat.abstract(x) for x in leaves], axes or {})
    closed, constraints = compat.without_constraints(compat.without_dead_code(closed))
    in_names = arguments.names(function, signature)
    out_names = _output_names(flat.tree, flat.positions)
    flattened = flatten(closed, in_names, out_names)
    _check_supported(flattened.graph)
    roles = _roles(signature, flat, flattened.graph)
    changed = (_changed(function),) if flat.changed else ()
    for note in changed:
        warnings.warn(note, stacklevel=2)
    roles = replace(roles, notes=(*roles.notes, *changed, *map(_dropped, constraints)))
    return Traced(function, signature, flattened.graph, flattened.program, roles, flat, closed)


def _jaxpr(flat: arguments.FlatFunction, avals: Sequence[Any], axes: Mapping[str, int]) -> Any:
    """The jaxpr, traced outside of any mesh; on one with the caller's axes where the function insists."""
    try:
        with jax.disable_jit(False):  # the program is the same under `jax.disable_jit`, loops not unrolled
            return _on_axes(flat, avals, axes)
    except AutoparError:
        raise
    except Exception as error:
        name = getattr(flat.function, "__name__", repr(flat.function))
        known = f" Mesh axes are {', '.join(axes)}; `axis_names` or a Mesh names them otherwise." if axes and "mesh" in str(error) else ""
        raise TraceError(
            f"`{name}` raised {type(error).__name__} while it was traced with {_shapes(flat.signature)}: {error}\n"
            f"It must run under jax.jit with these arguments; try `jax.make_jaxpr` on it first.{known}"
        ) from error


def _on_axes(flat: arguments.FlatFunction, avals: Sequence[Any], axes: Mapping[str, int]) -> Any:
    try:
        return compat.make_jaxpr(flat, avals)
    except Exception as error:
        if not axes or "mesh" not in str(error):
            raise
        return compat.make_jaxpr(flat, avals, axes)


def _check_supported(graph: Graph, inside: str = "") -> None:
    """Raise `TraceError` for a region written per device where it cannot be one op of the plan's, or does what no plan can count."""
    for op in graph.ops:
        if op.primitive == "shard_map" and inside:
            raise TraceError(
                f"the `shard_map` at {op.source} stands inside {inside}, which stays one op. Take it out, or write that part of the "
                "step for whole arrays."
            )
        if op.primitive == "shard_map":
            _check_region(op)
        where = "another one" if op.primitive == "shard_map" else f"a `{op.primitive}` with effects at {op.source}"
        for inner in op.subgraphs:
            _check_supported(inner, where)


def _check_region(region: Op) -> None:
    for op in (o for body in region.subgraphs for o in body.walk()):
        if op.primitive in compat.PER_DEVICE_ONLY or op.param("axis_index_groups") is not None:
            raise TraceError(
                f"`{op.primitive}` at {op.source or region.source}, in the `shard_map` at {region.source}, is not supported there. Use "
                "psum, all_gather, psum_scatter, all_to_all or ppermute over whole axes, or write that part of the step for whole arrays."
            )


def _changed(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", repr(function))
    return (
        f"`{name}` changes an argument in place, which is lost under jax.jit and here: return the new value. "
        "With flax nnx, split the model and return its state: `nnx.split`, `nnx.merge`."
    )


def _dropped(line: str) -> str:
    where = line or "an unknown line"
    return (
        f"the sharding constraint at {where} is inside a `shard_map`, or a loop or branch with effects, and not used: the plan decides; "
        "`pins` fixes arguments"
    )


def _shapes(signature: arguments.Signature) -> str:
    shown = [f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype, _ in signature.avals] or ["no arrays"]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more leaves" if len(shown) > 6 else "")


def _output_names(tree: Any, positions: Sequence[int]) -> tuple[str, ...]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, list(range(tree.num_leaves))))[0]
    found = {i: "out" + jax.tree_util.keystr(path) for path, i in paths}
    return tuple(found[i] for i in positions)


def _roles(signature: arguments.Signature, flat: arguments.FlatFunction, graph: Graph) -> Roles:
    """Roles over the flat traced leaves; static leaves are left out of both trees."""

    def indexed(tree: Any, positions: Sequence[int]) -> Any:
        every: list[Any] = [None] * tree.num_leaves
        for k, i in enumerate(positions):
            every[i] = k
        return jax.tree.unflatten(tree, every)

    args, kwargs = indexed(signature.tree, signature.positions)
    outputs = indexed(flat.tree, flat.positions)
    in_avals = [(graph.avals[v].shape, graph.avals[v].dtype) for v in graph.inputs]
    out_avals = [(graph.aval(o).shape, graph.aval(o).dtype) for o in graph.outputs]
    return find_state((*args, *kwargs.values()), outputs, in_avals, out_avals)
