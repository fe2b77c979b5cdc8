"""Random primitives: each key of a batch is independent of the others, so batches of keys may be cut.

Threefry's bits are a hash of key and position, so each device can make any part of them; those of other generators stay whole.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.rule import ShardingRule
from autopar.rules.elementwise import pointwise
from autopar.rules.notation import build, stays, whole_rule
from autopar.rules.registry import Avals, register


@register("random_bits")
def random_bits(operands: Avals, results: Avals, *, by_position: bool = False, **_: Any) -> ShardingRule:
    """`(k) -> (k r)`: the dimensions of one key's bits are cut by method `bits`."""
    batch = operands[0].ndim
    keys, bits = [f"k{d}" for d in range(batch)], [f"r{d}" for d in range(results[0].ndim - batch)]
    return build([keys], [keys + bits], operands, results, methods=dict.fromkeys(bits, "bits" if by_position else "whole"))


@register("random_split", "random_wrap", "random_unwrap", "random_seed", "random_clone")
def keyed(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    """`(k [n]) -> (k [m])`: the leading dimensions that both have are the batch of keys."""
    batch = min(operands[0].ndim, results[0].ndim)
    names = [f"k{d}" for d in range(batch)]
    tensors = [names + [f"{side}{d}" for d in range(a.ndim - batch)] for side, a in (("p", operands[0]), ("r", results[0]))]
    whole = stays(f for t in tensors for f in t[batch:])
    return build(tensors[:1], tensors[1:], operands, results, methods=whole)


@register("random_fold_in")
def random_fold_in(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    return pointwise(operands, results)


@register("random_gamma")
def random_gamma(operands: Avals, results: Avals, **_: Any) -> ShardingRule:
    """One key per sample where the shapes agree."""
    if operands[0].shape != operands[1].shape:
        return whole_rule(operands, results)
    return pointwise(operands, results)
