"""Which inputs are state: argument subtrees whose tree, shapes and dtypes recur in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import MicrobatchError
from autopar.ir.graph import Graph
from autopar.trace.arguments import Signature

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Roles:
    """`carried` pairs (input leaf, output leaf) that hold the same piece of state; `notes` say what was ambiguous."""

    carried: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Subtree:
    path: Path
    structure: Any
    leaves: tuple[int, ...]
    avals: tuple[Any, ...]

    @property
    def shape(self) -> tuple[Any, tuple[Any, ...]]:
        return self.structure, self.avals


def find_state(arguments: Any, outputs: Any, in_avals: Sequence[Any], out_avals: Sequence[Any]) -> Roles:
    """Tie argument subtrees to output subtrees: whole ones in order first, then their children, single leaves by path.

    `arguments` is a tuple of argument trees, `outputs` the output tree; their leaves are indices into the aval lists
    (None for leaves that are not traced). A leaf that would fit several outputs equally well stays untied, and is reported; so is an
    argument that looks like state but comes back in part, or in other shapes or dtypes.
    """
    free = [s for s in _subtrees(outputs, out_avals, (), 4)]
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    notes: list[str] = []

    def tie(subtree: _Subtree) -> bool:
        options = [s for s in free if s.shape == subtree.shape and not taken.intersection(s.leaves)]
        if len(subtree.leaves) == 1:
            options = _by_path(subtree, options)
            if len(options) > 1:
                notes.append(f"argument leaf {_text(subtree.path)} fits {len(options)} outputs equally well and is not tied to any")
                return False
        if not options:
            return False
        taken.update(options[0].leaves)
        pairs.extend(zip(subtree.leaves, options[0].leaves, strict=True))
        return True

    def visit(tree: Any, path: Path, depth: int) -> None:
        subtree = _subtree(tree, in_avals, path)
        if not subtree.leaves or tie(subtree) or depth == 0:
            return
        for key, child in _children(tree):
            visit(child, (*path, key), depth - 1)

    for i, argument in enumerate(arguments):
        visit(argument, (i,), 6)
        notes.extend(_incomplete(_subtree(argument, in_avals, (i,)), argument, free, {a for a, _ in pairs}))
    return Roles(tuple(sorted(pairs)), tuple(notes))


def _incomplete(argument: _Subtree, tree: Any, outputs: Sequence[_Subtree], tied: set[int]) -> list[str]:
    """What to say of an argument that looks like state and is so in part, or not at all."""
    lost = [(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0] if leaf not in tied]
    count = len(argument.leaves)
    if not lost or count < 2:
        return []
    first = f"argument {argument.path[0]}{jax.tree_util.keystr(lost[0][0])}"
    if len(lost) < count:
        return [f"{count - len(lost)} of the {count} leaves of argument {argument.path[0]} come back and are state; {first} does not"]
    alike = next((s for s in outputs if s.structure == argument.structure), None)
    if alike is None:
        return []
    k = next(k for k, (a, b) in enumerate(zip(argument.avals, alike.avals, strict=True)) if a != b)
    changed = f"{_aval(argument.avals[k])} goes in, {_aval(alike.avals[k])} comes out"
    return [f"argument {argument.path[0]} comes back with the same tree but other shapes or dtypes ({changed}), so it is not state"]


def _aval(aval: Any) -> str:
    return f"{aval[1]}[{','.join(map(str, aval[0]))}]"


def _by_path(subtree: _Subtree, options: list[_Subtree]) -> list[_Subtree]:
    """For a single leaf: the outputs at the same key, else at the same position, else all that have its shape."""
    same = [s for s in options if s.path and subtree.path and s.path[-1] == subtree.path[-1]]
    if len(same) == 1:
        return same
    if options and not options[0].avals[0][0]:
        return []
    return same or options


def _subtrees(tree: Any, avals: Sequence[Any], path: Path, depth: int) -> list[_Subtree]:
    found = [_subtree(tree, avals, path)]
    if depth:
        for key, child in _children(tree):
            found.extend(_subtrees(child, avals, (*path, key), depth - 1))
    return [s for s in found if s.leaves]


def _subtree(tree: Any, avals: Sequence[Any], path: Path) -> _Subtree:
    leaves, structure = jax.tree.flatten(tree)
    return _Subtree(path, structure, tuple(leaves), tuple(avals[i] for i in leaves))


def _children(tree: Any) -> list[tuple[Any, Any]]:
    """One level of a pytree: (key, child) pairs; none for a leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    if len(leaves) == 1 and not leaves[0][0]:
        return []
    return [(_key(path[-1]), child) for path, child in leaves]


def _key(entry: Any) -> Any:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return getattr(entry, name)
    return str(entry)


def _text(path: Path) -> str:
    return "/".join(map(str, path))


def leaves_at(signature: Signature, numbers: Sequence[int]) -> tuple[int, ...]:
    """The traced leaves of these positional arguments, as positions among all that are traced; static ones are none."""
    args, _ = _by_argument(signature)
    return tuple(k for n in numbers if n < len(args) for k in args[n])


def _by_argument(signature: Signature) -> tuple[list[list[int]], list[list[int]]]:
    """The traced leaves of each positional and of each keyword argument."""
    args, kwargs = jax.tree.unflatten(signature.tree, range(signature.tree.num_leaves))
    traced = {leaf: k for k, leaf in enumerate(signature.positions)}

    def leaves(argument: Any) -> list[int]:
        return [traced[leaf] for leaf in jax.tree.leaves(argument) if leaf in traced]

    return list(map(leaves, args)), list(map(leaves, kwargs.values()))


def batch_leaves(signature: Signature, roles: Roles, graph: Graph, batch_argnums: Sequence[int] = ()) -> tuple[int, ...]:
    """The inputs that are cut along their first dimension to make microbatches, as positions among the graph's inputs.

    See `batch_groups`, of which it is the first; empty where there is none.
    """
    return next(iter(batch_groups(signature, roles, graph, batch_argnums)), ())


def batch_groups(signature: Signature, roles: Roles, graph: Graph, batch_argnums: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """The inputs that may hold the batch, in groups, the likeliest first.

    With `batch_argnums`, all leaves of those positional arguments that have dimensions; else those of the arguments that are not all state
    and whose leaves share their first dimension, by how many bytes have that size. Raises `MicrobatchError` where named ones do not.
    """
    state = {i for i, _ in roles.carried}
    avals = [graph.avals[v] for v in graph.inputs]
    if batch_argnums:
        named = [k for k in leaves_at(signature, batch_argnums) if avals[k].ndim]
        sizes = {avals[k].shape[0] for k in named}
        if len(sizes) > 1:
            raise MicrobatchError(f"the leaves of the batch (batch_argnums={tuple(batch_argnums)}) have first dimensions {sorted(sizes)}.")
        return [tuple(named)] if named else []
    found: dict[int, list[int]] = {}
    args, kwargs = _by_argument(signature)
    for group in (*args, *kwargs):
        leaves = [k for k in group if avals[k].ndim]
        sizes = {avals[k].shape[0] for k in leaves}
        if len(sizes) == 1 and not state.issuperset(leaves) and max(sizes) > 1:
            found.setdefault(sizes.pop(), []).extend(leaves)
    order = sorted(found, key=lambda n: -sum(avals[k].nbytes for k in found[n]))
    return [tuple(sorted(found[n])) for n in order]
