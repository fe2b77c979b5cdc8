"""A region that the user wrote per device (`shard_map`): one op, cut along its own mesh axes or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import Axes
from autopar.rules.notation import Name, build, stays, whole_rule
from autopar.rules.registry import Avals, register

Dims = Sequence[Axes]


@register("shard_map")
def shard_map(
    operands: Avals,
    results: Avals,
    *,
    axis_sizes: Sequence[tuple[str, int]],
    in_dims: Sequence[Dims],
    out_dims: Sequence[Dims],
    acts: bool,
    **_: Any,
) -> ShardingRule:
    """`((x y rest) k), (k) -> (x y rest)`: a factor per mesh axis, named after it, in every dimension that a spec cuts with it.

    Cutting all of them, each by the axis of its name, gives one device just what its part of the region takes and makes. With effects
    on the host the region stays whole.
    """
    if acts:
        return whole_rule(operands, results)
    tensors = [_names(n, dims) for n, dims in enumerate((*in_dims, *out_dims))]
    sizes = {a: n for a, n in axis_sizes if any(a in d for t in (*in_dims, *out_dims) for d in t)}
    rest = stays(d[-1] for t in tensors for d in t)
    count = len(operands)
    methods = rest | dict.fromkeys(sizes, "manual")
    return build(tensors[:count], tensors[count:], operands, results, sizes=sizes, methods=methods)


def _names(n: int, dims: Dims) -> list[Name]:
    """A dimension cut by axes has their factors and what is left; no axis is named like the latter."""
    return [(*axes, f"{n}.{d}") for d, axes in enumerate(dims)]
