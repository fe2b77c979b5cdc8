"""Reductions, cumulative ops, windows and sorting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

from autopar.ir.rule import Pass, ShardingRule
from autopar.ir.sharding import Reduction
from autopar.rules.halo import Slide
from autopar.rules.notation import Name, build, stays
from autopar.rules.passing import Constants, jointly, ordered, sums
from autopar.rules.registry import Avals, register

_KINDS: dict[str, Reduction] = {"sum": "sum", "max": "max", "min": "min", "and": "and", "or": "or"}


def _fits(kind: Reduction, dtype: str) -> bool:
    """Whether a value of this dtype can be partial with this kind."""
    if kind == "sum":
        return sums(dtype)
    return ordered(dtype) if kind in ("max", "min") else dtype == "bool"


def _reduction(operands: Avals, results: Avals, *, kind: Reduction, axes: Sequence[int], **_: Any) -> ShardingRule:
    """`(i j) -> (i)`: the dimensions that go are reduced with the op's own kind."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    gone = [names[a] for a in axes]
    fits = _fits(kind, results[0].dtype)
    return build(
        [names],
        [[n for n in names if n not in gone]],
        operands,
        results,
        methods={} if fits else stays(gone),
        reductions=dict.fromkeys(gone, kind) if fits else {},
        passes=[Pass((0,), kind)] if fits else [],
    )


for _name, _kind in _KINDS.items():
    register(f"reduce_{_name}")(partial(_reduction, kind=_kind))


@register("argmax", "argmin")
def arg_extreme(operands: Avals, results: Avals, *, axes: Sequence[int], **_: Any) -> ShardingRule:
    """`(i a) -> (i)`: where `a` is cut, each block's extreme and its place are compared, method `arg_pair`."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    gone = [names[a] for a in axes]
    return build([names], [[n for n in names if n not in gone]], operands, results, methods=dict.fromkeys(gone, "arg_pair"))


@register("reduce_prod", "reduce_xor")
def whole_reduction(operands: Avals, results: Avals, *, axes: Sequence[int], **_: Any) -> ShardingRule:
    """The reduced dimensions stay whole."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    gone = [names[a] for a in axes]
    return build([names], [[n for n in names if n not in gone]], operands, results, methods=stays(gone))


@register("reduce")
def variadic_reduce(operands: Avals, results: Avals, *, dimensions: Sequence[int], **_: Any) -> ShardingRule:
    """n arrays and n scalars with a computation of the user's: the reduced dimensions stay whole."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    gone = [names[a] for a in dimensions]
    kept = [n for n in names if n not in gone]
    count = len(results)
    ins = [names] * count + [[]] * count
    return build(ins, [kept] * count, operands, results, methods=stays(gone))


def _cumulative(operands: Avals, results: Avals, *, axis: int, kind: Reduction | None, **_: Any) -> ShardingRule:
    """`(i a) -> (i a)`: cutting the axis is a scan of blocks, method `prefix`."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    passes = [Pass((0,), kind)] if kind and _fits(kind, results[0].dtype) else []
    return build([names], [names], operands, results, methods={names[axis]: "prefix"}, passes=passes)


for _name in ("sum", "max", "min", "prod", "logsumexp"):
    register(f"cum{_name}")(partial(_cumulative, kind=_KINDS.get(_name)))


def _untouched(
    ndim: int, window_dimensions: Any, window_strides: Any, padding: Any, base_dilation: Any = None, window_dilation: Any = None, **_: Any
) -> list[bool]:
    """Per dimension whether windows leave it as it is."""
    ones = (1,) * ndim
    dilations = zip(base_dilation or ones, window_dilation or ones, strict=True)
    moves = zip(window_dimensions, window_strides, padding, dilations, strict=True)
    return [size == stride == 1 and tuple(pad) == (0, 0) and base == 1 for size, stride, pad, (base, _) in moves]


def _windowed(
    operands: Avals,
    results: Avals,
    params: Any,
    arrays: int,
    large: tuple[int, ...],
    passes: Sequence[Pass | None] = (),
    halo: bool = False,
) -> ShardingRule:
    """Shared names where windows leave a dimension alone; where `halo` allows and they move about as far as the array does, it is cut by
    that method; else it stays whole. `large` are the tensors of the size before windowing.
    """
    ndim = operands[0].ndim
    free = _untouched(ndim, **params)
    every = (*operands[:arrays], *results)
    small = next(n for n in range(len(every)) if n not in large)
    slides = [_slide(every[large[0]].shape[d], every[small].shape[d], d, **params) for d in range(ndim)]
    borders = {f"h{d}": gcd(s.image, s.windows) for d, s in enumerate(slides) if halo and not free[d] and (s.follows or s.drifts)}

    def name(d: int, side: str) -> Name:
        return f"i{d}" if free[d] else (f"h{d}", f"{side}{d}") if f"h{d}" in borders else f"{side}{d}"

    tensors = [[name(d, "image" if n in large else "output") for d in range(ndim)] for n in range(len(every))]
    methods = stays(f"{side}{d}" for d in range(ndim) for side in ("image", "output") if not free[d])
    methods |= dict.fromkeys(borders, "halo")
    ins = tensors[:arrays] + [[]] * (len(operands) - arrays)
    return build(ins, tensors[arrays:], operands, results, sizes=borders, methods=methods, passes=passes)


def _slide(
    image: int,
    windows: int,
    d: int,
    *,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
    base_dilation: Any = None,
    window_dilation: Any = None,
    **_: Any,
) -> Slide:
    dilation, spread = (values[d] if values else 1 for values in (base_dilation, window_dilation))
    return Slide(image, window_dimensions[d], windows, window_strides[d], tuple(padding[d]), dilation, spread)


def _reduce_window(operands: Avals, results: Avals, *, kind: Reduction, **params: Any) -> ShardingRule:
    passes = [Pass((0,), kind)] if _fits(kind, results[0].dtype) else []
    return _windowed(operands, results, params, 1, (0,), passes, halo=True)


for _name in ("sum", "max", "min"):
    register(f"reduce_window_{_name}")(partial(_reduce_window, kind=_KINDS[_name]))


@register("reduce_window")
def reduce_window(operands: Avals, results: Avals, **params: Any) -> ShardingRule:
    """n arrays and n scalars with a computation of the user's."""
    return _windowed(operands, results, params, len(results), tuple(range(len(results))))


@register("select_and_scatter_add")
def select_and_scatter_add(operands: Avals, results: Avals, *, constants: Constants, **params: Any) -> ShardingRule:
    """`(source), (operand) -> (like operand)`: linear in the source."""
    passes = [jointly("sum", (0,), constants)] if sums(results[0].dtype) else []
    return _windowed(operands, results, params, 2, (1, 2), passes, halo=True)


@register("select_and_gather_add")
def select_and_gather_add(operands: Avals, results: Avals, *, constants: Constants, **params: Any) -> ShardingRule:
    """`(tangents), (operand) -> (one per window)`: linear in the tangents."""
    passes = [jointly("sum", (0,), constants)] if sums(results[0].dtype) else []
    return _windowed(operands, results, params, 2, (0, 1), passes)


@register("sort")
def sort(operands: Avals, results: Avals, *, dimension: int, **_: Any) -> ShardingRule:
    """All operands are permuted together along a whole dimension."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    return build([names] * len(operands), [names] * len(results), operands, results, methods=stays([names[dimension]]))


@register("top_k", "approx_top_k")
def top_k(operands: Avals, results: Avals, *, axis: int = -1, reduction_dimension: int | None = None, **_: Any) -> ShardingRule:
    """`(i [n]) -> (i [k]), (i [k])`."""
    ndim = operands[0].ndim
    at = (axis if reduction_dimension is None else reduction_dimension) % ndim
    before, after = [[side if d == at else f"i{d}" for d in range(ndim)] for side in ("n", "k")]
    return build([before], [after] * len(results), operands, results, methods=stays("nk"))
