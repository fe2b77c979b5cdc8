"""Convolutions: `(b i s), (o i t) -> (b o u)`, the same for a forward pass and both of its gradients.

A gradient's convolution only permutes which dimension is called batch and which feature: the weight gradient contracts the
batch, which makes it a reduced factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from autopar.ir.rule import Factor, Method, ShardingRule
from autopar.rules.dot import bilinear
from autopar.rules.halo import Slide
from autopar.rules.notation import Name, build, stays
from autopar.rules.passing import Constants, sums
from autopar.rules.registry import Avals, register


@dataclass(frozen=True)
class _Names:
    """Names of one spatial dimension in image, kernel and output; the factors that stay whole; the one that is cut by `halo`, sized."""

    image: Name
    kernel: Name
    output: Name
    whole: tuple[Factor, ...] = ()
    halo: tuple[tuple[Factor, int], ...] = ()


def _names(s: Slide, n: int) -> _Names:
    """Space is cut without a word between devices where windows do not overlap: kernels of one pixel, kernels as large as the image,
    patches with stride equal to their size; and in the gradients of these. Elsewhere it is cut with borders of the neighbours, if windows
    move about as far as the image does: with the output, or, in the gradient of a kernel, with the other operand, which leaves partial
    sums.
    """
    shared, p, k = f"s{n}", f"p{n}", f"k{n}"
    flat, dense = s.padding == (0, 0), s.dilation == s.spread == 1
    if s.window == s.stride == s.dilation == 1 and flat:
        return _Names(shared, k, shared)
    if s.windows == 1 and flat and dense and s.image == s.window:
        return _Names(shared, shared, p)
    if flat and dense and s.stride == s.window and s.image == s.windows * s.window:
        return _Names((p, k), k, p)
    if flat and s.dilation == s.stride == 1 and s.spread == s.windows and s.image == s.window * s.windows:
        return _Names((p, k), p, k)
    if s.spread == s.stride == 1 and s.dilation == s.window and s.windows == s.image * s.window and s.padding[0] == s.window - 1:
        return _Names(p, k, (p, k), (k,))
    image, kernel, output = f"image{n}", f"kernel{n}", f"output{n}"
    whole = (image, kernel, output)
    if s.follows and s.windows > 1:
        return _Names((shared, image), kernel, (shared, output), whole, ((shared, gcd(s.image, s.windows)),))
    if s.window * s.spread == s.image * s.dilation:
        return _Names((shared, image), (shared, kernel), output, whole, ((shared, gcd(s.image, s.window)),))
    turned = Slide(s.image, s.windows, s.window, s.spread, s.padding, s.dilation, s.stride)  # the kernel in the windows' place
    if s.drifts and s.window <= s.windows:
        return _Names((shared, image), kernel, (shared, output), whole, ((shared, gcd(s.image, s.windows)),))
    if turned.drifts:
        return _Names((shared, image), (shared, kernel), output, whole, ((shared, gcd(s.image, s.window)),))
    return _Names(image, kernel, output, whole)


@register("conv_general_dilated")
def conv_general_dilated(operands: Avals, results: Avals, *, constants: Constants, **params: Any) -> ShardingRule:
    """`(b (g i) s), ((g o) i t) -> (b (g o) u)` with feature groups `g`; batch groups stand before `b` instead of `i`."""
    numbers = dict(params["dimension_numbers"])
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    spaces = _spaces(operands, results, numbers, params)
    named = [_names(space, n) for n, space in enumerate(spaces)]
    lhs: list[Name] = [("g2", "b"), ("g", "i"), *(n.image for n in named)]
    rhs: list[Name] = [("g2", "g", "o"), "i", *(n.kernel for n in named)]
    out: list[Name] = ["b", ("g2", "g", "o"), *(n.output for n in named)]
    placed = [_place(t, numbers[s]) for t, s in ((lhs, "lhs_spec"), (rhs, "rhs_spec"), (out, "out_spec"))]
    return build(
        placed[:2],
        placed[2:],
        operands,
        results,
        sizes={"g": groups, "g2": batch_groups} | {f: size for n in named for f, size in n.halo},
        methods=_methods(named, results[0].dtype),
        passes=bilinear(operands, results, constants),
    )


def _methods(named: Sequence[_Names], dtype: str) -> dict[Factor, Method]:
    halo: dict[Factor, Method] = {f: "halo" for n in named for f, _ in n.halo}
    return halo | stays([*(f for n in named for f in n.whole), *(() if sums(dtype) else ("i", *halo))])


def _spaces(operands: Avals, results: Avals, numbers: Any, params: Any) -> list[Slide]:
    dims = zip(numbers["lhs_spec"][2:], numbers["rhs_spec"][2:], numbers["out_spec"][2:], strict=True)
    return [
        Slide(
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
