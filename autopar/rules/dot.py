"""Matrix products: `(b m k), (b k n) -> (b m n)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Aval
from autopar.ir.rule import Pass, ShardingRule
from autopar.rules.notation import Name, build, stays, whole_rule
from autopar.rules.passing import Constants, alone, linear_in, sums
from autopar.rules.registry import Avals, register


@register("dot_general")
def dot_general(operands: Avals, results: Avals, *, dimension_numbers: Any, constants: Constants, **_: Any) -> ShardingRule:
    """`(b m k), (b k n) -> (b m n)`: `k` is reduced, all else is free to cut."""
    lhs, rhs = product_names(operands[0].ndim, operands[1].ndim, dimension_numbers)
    batch = [lhs[d] for d in dimension_numbers[1][0]]
    free = [f for f in (*lhs, *rhs) if f[0] in "mn"]
    whole = stays(() if sums(results[0].dtype) else (f for f in lhs if f[0] == "k"))
    passes = bilinear(operands, results, constants)
    return build([lhs, rhs], [batch + free], operands, results, methods=whole, passes=passes)


def product_names(lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any) -> tuple[list[str], list[str]]:
    """Names per dimension of both operands: `b` batch, `k` contracting, `m` and `n` free."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs, rhs = [f"m{d}" for d in range(lhs_ndim)], [f"n{d}" for d in range(rhs_ndim)]
    for letter, pairs in (("b", zip(lhs_batch, rhs_batch, strict=True)), ("k", zip(lhs_contract, rhs_contract, strict=True))):
        for i, (left, right) in enumerate(pairs):
            lhs[left] = rhs[right] = f"{letter}{i}"
    return lhs, rhs


def bilinear(operands: Sequence[Aval], results: Sequence[Aval], constants: Constants) -> list[Pass | None]:
    """A sum goes through either operand while the other is not partial."""
    return [alone(n, constants) for n in (0, 1) if linear_in(operands[n], results[0])]


@register("ragged_dot_general")
def ragged_dot_general(
    operands: Avals, results: Avals, *, ragged_dot_dimension_numbers: Any, constants: Constants, **_: Any
) -> ShardingRule:
    """`(m k), (g k n), (g) -> (m n)` with the ragged dimension and the groups whole; where `k` is ragged, `g` leads the result.

    Group sizes that differ by batch run whole.
    """
    numbers = dict(ragged_dot_dimension_numbers)
    (ragged,), groups = numbers["lhs_ragged_dimensions"], numbers["rhs_group_dimensions"]
    lhs, rhs = _ragged_names(operands, numbers["dot_dimension_numbers"], groups)
    batch = [lhs[d] for d in numbers["dot_dimension_numbers"][1][0]]
    free = [f for f in lhs if f[0] == "m"] + [f for f in rhs if f[0] == "n"]
    result: list[Name] = [*(["g"] if lhs[ragged][0] == "k" else []), *batch, *free]
    if operands[2].ndim > 1:
        return whole_rule(operands, results)
    others = [[f"p{n}_{d}" for d in range(a.ndim)] for n, a in enumerate(operands[3:])]
    whole = stays([lhs[ragged], "g", *(f for t in others for f in t)])
    passes = bilinear(operands, results, constants)
    return build([lhs, rhs, ["g"], *others], [result], operands, results, methods=whole, passes=passes)


def _ragged_names(operands: Avals, dot_numbers: Any, groups: Sequence[int]) -> tuple[list[str], list[str]]:
    lhs, rhs = product_names(operands[0].ndim, operands[1].ndim, dot_numbers)
    for d in groups:
        rhs[d] = "g"
    return lhs, rhs
