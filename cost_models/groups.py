"""Device groups and logical meshes, as arithmetic on a mixed-radix numbering.

Devices are numbered row-major over the physical dimensions (nodes first). A logical axis is a `(size, stride)` pair in that numbering.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import prod
from operator import mul

from cost_models.errors import ClusterError

Axes = tuple[tuple[int, int], ...]


def strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides.

    >>> strides((2, 4, 4))
    (16, 4, 1)
    """
    return tuple(accumulate((1, *sizes[:0:-1]), mul))[::-1]


def decompose(axes: Axes, dims: tuple[int, ...]) -> tuple[Axes, ...] | None:
    """Per physical dimension, the `(size, stride)` pieces of the axes that fall into it, or None where a border cuts an axis unevenly.

    >>> decompose(((4, 4),), (2, 8))
    (((2, 1),), ((2, 4),))
    >>> decompose(((6, 1),), (3, 8)) is None
    True
    """
    axes = tuple(axis for axis in axes if axis[0] > 1)
    if prod(size for size, _ in axes) > prod(dims):
        raise ClusterError(f"the group {axes} has more members than the cluster's {prod(dims)} devices.")
    pieces: list[dict[int, int]] = [{} for _ in dims]
    for size, stride in axes:
        for dim, step, piece in _split(size, stride, dims) or ((0, 0, 0),):
            if not piece:
                return None
            pieces[dim][step] = piece
    return tuple(_join(found) for found in pieces)


def _split(size: int, stride: int, dims: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """`(dimension, stride within it, size)` for one axis, innermost first; nothing where it does not split evenly."""
    found = []
    for dim, step in reversed(list(enumerate(strides(dims)))):
        end = step * dims[dim]
        if size == 1 or stride >= end:
            continue
        if stride % step or end % stride:
            return []
        piece = min(size, end // stride)
        if size % piece or (end // stride) % piece:
            return []
        found.append((dim, stride // step, piece))
        size, stride = size // piece, stride * piece
    return found if size == 1 else []


def _join(pieces: dict[int, int]) -> Axes:
    """Adjacent pieces as one, by rising stride."""
    joined: list[tuple[int, int]] = []
    for step in sorted(pieces):
        if joined and joined[-1][0] * joined[-1][1] == step:
            joined[-1] = (joined[-1][0] * pieces[step], joined[-1][1])
        else:
            joined.append((pieces[step], step))
    return tuple(joined)


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into exactly `parts` factors above 1.

    >>> sorted(factorisations(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if parts == 1:
        yield from ((number,),) if number > 1 else ()
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, parts - 1))


def mesh_shapes(dims: tuple[int, ...], max_axes: int) -> tuple[tuple[int, ...], ...]:
    """Logical mesh shapes of up to `max_axes` axes that cut every physical dimension evenly, fewest axes first.

    Where only one dimension is larger than 1, orders of the same sizes mean the same and the ascending one stands for all.

    >>> mesh_shapes((1, 8), 2)
    ((8,), (2, 4))
    >>> mesh_shapes((2, 4), 2)
    ((8,), (2, 4), (4, 2))
    """
    total = prod(dims)
    if total == 1:
        return ((1,),)
    shapes = [shape for parts in range(1, max_axes + 1) for shape in factorisations(total, parts)]
    if sum(size > 1 for size in dims) == 1:
        return tuple(shape for shape in shapes if tuple(sorted(shape)) == shape)
    return tuple(shape for shape in shapes if decompose(tuple(zip(shape, strides(shape), strict=True)), dims) is not None)
