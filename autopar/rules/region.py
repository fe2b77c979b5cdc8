"""What enters and leaves loop bodies and branches: values go through as they lie.

A carried value comes in by `loop_carry` and goes round by `loop_exit`; the planner gives both one sharding. A scan takes slices of its
stacked operands along the first dimension, which stays whole, and stacks results along it. An outer value that comes in by `loop_read` may
be converted before the loop, once, or in each of its iterations.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.rule import ShardingRule
from autopar.rules.elementwise import pointwise
from autopar.rules.notation import build, stays
from autopar.rules.passing import Constants, moved
from autopar.rules.registry import Avals, register


@register("loop_carry", "loop_exit", "loop_view", "loop_read")
def passed_on(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`(i j) -> (i j)`."""
    return pointwise(operands, results, moved(results[0].dtype, (0,), constants))


@register("loop_slice")
def sliced(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`([l] i j) -> (i j)`."""
    names = [f"i{d}" for d in range(results[0].ndim)]
    passes = moved(results[0].dtype, (0,), constants)
    return build([["l", *names]], [names], operands, results, methods=stays("l"), passes=passes)


@register("loop_stack")
def stacked(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`(i j) -> ([l] i j)`."""
    names = [f"i{d}" for d in range(operands[0].ndim)]
    passes = moved(results[0].dtype, (0,), constants)
    return build([names], [["l", *names]], operands, results, methods=stays("l"), passes=passes)


@register("loop_test")
def tested(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    """The predicate of a loop, whole."""
    return build([[]], [], operands, results)


@register("branch_join")
def joined(operands: Avals, results: Avals, *, constants: Constants, **_: Any) -> ShardingRule:
    """`(), (i j), (i j) -> (i j)`: the number of the branch, and what each branch gives."""
    names = [f"i{d}" for d in range(results[0].ndim)]
    passes = moved(results[0].dtype, tuple(range(1, len(operands))), constants)
    return build([[], *[names for _ in operands[1:]]], [names], operands, results, passes=passes)
