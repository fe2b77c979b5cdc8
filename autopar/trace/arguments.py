"""The arguments of a call as flat leaves: what is traced, what is static, and what each leaf is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import UsageError
from autopar.trace import compat


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A static argument: no leaf, part of the tree. `1`, `1.0` and `True` are three different ones."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and type(self.value) is type(other.value) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True)
class Signature:
    """What a call's arguments look like: the tree, avals of the traced leaves, and the leaves that are static.

    Hashable: two calls with equal signatures run the same program. `positions` are the places of the traced leaves.
    """

    tree: Any
    avals: tuple[tuple[tuple[int, ...], str, bool], ...]
    positions: tuple[int, ...]
    statics: tuple[tuple[int, Any], ...]

    def rebuild(self, leaves: Sequence[Any], with_static: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with `leaves` in the traced places, static arguments among them or left out."""
        every: list[Any] = [None] * self.tree.num_leaves
        for i, value in self.statics:
            every[i] = value
        for i, leaf in zip(self.positions, leaves, strict=True):
            every[i] = leaf
        args, kwargs = jax.tree.unflatten(self.tree, every)
        return (
            tuple(a.value if isinstance(a, Static) else a for a in args if with_static or not isinstance(a, Static)),
            {k: v.value if isinstance(v, Static) else v for k, v in kwargs.items() if with_static or not isinstance(v, Static)},
        )


class FlatFunction:
    """A function of a call's traced leaves that returns those of its result, which, once traced, it can `rebuild`."""

    def __init__(self, function: Callable[..., Any], signature: Signature):
        self.function, self.signature = function, signature
        self.tree: Any = None
        self.positions: tuple[int, ...] = ()
        self.statics: tuple[tuple[int, Any], ...] = ()
        self.changed = False
        """Whether the function changed its arguments in place."""

    def __call__(self, *leaves: Any) -> list[Any]:
        args, kwargs = self.signature.rebuild(leaves)
        before = jax.tree.leaves((args, kwargs))
        result, self.tree = jax.tree.flatten(self.function(*args, **kwargs))
        after = jax.tree.leaves((args, kwargs))
        self.changed = len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))
        self.positions = tuple(i for i, r in enumerate(result) if compat.is_array_like(r))
        self.statics = tuple((i, r) for i, r in enumerate(result) if not compat.is_array_like(r))
        return [result[i] for i in self.positions]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The result's tree with `leaves` as its arrays."""
        every: list[Any] = [None] * self.tree.num_leaves
        for i, value in self.statics:
            every[i] = value
        for i, leaf in zip(self.positions, leaves, strict=True):
            every[i] = leaf
        return jax.tree.unflatten(self.tree, every)


def split(
    args: Sequence[Any], kwargs: Mapping[str, Any], static_argnums: Sequence[int] = (), static_argnames: Sequence[str] = ()
) -> tuple[list[Any], Signature]:
    """The traced leaves of a call and its signature. Hashable leaves that are no arrays are static, as in equinox models.

    Raises `UsageError` for a leaf that is neither an array nor hashable, or that JAX cannot hold, naming its path.
    """
    wrapped = _wrap(args, kwargs, static_argnums, static_argnames)
    leaves, tree = jax.tree.flatten(wrapped)
    traced, positions, statics, avals = [], [], [], []
    for i, leaf in enumerate(leaves):
        if compat.is_array_like(leaf):
            spec = _abstract(leaf, i, wrapped)
            traced.append(leaf)
            positions.append(i)
            avals.append((tuple(spec.shape), compat.dtype_name(spec.dtype), bool(spec.weak_type)))
        else:
            _check_hashable(leaf, i, wrapped)
            statics.append((i, leaf))
    return traced, Signature(tree, tuple(avals), tuple(positions), tuple(statics))


def _wrap(args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int], names: Sequence[str]) -> tuple[Any, Any]:
    static = {n + len(args) if n < 0 else n for n in numbers}
    for n in static:
        if n < len(args):
            _check_static(args[n], f"argument {n}")
    for k in names:
        if k in kwargs:
            _check_static(kwargs[k], f"argument `{k}`")
    return (
        tuple(Static(a) if i in static else a for i, a in enumerate(args)),
        {k: Static(v) if k in names else v for k, v in kwargs.items()},
    )


def _check_static(value: Any, where: str) -> None:
    try:
        hash(value)
    except Exception:
        raise UsageError(
            f"{where} is static but {type(value).__name__} is not hashable, so calls with it cannot be told apart. "
            "Pass a hashable value (a tuple instead of a list), or leave the argument out of static_argnums / static_argnames."
        ) from None


def _abstract(leaf: Any, index: int, wrapped: Any) -> jax.ShapeDtypeStruct:
    """A leaf's shape and dtype."""
    try:
        return compat.abstract(leaf)
    except OverflowError:
        kind = jax.dtypes.canonicalize_dtype(int)
        more = ", or turn on 64 bits: jax.config.update('jax_enable_x64', True)" if kind == "int32" else ""
        raise UsageError(
            f"the argument leaf at {_path(index, wrapped)} is {leaf}, which {kind} cannot hold. Pass a float or make it static{more}."
        ) from None
    except TypeError:
        raise UsageError(
            f"the argument leaf at {_path(index, wrapped)} is an array of dtype {getattr(leaf, 'dtype', type(leaf).__name__)}, which JAX "
            "cannot hold. Turn it into numbers, or make the argument static."
        ) from None


def _path(index: int, wrapped: Any) -> str:
    """Where a leaf stands among the arguments: `args[0]['w']`, `kwargs['rate']`."""
    path = jax.tree_util.tree_flatten_with_path(wrapped)[0][index][0]
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def _check_hashable(leaf: Any, index: int, wrapped: Any) -> None:
    try:
        hash(leaf)
    except Exception:
        raise UsageError(
            f"the argument leaf at {_path(index, wrapped)} is a {type(leaf).__name__}: neither an array nor hashable, so it can be neither "
            "traced nor static. Register its class as a pytree, turn it into arrays, or pass it through a closure."
        ) from None


def names(function: Callable[..., Any], signature: Signature) -> tuple[str, ...]:
    """A path for each traced leaf, from the function's own parameter names: `state.params['w']`."""
    every: list[Any] = list(range(signature.tree.num_leaves))
    wrapped = jax.tree.unflatten(signature.tree, every)
    parameters = _parameter_names(function, len(wrapped[0]))
    found = {}
    for path, i in jax.tree_util.tree_flatten_with_path(wrapped)[0]:
        if path[0].idx == 0:
            head, rest = parameters[path[1].idx], path[2:]
        else:
            head, rest = str(path[1].key), path[2:]
        found[i] = head + jax.tree_util.keystr(rest)
    return tuple(found[i] for i in signature.positions)


def _parameter_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else f"arg{i}" for i in range(count)]
