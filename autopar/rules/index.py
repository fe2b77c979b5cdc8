"""Slices, gathers and scatters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

from autopar.ir.dtypes import is_inexact, is_key
from autopar.ir.graph import Aval
from autopar.ir.rule import Factor, Method, ShardingRule
from autopar.ir.sharding import Reduction
from autopar.rules.notation import Name, build, stays, whole_rule
from autopar.rules.passing import Constants, jointly, moved, ordered, sums
from autopar.rules.registry import Avals, register

MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
_ACCUMULATE: dict[str, Reduction] = {"scatter-add": "sum", "scatter-sub": "sum", "scatter-max": "max", "scatter-min": "min"}


def _taken(small: Aval, large: Aval) -> tuple[list[Name], list[Name], dict[Factor, Method]]:
    """Names of a window and of what it is taken from: shared where it spans the dimension, whole elsewhere."""
    pairs = list(enumerate(zip(small.shape, large.shape, strict=True)))
    window: list[Name] = [f"i{d}" if a == b else f"window{d}" for d, (a, b) in pairs]
    full: list[Name] = [f"i{d}" if a == b else f"full{d}" for d, (a, b) in pairs]
    whole = stays(f for d, (a, b) in pairs if a != b for f in (f"window{d}", f"full{d}"))
    return window, full, whole


@register("slice")
def slice_(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """Dimensions taken whole may be cut. (One of equal size before and after is taken whole, whatever the stride.)"""
    window, full, whole = _taken(results[0], operands[0])
    return build([full], [window], operands, results, methods=whole, passes=moved(results[0].dtype, (0,), constants))


@register("dynamic_slice")
def dynamic_slice(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`(a [n]), starts -> (a [w])`: a start along a dimension taken whole is clamped to zero."""
    window, full, whole = _taken(results[0], operands[0])
    starts: list[list[Name]] = [[] for _ in operands[1:]]
    return build([full, *starts], [window], operands, results, methods=whole, passes=moved(results[0].dtype, (0,), constants))


@register("dynamic_update_slice")
def dynamic_update_slice(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`(a [n]), (a [w]), starts -> (a [n])`: partial values go through when operand and update are both partial."""
    window, full, whole = _taken(operands[1], operands[0])
    starts: list[list[Name]] = [[] for _ in operands[2:]]
    passes = moved(results[0].dtype, (0, 1), constants)
    return build([full, window, *starts], [full], operands, results, methods=whole, passes=passes)


@dataclass(frozen=True)
class _Windows:
    """The dimension numbers that gather and scatter share: how windows of `array` lie in `moved`, the gathered or scattered one."""

    array: Aval
    indices: Aval
    moved: Aval
    window_dims: tuple[int, ...]
    dropped: tuple[int, ...]
    indexed: tuple[int, ...]
    array_batch: tuple[int, ...]
    indices_batch: tuple[int, ...]

    @property
    def kept(self) -> list[int]:
        """Dimensions of the array that windows show, in order."""
        return [d for d in range(self.array.ndim) if d not in self.dropped and d not in self.array_batch]

    def window_size(self, d: int) -> int:
        """Extent of a window along dimension d of the array."""
        return self.moved.shape[self.window_dims[self.kept.index(d)]] if d in self.kept else 1

    def names(self) -> tuple[list[Name], list[Name], list[Name], dict[Factor, Method]]:
        """Names of array, indices and moved; method `scatter` stands for the indexed factors `v`."""
        index_names = [f"u{n}" for n in range(self.indices.ndim - 1)]
        array: list[Name] = []
        methods: dict[Factor, Method] = {"k": "whole"}
        shown: list[Name] = []
        for d, n in enumerate(self.array.shape):
            size = self.window_size(d)
            if d in self.array_batch:
                array.append(index_names[self.indices_batch[self.array_batch.index(d)]])
            elif size == n and d in self.kept:
                array.append(f"o{d}")
            else:
                array.append(f"v{d}")
                methods[f"v{d}"] = "scatter" if size == 1 and d in self.indexed else "whole"
            shown += ([f"o{d}"] if size == n else [f"w{d}"]) if d in self.kept else []
            methods |= {f"w{d}": "whole"}
        return array, [*index_names, "k"], self._interleave(shown, index_names), methods

    def _interleave(self, shown: list[Name], index_names: list[str]) -> list[Name]:
        batch, window = iter(index_names), dict(zip(self.window_dims, shown, strict=True))
        return [window[d] if d in window else next(batch) for d in range(self.moved.ndim)]


@register("gather")
def gather(
    operands: Avals, results: Avals, *, dimension_numbers: Any, mode: str, constants: Constants, fill_value: Any = None, **_: Any
) -> ShardingRule:
    """`(v o), (u [k]) -> (u o)`: a lookup.

    A window of one element along an indexed dimension `v` has one owner when `v` is cut: the others contribute zero, so the
    result is a partial sum (for bool, a partial or). Indices are clamped, or filled for, by global bounds. A partial
    operand goes through unless out-of-bounds indices would read a fill value that does not survive being summed.
    """
    if mode not in MODES:
        return whole_rule(operands, results)
    numbers = dict(dimension_numbers)
    windows = _Windows(
        operands[0],
        operands[1],
        results[0],
        numbers["offset_dims"],
        numbers["collapsed_slice_dims"],
        numbers["start_index_map"],
        numbers["operand_batching_dims"],
        numbers["start_indices_batching_dims"],
    )
    array, indices, result, methods = windows.names()
    dtype = results[0].dtype
    lookup: Method = "whole" if is_key(dtype) else "masked_sum"
    methods = {f: lookup if m == "scatter" else m for f, m in methods.items()}
    reductions: dict[Factor, Reduction] = {f: "or" if dtype == "bool" else "sum" for f, m in methods.items() if m == "masked_sum"}
    passes = [jointly("sum", (0,), constants)] if sums(dtype) and (mode != "FILL_OR_DROP" or _absorbs(fill_value, dtype)) else []
    return build([array, indices], [result], operands, results, methods=methods, reductions=reductions, passes=passes)


def _absorbs(fill: Any, dtype: str) -> bool:
    """Whether a fill value, summed over several devices, is still itself: zero or NaN."""
    if fill is None:
        return is_inexact(dtype)
    return fill == 0 or (isinstance(fill, float) and isnan(fill)) or fill == "nan"


def _scatter(
    operands: Avals, results: Avals, *, name: str, dimension_numbers: Any, mode: str, constants: Constants, **_: Any
) -> ShardingRule:
    """`(v o), (u [k]), (u o) -> (v o)`: when `v` is cut, each device takes the updates that fall into its part.

    Cutting `u` leaves partial results where updates accumulate. A sum must count the operand once, so its lowering keeps the
    operand on index 0 of those axes and puts zero elsewhere; max and min take it everywhere.
    """
    if mode not in MODES:
        return whole_rule(operands, results)
    numbers = dict(dimension_numbers)
    windows = _Windows(
        operands[0],
        operands[1],
        operands[2],
        numbers["update_window_dims"],
        numbers["inserted_window_dims"],
        numbers["scatter_dims_to_operand_dims"],
        numbers["operand_batching_dims"],
        numbers["scatter_indices_batching_dims"],
    )
    array, indices, updates, methods = windows.names()
    kind, dtype = _ACCUMULATE.get(name), results[0].dtype
    accumulates = kind is not None and (sums(dtype) if kind == "sum" else ordered(dtype))
    reduced = [f for f in map(str, indices) if f not in array and f != "k"]
    methods |= {} if accumulates else stays(reduced)
    reductions = dict.fromkeys(reduced, kind) if accumulates and kind else {}
    passes = [jointly(kind, (0, 2), constants)] if accumulates and kind else []
    return build([array, indices, updates], [array], operands, results, methods=methods, reductions=reductions, passes=passes)


for _name in ("scatter", "scatter-mul", *_ACCUMULATE):
    register(_name)(partial(_scatter, name=_name))
