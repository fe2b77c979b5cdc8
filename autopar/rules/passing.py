"""Which partial values go through an op: the conditions that all rules share.

A sum goes through what is linear in the partial operands together, over a dtype whose addition is linear (floats, complex
numbers, integers modulo 2^n, not bool). Max, min, and, or go through what is monotone and moves values about.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dtypes import is_inexact, is_key
from autopar.ir.graph import Aval
from autopar.ir.rule import Pass
from autopar.ir.sharding import Reduction

Constants = Sequence[str | None]
_EXACT_IN = {
    "float16": ("float32", "float64", "complex64", "complex128"),
    "bfloat16": ("float32", "float64", "complex64", "complex128"),
    "float32": ("float64", "complex64", "complex128"),
    "float64": ("complex128",),
    "complex64": ("complex128",),
}


def sums(dtype: str) -> bool:
    """Whether a value of this dtype can be a partial sum."""
    return dtype not in ("bool", "float0") and not is_key(dtype)


def ordered(dtype: str) -> bool:
    """Whether a value of this dtype can be a partial max or min."""
    return sums(dtype) and not dtype.startswith("complex")


def is_zero(text: str | None) -> bool:
    """Whether a literal operand's text is zero."""
    try:
        return text is not None and complex(text.split(":")[0]) == 0
    except ValueError:
        return False


def jointly(kind: Reduction, positions: Sequence[int], constants: Constants) -> Pass | None:
    """A pass of all these operands together; literals among them must be zero for a sum, anything for the idempotent kinds."""
    values = tuple(p for p in positions if constants[p] is None)
    literals_fit = kind != "sum" or all(is_zero(constants[p]) for p in positions if constants[p] is not None)
    return Pass(values, kind) if values and literals_fit else None


def alone(position: int, constants: Constants) -> Pass | None:
    """A sum that goes through one operand while the others are not partial."""
    return Pass((position,)) if constants[position] is None else None


def moved(dtype: str, positions: Sequence[int], constants: Constants) -> list[Pass | None]:
    """Passes of an op that only moves elements of these operands about: every kind the dtype has."""
    kinds: list[Reduction] = ["sum"] if sums(dtype) else ["and", "or"] if dtype == "bool" else []
    kinds += ["max", "min"] if ordered(dtype) else []
    return [jointly(k, positions, constants) for k in kinds]


def converted(source: str, target: str) -> list[Pass | None]:
    """Passes of a dtype conversion: none unless every value of `source` is exact in `target`."""
    if source == target:
        return moved(source, (0,), (None,))
    if target not in _EXACT_IN.get(source, ()):
        return []
    return [Pass((0,), k) for k in (("sum", "max", "min") if ordered(source) and ordered(target) else ("sum",))]


def linear_in(operand: Aval, result: Aval) -> bool:
    """Whether an op that is linear over the reals is so in these dtypes: floats, or integers of one width."""
    return sums(result.dtype) and (is_inexact(operand.dtype) or operand.dtype == result.dtype)
