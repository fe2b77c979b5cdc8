"""Primitives that move elements about without computing: every kind of partial value goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from autopar.ir.rule import Dim, Factor, ShardingRule
from autopar.rules.notation import Name, build, stays, whole_rule
from autopar.rules.passing import Constants, moved
from autopar.rules.registry import Avals, register


def _names(ndim: int) -> list[str]:
    return [f"i{d}" for d in range(ndim)]


@register("reshape")
def reshape(operands: Avals, results: Avals, *, constants: Constants, dimensions: Any = None, **_: Any) -> ShardingRule:
    """Splits and merges, as in `((a b)) -> (a b)`: the common refinement of both shapes, major to minor."""
    if dimensions is not None or 0 in operands[0].shape:
        return whole_rule(operands, results)
    before, after, sizes, whole = refine(operands[0].shape, results[0].shape)
    passes = moved(results[0].dtype, (0,), constants)
    return build([before], [after], operands, results, sizes=sizes, methods=stays(whole), passes=passes)


def refine(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[list[Dim], list[Dim], dict[Factor, int], list[Factor]]:
    """Factors of both shapes, their sizes, and those that stay whole.

    Going from major to minor, what both current dimensions have in common is a factor, since a cut of it is a cut of both.
    Where nothing is in common the elements interleave until the shapes line up again: whole on both sides.
    """
    shapes = (before, after)
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(before), [()] * len(after))
    at, rest = [-1, -1], [1, 1]
    sizes: dict[Factor, int] = {}
    whole: list[Factor] = []
    skew = [1, 1]  # elements passed on either side since the shapes last lined up; equal when they do

    def put(side: int, size: int, name: Factor) -> None:
        dims[side][at[side]] += (name,)
        sizes[name] = size
        rest[side] //= size

    while True:
        for side in (0, 1):
            while rest[side] == 1 and at[side] + 1 < len(shapes[side]):
                at[side] += 1
                rest[side] = shapes[side][at[side]]
        if rest == [1, 1]:
            return list(dims[0]), list(dims[1]), sizes, whole
        common = gcd(*rest) if skew[0] == skew[1] else 1
        name = f"f{len(sizes)}"
        if common > 1:
            put(0, common, name)
            put(1, common, name)
            continue
        side = 0 if rest[1] == 1 or (rest[0] > 1 and skew[0] <= skew[1]) else 1
        skew[side] *= rest[side]
        whole.append(name)
        put(side, rest[side], name)


@register("transpose")
def transpose(operands: Avals, results: Avals, *, permutation: Sequence[int], constants: Constants, **_: Any) -> ShardingRule:
    """`(a b) -> (b a)`."""
    names = _names(operands[0].ndim)
    passes = moved(results[0].dtype, (0,), constants)
    return build([names], [[names[d] for d in permutation]], operands, results, passes=passes)


@register("broadcast_in_dim")
def broadcast_in_dim(
    operands: Avals, results: Avals, *, broadcast_dimensions: Sequence[int], constants: Constants, **_: Any
) -> ShardingRule:
    """`(a) -> (n a)`: the result's own factors cost nothing to cut."""
    names = _names(results[0].ndim)
    source = [names[d] for d in broadcast_dimensions]
    passes = moved(results[0].dtype, (0,), constants)
    return build([source, *([] for _ in operands[1:])], [names], operands, results, passes=passes, broadcast=True)


@register("squeeze")
def squeeze(operands: Avals, results: Avals, *, dimensions: Sequence[int], constants: Constants, **_: Any) -> ShardingRule:
    names = _names(operands[0].ndim)
    gone = {d % operands[0].ndim for d in dimensions}
    passes = moved(results[0].dtype, (0,), constants)
    return build([names], [[n for d, n in enumerate(names) if d not in gone]], operands, results, passes=passes)


@register("rev")
def rev(operands: Avals, results: Avals, *, dimensions: Sequence[int], constants: Constants, **_: Any) -> ShardingRule:
    """Reversed dimensions stay whole."""
    names = _names(operands[0].ndim)
    whole = stays(names[d] for d in dimensions)
    return build([names], [names], operands, results, methods=whole, passes=moved(results[0].dtype, (0,), constants))


@register("concatenate")
def concatenate(operands: Avals, results: Avals, *, dimension: int, constants: Constants, **_: Any) -> ShardingRule:
    """The joined dimension stays whole; partial values go through when all parts are partial."""
    along = [f"part{n}" for n in range(len(operands))]
    tensors = [_replaced(operands[0].ndim, dimension, name) for name in (*along, "joined")]
    passes = moved(results[0].dtype, range(len(operands)), constants)
    whole = stays([*along, "joined"])
    return build(tensors[:-1], tensors[-1:], operands, results, methods=whole, passes=passes)


@register("stack")
def stack(operands: Avals, results: Avals, *, axis: int, constants: Constants, **_: Any) -> ShardingRule:
    """`(a), (a) -> ([n] a)`."""
    names = _names(operands[0].ndim)
    result = [*names[:axis], "n", *names[axis:]]
    passes = moved(results[0].dtype, range(len(operands)), constants)
    return build([names] * len(operands), [result], operands, results, methods={"n": "whole"}, passes=passes)


@register("split")
def split(operands: Avals, results: Avals, *, axis: int, constants: Constants, **_: Any) -> ShardingRule:
    """The inverse of `concatenate`."""
    along = [f"part{n}" for n in range(len(results))]
    tensors = [_replaced(operands[0].ndim, axis, name) for name in ("joined", *along)]
    passes = moved(results[0].dtype, (0,), constants)
    whole = stays([*along, "joined"])
    return build(tensors[:1], tensors[1:], operands, results, methods=whole, passes=passes)


@register("unstack")
def unstack(operands: Avals, results: Avals, *, axis: int, constants: Constants, **_: Any) -> ShardingRule:
    """`([n] a) -> (a), (a)`."""
    names = _replaced(operands[0].ndim, axis, "n")
    result = [*names[:axis], *names[axis + 1 :]]
    passes = moved(operands[0].dtype, (0,), constants)
    return build([names], [result] * len(results), operands, results, methods={"n": "whole"}, passes=passes)


@register("pad")
def pad(operands: Avals, results: Avals, *, padding_config: Any, constants: Constants, **_: Any) -> ShardingRule:
    """Padded dimensions stay whole. A partial sum goes through when the padding value is a literal zero, or partial too."""
    before, after = _names(operands[0].ndim), _names(operands[0].ndim)
    for d, config in enumerate(padding_config):
        if tuple(config) != (0, 0, 0):
            before[d], after[d] = f"inner{d}", f"outer{d}"
    whole = stays(f for f in (*before, *after) if f.startswith(("inner", "outer")))
    passes = moved(results[0].dtype, (0, 1), constants)
    return build([before, []], [after], operands, results, methods=whole, passes=passes)


@register("tile")
def tile(operands: Avals, results: Avals, *, reps: Sequence[int], constants: Constants, **_: Any) -> ShardingRule:
    """`(a) -> ((r a))`."""
    names = _names(operands[0].ndim)
    result: list[Name] = [(f"r{d}", name) for d, name in enumerate(names)]
    sizes = {f"r{d}": n for d, n in enumerate(reps)}
    if 0 in results[0].shape:
        return whole_rule(operands, results)
    passes = moved(results[0].dtype, (0,), constants)
    return build([names], [result], operands, results, sizes=sizes, passes=passes)


@register("iota")
def iota(operands: Avals, results: Avals, *, dimension: int, **_: Any) -> ShardingRule:
    """`-> (a b)`: the counted dimension starts at each device's own offset."""
    names = _names(results[0].ndim)
    ins: list[list[Name]] = [[] for _ in operands]
    return build(ins, [names], operands, results, methods={names[dimension]: "offset"})


@register("empty")
def empty(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    return build([], [_names(results[0].ndim)], operands, results)


def _replaced(ndim: int, at: int, name: str) -> list[str]:
    names = _names(ndim)
    names[at] = name
    return names
