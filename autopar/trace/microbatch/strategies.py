"""Strategies over the axis of time: how one op runs on its part of a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, is_legal, operand_sharding, result_sharding

AXIS = "microbatch"
METHODS = frozenset({"plain", "offset", "bits", "masked_sum", "scatter"})
"""Methods of factors that one microbatch can run by itself, knowing its number."""

Form = TensorSharding | None
"""How a value lies over the axis of time; None for one that is known only after all microbatches."""


def time_mesh(count: int) -> LogicalMesh:
    """The axis of time as a mesh of its own."""
    return LogicalMesh((AXIS,), (count,))


def strategy_for(rule: ShardingRule, forms: Sequence[Form], mesh: LogicalMesh, joins: Collection[int] = ()) -> Strategy | None:
    """The strategy of an op whose operands lie as `forms` say, whole ones being cut as needed; None where there is none.

    Whole operands at the positions `joins` may meet partial ones, and then count once.
    """
    if any(f is None for f in forms):
        return None
    cut = {(k, d) for k, f in enumerate(forms) for d, axes in enumerate(f.dims if f else ()) if axes}
    partial = {k: f.partial[0][1] for k, f in enumerate(forms) if f and f.partial}
    if not cut and not partial:
        return WHOLE
    options: Iterable[Strategy] = ()
    if not partial:
        majors = {_major(rule, k, d) for k, d in cut}
        options = [Strategy(((f, (AXIS,)),)) for f in majors if f is not None and rule.method.get(f) in METHODS]
    elif not cut:
        options = [
            Strategy((), ((AXIS, n),))
            for n, p in enumerate(rule.passes)
            if set(partial.values()) == {p.kind} and set(partial) <= set(p.operands) <= {*partial, *joins}
        ]
    needed = {k for k, _ in cut} | set(partial)
    fitting = (s for s in options if is_legal(rule, s, mesh) and all(operand_sharding(rule, s, k) == forms[k] for k in needed))
    return next(fitting, None)


def _major(rule: ShardingRule, operand: int, d: int) -> str | None:
    """The factor by which a dimension is cut into blocks."""
    return next((f for f in rule.operands[operand][d] if rule.size[f] > 1), None)


def producing(rule: ShardingRule, result: int, form: TensorSharding, mesh: LogicalMesh) -> Strategy | None:
    """The strategy by which an op on whole operands gives a result cut so."""
    d = next(d for d, axes in enumerate(form.dims) if axes)
    factor = next((f for f in rule.results[result][d] if rule.size[f] > 1), None)
    if factor is None or rule.method.get(factor) not in METHODS:
        return None
    found = Strategy(((factor, (AXIS,)),))
    return found if is_legal(rule, found, mesh) and result_sharding(rule, found, result) == form else None
