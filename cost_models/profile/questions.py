"""What a profile asks of the devices at hand, the most telling first, so that any budget gives a usable one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from cost_models.collective import KINDS
from cost_models.groups import mesh_shapes, strides
from cost_models.tiles import Shape

DTYPES = ("float32", "bfloat16", "float16", "float64")
_MOST_AXES = 3
_MOST_FLOAT64 = 2048  # some accelerators are a hundred times slower there


@dataclass(frozen=True)
class Question:
    """One point of one curve: `("collective all_reduce 8:1", "65536")`, `("matmul float32", "1x256x256x256")`.

    Curves are `launch`, `memory` and `vector float32` over bytes read, `matmul DTYPE` over batch x m x n x k, `collective KIND SIZE:STRIDE`
    and `transfer` over bytes of the operand on one device.
    """

    curve: str
    at: str


@dataclass(frozen=True)
class Grid:
    """How far the questions go: square matmul edges, bytes of memory passes, and bytes of a collective's operand."""

    edges: tuple[int, ...]
    passes: tuple[int, ...]
    operands: tuple[int, ...]
    most_gathered: int

    @staticmethod
    def of(platform: str, devices: int) -> Grid:
        """For simulated devices, which share one machine, or for accelerators."""
        if platform == "cpu":
            largest = max(2**16, 2**25 // devices)
            return Grid((64, 128, 256, 512), _powers(2**16, largest, 4), _powers(2**10, largest // 4, 4), 2**27 // devices)
        return Grid((128, 256, 512, 1024, 2048, 4096, 8192), _powers(2**20, 2**30, 8), _powers(2**12, 2**28, 4), 2**31)


def questions(platform: str, dims: tuple[int, ...]) -> list[Question]:
    """All of them, for devices of physical dimensions `dims` as in `Topology.dims`."""
    devices = prod(dims)
    grid = Grid.of(platform, devices)
    curves = [*compute_curves(platform, grid), *collective_curves(grid, dims)]
    rounds = zip_longest(*curves)
    return [question for each in rounds for question in each if question is not None]


def compute_curves(platform: str, grid: Grid) -> Iterator[list[Question]]:
    """Curves of one device, each from the largest size to the finest step."""
    yield [Question("launch", "chain")]
    yield _curve("memory", map(str, coarse_first(grid.passes)))
    yield _curve("vector float32", [str(grid.passes[-1])])
    for dtype in DTYPES:
        if platform == "tpu" and dtype in ("float16", "float64"):
            continue
        edges = tuple(edge for edge in grid.edges if dtype != "float64" or edge <= _MOST_FLOAT64)
        squares = [f"1x{edge}x{edge}x{edge}" for edge in coarse_first(edges)]
        yield _curve(f"matmul {dtype}", [*squares, *skinny(edges[-1])])


def skinny(edge: int) -> list[str]:
    """Shapes other than squares: few rows, few columns, a short contraction, and a batch of attention heads."""
    few, half = max(8, edge // 16), edge // 2
    return [f"1x{few}x{edge}x{edge}", f"1x{edge}x{few}x{edge}", f"1x{edge}x{edge}x{few}", f"8x{half}x{half}x64"]


def collective_curves(grid: Grid, dims: tuple[int, ...]) -> Iterator[list[Question]]:
    """Every collective over every axis that a logical mesh of the devices may have, the longest first, and transfers between halves."""
    if prod(dims) == 1:
        return
    for size, stride in axes(dims):
        for kind in KINDS:
            sizes = [n for n in grid.operands if n * (size if kind == "all_gather" else 1) <= grid.most_gathered]
            yield _curve(f"collective {kind} {size}:{stride}", map(str, coarse_first(sizes)))
    if prod(dims) % 2 == 0:
        yield _curve("transfer", map(str, coarse_first(grid.operands)))


def axes(dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """`(size, stride)` of every axis of every logical mesh of up to three axes, largest groups first.

    >>> axes((1, 4))
    [(4, 1), (2, 2), (2, 1)]
    """
    shapes = mesh_shapes(dims, _MOST_AXES)
    both = {order for shape in shapes for order in (shape, shape[::-1] if sum(size > 1 for size in dims) == 1 else shape)}
    found = {axis for shape in both for axis in zip(shape, strides(shape), strict=True) if axis[0] > 1}
    return sorted(found, reverse=True)


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """Largest, smallest, then the middles of what is left open.

    >>> coarse_first([1, 2, 4, 8, 16])
    [16, 1, 4, 2, 8]
    """
    order, spans = [len(sizes) - 1, 0][: len(sizes)], [(0, len(sizes) - 1)]
    while spans:
        low, high = spans.pop(0)
        middle = (low + high) // 2
        if high - low > 1:
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [sizes[each] for each in order]


def shape_of(at: str) -> Shape:
    """The matmul of a question."""
    return Shape(*map(int, at.split("x")))


def _powers(low: int, high: int, factor: int) -> tuple[int, ...]:
    found = [low]
    while found[-1] * factor <= high:
        found.append(found[-1] * factor)
    return tuple(found)


def _curve(name: str, sizes: Iterator[str] | Sequence[str] | map[str]) -> list[Question]:
    return [Question(name, at) for at in sizes]
