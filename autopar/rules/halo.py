"""Windows that slide over a cut dimension: how much of the neighbours' blocks a device needs, and how its own part is padded then.

Window o, element k reads position `o * stride + k * spread - low` of an image whose elements stand `dilation` apart. Where as many
positions belong to a device's windows as to its block of the image, all devices need the same: some elements on the left of the block, and
some on its right. Beyond the ends of the image nothing stands, which is what padding says too.

Else, as without padding, where there are fewer windows than elements, windows *drift*: what device n reads begins n times so many positions
later, or earlier, within its block. Then all bring as much as any needs, and each takes its own part of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import Dim, ShardingRule
from autopar.ir.sharding import Axes
from autopar.ir.strategy import Strategy, dim_axes

RETURNING = frozenset({"select_and_scatter_add"})
"""Ops that also give their neighbours what falls into the neighbours' blocks."""


@dataclass(frozen=True)
class Slide:
    """Windows over one dimension: numbers of elements of the image, of a window and of windows, and how they move."""

    image: int
    window: int
    windows: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: int = 1
    spread: int = 1

    @property
    def follows(self) -> bool:
        """Whether a block of windows moves over just as much as a block of the image is."""
        return self.windows * self.stride == self.image * self.dilation

    @property
    def drifts(self) -> bool:
        """Whether windows move over about as much as there is: as far as without padding, or with a little more than is needed."""
        return self.windows > 1 and abs(self.windows * self.stride - self.image * self.dilation) <= self.window * self.spread + self.stride

    @property
    def last(self) -> int:
        """The last position that any window reads."""
        return (self.windows - 1) * self.stride + (self.window - 1) * self.spread - self.padding[0]


@dataclass(frozen=True)
class Reach:
    """What one device needs of `dim`, of which it has `block` elements: `left` and `right` more. `padding` is what is left of it then.

    `parts` is the number of devices along `axes`. With a `drift`, the block with its borders, padded and with its elements as far apart
    as the op has them, is cut: device n takes `extent` positions from `begin + n * drift` on, and those need no padding.
    """

    dim: int
    axes: Axes
    parts: int
    block: int
    left: int
    right: int
    padding: tuple[int, int]
    drift: int = 0
    dilation: int = 1
    begin: int = 0
    extent: int = 0

    def hops(self, count: int) -> tuple[int, ...]:
        """Of `count` elements on one side, how many come from the next device, from the one after it, and so on."""
        return tuple(min(self.block, count - done) for done in range(0, count, self.block))


def moved(op: Op) -> int:
    """The operand whose elements windows of an op read beyond their block."""
    return 1 if op.primitive in RETURNING else 0


def filler(op: Op) -> str:
    """What padding has: `zero`, or the `least` or `greatest` number."""
    extremes = {"reduce_window_max": "least", "reduce_window_min": "greatest"}
    if op.primitive in RETURNING:
        return "least" if "ge" in str(op.param("select_prim")) else "greatest"
    return extremes.get(op.primitive, "zero")


def reaches(op: Op, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> tuple[Reach, ...]:
    """What a device needs beyond its block, for each dimension that is cut by method `halo`."""
    found = []
    for d, dim in enumerate(rule.operands[moved(op)]):
        axes = dim_axes(dim, strategy)
        if axes and any(rule.method[f] == "halo" for f in dim):
            slide = _SLIDES[op.primitive](op, d, lambda dim: _local(dim, rule, strategy, mesh), rule)
            found.append(_reach(d, axes, mesh.size(axes), slide, _step(op, d, rule, strategy, slide)))
    return tuple(found)


def _step(op: Op, d: int, rule: ShardingRule, strategy: Strategy, local: Slide) -> int:
    """How many positions later each device begins to read than the one before: over its windows, or its part of the kernel."""
    if op.primitive == "conv_general_dilated" and dim_axes(_kernel(op, d, rule), strategy):
        return local.window * local.spread
    return local.windows * local.stride


def _reach(d: int, axes: Axes, parts: int, local: Slide, step: int) -> Reach:
    """The borders of a block, for the first device and the last one alike."""
    drift, far = step - local.image * local.dilation, (parts - 1) * local.image
    before = local.padding[0] - min(0, drift * (parts - 1))
    last = local.last + max(0, drift * (parts - 1))
    left = min(far, max(0, before // local.dilation))
    right = min(far, max(0, last // local.dilation - (local.image - 1)))
    low, high = before - left * local.dilation, last - (local.image + right - 1) * local.dilation
    begin, extent = before - local.padding[0], local.last + local.padding[0] + 1
    return Reach(d, axes, parts, local.image, left, right, (low, high), drift, local.dilation, begin, extent)


def _local(dim: Dim, rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> int:
    return prod(rule.size[f] for f in dim) // mesh.size(dim_axes(dim, strategy))


def _kernel(op: Op, d: int, rule: ShardingRule) -> Dim:
    """The kernel's dimension that moves over dimension d of the image."""
    numbers = dict(op.param("dimension_numbers"))
    return rule.operands[1][numbers["rhs_spec"][numbers["lhs_spec"].index(d)]]


def _of_convolution(op: Op, d: int, local: Callable[[Dim], int], rule: ShardingRule) -> Slide:
    numbers = dict(op.param("dimension_numbers"))
    n = numbers["lhs_spec"].index(d)
    image, kernel, output = rule.operands[0][d], _kernel(op, d, rule), rule.results[0][numbers["out_spec"][n]]
    stride, padding = op.param("window_strides")[n - 2], op.param("padding")[n - 2]
    dilation, spread = op.param("lhs_dilation")[n - 2], op.param("rhs_dilation")[n - 2]
    return Slide(local(image), local(kernel), local(output), stride, tuple(padding), dilation, spread)


def _of_window(op: Op, d: int, local: Callable[[Dim], int], rule: ShardingRule) -> Slide:
    outputs = rule.operands[0] if op.primitive in RETURNING else rule.results[0]
    padding, window, stride = (op.param(p)[d] for p in ("padding", "window_dimensions", "window_strides"))
    dilation, spread = ((op.param(p) or {d: 1})[d] for p in ("base_dilation", "window_dilation"))
    return Slide(local(rule.operands[moved(op)][d]), window, local(outputs[d]), stride, tuple(padding), dilation, spread)


_SLIDES: dict[str, Callable[[Op, int, Callable[[Dim], int], ShardingRule], Slide]] = {
    "conv_general_dilated": _of_convolution,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add"), _of_window),
}
