"""Convolutions: `(b i s), (o i t) -> (b o u)`, the same for a forward pass and both of its gradients.

A gradient's convolution only permutes which dimension is called batch and which feature: the weight gradient contracts the
batch, which makes it a reduced factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.rule import Factor, Method, ShardingRule
from autopar.rules.dot import bilinear
from autopar.rules.notation import Name, build, stays
from autopar.rules.passing import Constants, sums
from autopar.rules.registry import Avals, register


@dataclass(frozen=True)
class _Space:
    """One spatial dimension: sizes of image, kernel and output, and how the kernel moves."""

    image: int
    kernel: int
    output: int
    stride: int
    padding: tuple[int, int]
    image_dilation: int
    kernel_dilation: int

    def names(self, n: int) -> tuple[Name, Name, Name, tuple[Factor, ...]]:
        """Names in image, kernel and output, and the factors that stay whole.

        Space may be cut where windows do not overlap: kernels of one pixel, kernels as large as the image, patches with
        stride equal to their size; and in the gradients of these.
        """
        s, p, k = f"s{n}", f"p{n}", f"k{n}"
        flat, dense = self.padding == (0, 0), self.image_dilation == self.kernel_dilation == 1
        if self.kernel == self.stride == self.image_dilation == 1 and flat:
            return s, k, s, ()
        if self.output == 1 and flat and dense and self.image == self.kernel:
            return s, s, p, ()
        if flat and dense and self.stride == self.kernel and self.image == self.output * self.kernel:
            return (p, k), k, p, ()
        if flat and self.image_dilation == self.stride == 1 and self.kernel_dilation == self.output and self._tiles(self.image):
            return (p, k), p, k, ()
        if self.kernel_dilation == self.stride == 1 and self.image_dilation == self.kernel and self.output == self.image * self.kernel:
            return p, k, (p, k), (k,)
        return f"image{n}", f"kernel{n}", f"output{n}", (f"image{n}", f"kernel{n}", f"output{n}")

    def _tiles(self, size: int) -> bool:
        return size == self.kernel * self.output


@register("conv_general_dilated")
def conv_general_dilated(operands: Avals, results: Avals, *, constants: Constants, **params: Any) -> ShardingRule:
    """`(b (g i) s), ((g o) i t) -> (b (g o) u)` with feature groups `g`; batch groups stand before `b` instead of `i`."""
    numbers = dict(params["dimension_numbers"])
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    spaces = _spaces(operands, results, numbers, params)
    named = [space.names(n) for n, space in enumerate(spaces)]
    lhs: list[Name] = [("g2", "b"), ("g", "i"), *(n[0] for n in named)]
    rhs: list[Name] = [("g2", "g", "o"), "i", *(n[1] for n in named)]
    out: list[Name] = ["b", ("g2", "g", "o"), *(n[2] for n in named)]
    placed = [_place(t, numbers[s]) for t, s in ((lhs, "lhs_spec"), (rhs, "rhs_spec"), (out, "out_spec"))]
    return build(
        placed[:2],
        placed[2:],
        operands,
        results,
        sizes={"g": groups, "g2": batch_groups},
        methods=_whole(named, results[0].dtype),
        passes=bilinear(operands, results, constants),
    )


def _whole(named: Sequence[tuple], dtype: str) -> dict[Factor, Method]:
    return stays([*(f for n in named for f in n[3]), *(() if sums(dtype) else "i")])


def _spaces(operands: Avals, results: Avals, numbers: Any, params: Any) -> list[_Space]:
    dims = zip(numbers["lhs_spec"][2:], numbers["rhs_spec"][2:], numbers["out_spec"][2:], strict=True)
    return [
        _Space(
            operands[0].shape[i],
            operands[1].shape[k],
            results[0].shape[o],
            params["window_strides"][n],
            tuple(params["padding"][n]),
            params["lhs_dilation"][n],
            params["rhs_dilation"][n],
        )
        for n, (i, k, o) in enumerate(dims)
    ]


def _place(names: Sequence[Name], spec: tuple[int, ...]) -> list[Name]:
    """Names in the order of the array's dimensions; `spec` says where batch, feature and space stand."""
    placed: list[Name] = [""] * len(spec)
    for name, d in zip(names, spec, strict=True):
        placed[d] = name
    return placed
