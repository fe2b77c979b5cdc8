"""Parameters of a primitive for one device's part: those that carry global shapes are rewritten, shardings dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.strategy import Strategy, dim_axes

Shape = tuple[int, ...]
Params = dict[str, Any]
_SHARDINGS = ("sharding", "out_sharding")


@dataclass(frozen=True)
class Local:
    """The op as one device sees it."""

    rule: ShardingRule
    strategy: Strategy
    mesh: LogicalMesh
    operands: Sequence[Shape]
    results: Sequence[Shape]

    def is_cut(self, operand: int, d: int) -> bool:
        """Whether dimension d of an operand is cut."""
        return bool(dim_axes(self.rule.operands[operand][d], self.strategy))

    def share(self, size: int, factor: str) -> int:
        """A device's share of a parameter that counts a factor."""
        return size // self.mesh.size(self.strategy.axes(factor))


def localise(
    primitive: str,
    params: Params,
    rule: ShardingRule,
    strategy: Strategy,
    mesh: LogicalMesh,
    local_in_shapes: Sequence[Shape],
    local_out_shapes: Sequence[Shape],
) -> Params:
    """JAX's own parameters of `primitive`, rewritten for operands and results of these local shapes.

    Primitives that are not listed in `_LOCALISE` have no parameter that depends on a shape along a factor that may be cut.
    """
    params = {k: None if k in _SHARDINGS else v for k, v in params.items()}
    rewrite = _LOCALISE.get(primitive)
    return params if rewrite is None else params | rewrite(params, Local(rule, strategy, mesh, local_in_shapes, local_out_shapes))


def _result_shape(name: str) -> Callable[[Params, Local], Params]:
    return lambda params, local: {name: tuple(local.results[0])}


def _slice(params: Params, local: Local) -> Params:
    """Cut dimensions are taken whole, so they end where the part ends."""
    shape = local.operands[0]
    return {"limit_indices": tuple(shape[d] if local.is_cut(0, d) else n for d, n in enumerate(params["limit_indices"]))}


def _gather(params: Params, local: Local) -> Params:
    """Windows that span a dimension span the part; windows of one element stay so."""
    shape = local.operands[0]
    return {"slice_sizes": tuple(shape[d] if n > 1 and local.is_cut(0, d) else n for d, n in enumerate(params["slice_sizes"]))}


def _convolution(params: Params, local: Local) -> Params:
    """Groups may be cut as the factors that the rule names `g` (feature groups) and `g2` (batch groups)."""
    return {
        "feature_group_count": local.share(params["feature_group_count"], "g"),
        "batch_group_count": local.share(params["batch_group_count"], "g2"),
    }


def _tile(params: Params, local: Local) -> Params:
    sizes = zip(params["reps"], local.results[0], local.operands[0], strict=True)
    return {"reps": tuple(after // before if before else reps for reps, after, before in sizes)}


_LOCALISE: dict[str, Callable[[Params, Local], Params]] = {
    "broadcast_in_dim": _result_shape("shape"),
    "conv_general_dilated": _convolution,
    "dynamic_slice": _result_shape("slice_sizes"),
    "empty": _result_shape("shape"),
    "gather": _gather,
    "iota": _result_shape("shape"),
    "reshape": _result_shape("new_sizes"),
    "slice": _slice,
    "tile": _tile,
}
