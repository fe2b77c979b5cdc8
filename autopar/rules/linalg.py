"""Linear algebra and Fourier transforms: leading batch dimensions may be cut, the matrices themselves stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.rule import Pass, ShardingRule
from autopar.rules.notation import build, stays
from autopar.rules.passing import Constants, jointly, sums
from autopar.rules.registry import Avals, register


def _batched(operands: Avals, results: Avals, core: int, passes: Sequence[Pass | None] = ()) -> ShardingRule:
    """`(b [n] [m]) -> (b [p])` where the first operand has `core` dimensions after its batch."""
    batch = operands[0].ndim - core
    names = [f"b{d}" for d in range(batch)]
    tensors = [names + [f"c{n}_{d}" for d in range(a.ndim - batch)] for n, a in enumerate((*operands, *results))]
    whole = stays(f for t in tensors for f in t[batch:])
    count = len(operands)
    return build(tensors[:count], tensors[count:], operands, results, methods=whole, passes=passes)


@register(
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve", "tridiagonal"
)
def matrix(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    return _batched(operands, results, 2)


@register("tridiagonal_solve", "lu_pivots_to_permutation")
def vector(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    return _batched(operands, results, 1)


@register("fft")
def fft(operands: Avals, results: Avals, *, fft_lengths: Sequence[int], constants: Constants, **_: Any) -> ShardingRule:
    """Linear, with the transformed dimensions whole."""
    passes = [jointly("sum", (0,), constants)] if sums(results[0].dtype) else []
    return _batched(operands, results, len(fft_lengths), passes)
