"""Time, memory and FLOPs of the chosen plan."""

from __future__ import annotations

from typing import Any

from autopar import costs
from autopar.compiler.compilation import Compilation
from autopar.intraop.price import argument_bytes
from autopar.ir.graph import MATMULS
from autopar.ir.plan import Predicted


def predict(c: Compilation) -> Predicted:
    """Time, memory and FLOPs of the chosen plan."""
    assert c.chosen is not None and c.shape is not None
    price, work = c.chosen.price, costs.graph_flops(c.traced.graph)
    arguments = argument_bytes(c.shape.graph, c.chosen.plan)
    peak = max(c.chosen.peak_bytes, arguments)
    rate = sum(_peak_flops(c.cluster, dtype) * share for dtype, share in _matmul_dtypes(c).items())
    return Predicted(
        price.total_s,
        price.compute_s + price.copies_s + price.launch_s,
        price.communication_s,
        price.communication_s,
        0.0,
        peak,
        arguments,
        peak - arguments,
        work,
        min(1.0, work / (price.total_s * rate)) if rate and price.total_s else 0.0,
    )


def _matmul_dtypes(c: Compilation) -> dict[str, float]:
    """Share of the matmul FLOPs done in each dtype."""
    found: dict[str, float] = {}
    graph = c.traced.graph
    for op, times in zip(graph.ops, graph.times, strict=True):
        if op.primitive in MATMULS:
            operands = [graph.aval(o) for o in op.operands]
            work = times * costs.flops(op, operands, [graph.avals[r] for r in op.results])
            found[operands[0].dtype] = found.get(operands[0].dtype, 0.0) + work
    total = sum(found.values())
    return {d: w / total for d, w in found.items()} if total else {"float32": 1.0}


def _peak_flops(cluster: Any, dtype: str) -> float:
    return float(cluster.device.peak(dtype)) * cluster.num_devices
