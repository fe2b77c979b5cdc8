"""Element-wise primitives: each dimension of the result is a factor, matched per dimension.

Operands may be scalars or have size one where the result has more: these primitives broadcast such dimensions themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autopar.ir.dtypes import is_inexact
from autopar.ir.graph import Aval
from autopar.ir.rule import Pass, ShardingRule
from autopar.ir.sharding import Reduction
from autopar.rules.notation import Name, build, stays
from autopar.rules.passing import Constants, alone, converted, jointly, linear_in, moved, ordered, sums
from autopar.rules.registry import Avals, RuleFunction, register

_NO_PARTIALS = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz cos cosh digamma eq
    eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to mulhi ne nextafter not one_minus_square polygamma polynomial population_count pow random_gamma_grad
    reduce_precision regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square tan tanh threefry2x32 xor zeta
""".split()


def pointwise(operands: Sequence[Aval], results: Sequence[Aval], passes: Sequence[Pass | None] = ()) -> ShardingRule:
    """`(i j), (i j) -> (i j)` with dimensions of size one and scalars broadcast."""
    names = [f"i{d}" for d in range(results[0].ndim)]

    def dims(aval: Aval) -> list[Name]:
        return list(names) if aval.ndim else []

    return build([dims(a) for a in operands], [dims(a) for a in results], operands, results, passes=passes, broadcast=True)


@register(*_NO_PARTIALS)
def nonlinear(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    """No partial value goes through."""
    if operands[0].ndim != results[0].ndim and len(operands) == 1:
        return _narrowing_bitcast(operands, results)
    return pointwise(operands, results)


def _narrowing_bitcast(operands: Avals, results: Avals) -> ShardingRule:
    """`(i w) -> (i)` or `(i) -> (i w)`: a bitcast to another width adds or removes a last dimension, which stays whole."""
    names = [f"i{d}" for d in range(min(operands[0].ndim, results[0].ndim))]
    dims = [names + ["w"] * (a.ndim - len(names)) for a in (*operands, *results)]
    return build(dims[:1], dims[1:], operands, results, methods=stays("w"))


@register("add", "sub", "add_any")
def add(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """A sum goes through when all operands are partial."""
    return pointwise(operands, results, [jointly("sum", (0, 1), constants)] if sums(results[0].dtype) else [])


@register("neg", "real", "imag", "conj", "complex")
def linear(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    return pointwise(operands, results, [jointly("sum", range(len(operands)), constants)] if sums(results[0].dtype) else [])


@register("mul")
def mul(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """A sum goes through either factor while the other is not partial."""
    return pointwise(operands, results, [alone(n, constants) for n in (0, 1) if linear_in(operands[n], results[0])])


@register("div")
def div(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """A sum goes through the numerator; integer division rounds, so it does not."""
    return pointwise(operands, results, [alone(0, constants)] if is_inexact(results[0].dtype) else [])


def _extremum(operands: Avals, results: Avals, *, kind: Reduction, constants: Constants, **_: Any) -> ShardingRule:
    return pointwise(operands, results, [jointly(kind, (0, 1), constants)] if ordered(results[0].dtype) else [])


def _logical(operands: Avals, results: Avals, *, kind: Reduction, constants: Constants, **_: Any) -> ShardingRule:
    return pointwise(operands, results, [jointly(kind, (0, 1), constants)] if results[0].dtype == "bool" else [])


_KINDS: tuple[tuple[Reduction, RuleFunction], ...] = (("max", _extremum), ("min", _extremum), ("and", _logical), ("or", _logical))
for _kind, _function in _KINDS:
    register(_kind)(partial(_function, kind=_kind))


@register("copy", "copy_p", "stop_gradient", "name")
def identity(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    return pointwise(operands, results, moved(results[0].dtype, (0,), constants))


@register("pin")
def pin(operands, results, **_) -> ShardingRule:
    """A value whose sharding the user has constrained; a partial one is reduced before it."""
    return pointwise(operands, results)


@register("gate")
def gate(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    """A value that is read again; a partial one is reduced before it."""
    return pointwise(operands, results)


@register("select_n")
def select_n(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """Partial values go through when all branches are partial and the predicate is not."""
    return pointwise(operands, results, moved(results[0].dtype, range(1, len(operands)), constants))


@register("convert_element_type")
def convert_element_type(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    return pointwise(operands, results, converted(operands[0].dtype, results[0].dtype))


@register("optimization_barrier")
def optimization_barrier(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """Each operand goes to its own result; only when all are partial are all results so."""
    dims = [[f"i{n}_{d}" for d in range(a.ndim)] for n, a in enumerate(operands)]
    passes = [jointly("sum", range(len(operands)), constants)] if all(sums(a.dtype) for a in operands) else []
    return build(dims, dims, operands, results, passes=passes)
