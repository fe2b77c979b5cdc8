"""The second emitter: the program as written under `jit`, each value constrained to its planned sharding.

The compiler finds the collectives itself, so they need not be those of the plan; numbers and placement are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.emit.gate import gate
from autopar.emit.lower_manual import whole_region
from autopar.emit.manual import Emission, before, named_sharding
from autopar.emit.regions import run
from autopar.ir.graph import GATE
from autopar.ir.strategy import result_sharding
from autopar.trace import compat


def emit_jit(emission: Emission, mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The whole program over `mesh`: `(zero, *inputs) -> outputs`, to be jitted by the caller. `zero` is an int32 zero for the gates."""
    graph, plan = emission.graph, emission.plan

    def program(zero: Any, *inputs: Any) -> tuple[Any, ...]:
        values = _Values(emission, mesh, zero, dict(zip(graph.inputs, inputs, strict=True)))
        run(values, 0, len(graph.ops))
        outputs = [
            values.env[o] if isinstance(o, int) else jnp.asarray(emission.program.literal_outputs[k], dtype=graph.aval(o).dtype)
            for k, o in enumerate(graph.outputs)
        ]
        outputs = [compat.with_weak_type(x, graph.aval(o).weak_type) for x, o in zip(outputs, graph.outputs, strict=True)]
        return tuple(_constrain(x, named_sharding(s, mesh)) for x, s in zip(outputs, plan.outputs, strict=True))

    return program


@dataclass
class _Values:
    """The program's values by number, each constrained as it is made."""

    emission: Emission
    mesh: Mesh
    zero: Any
    env: dict[int, Any]

    def op(self, i: int) -> None:
        op = self.emission.graph.ops[i]
        if op.primitive == GATE:
            self.give(i, gate(self.operand(i, 0), before(self.emission.graph, self.env), self.zero, self.mesh.devices.flat[0].platform))
            return
        equation = self.emission.program.equations[op.equation].equation
        operands = [self.operand(i, k) for k in range(len(op.operands))]
        grouped = op.primitive == "conv_general_dilated" and max(op.param("feature_group_count"), op.param("batch_group_count")) > 1
        if grouped:  # the compiler's partitioner cuts these wrongly, or aborts
            operands = [self.whole(x) for x in operands]
        results = whole_region(equation, op)({}, operands) if op.primitive == "shard_map" else None
        for k, x in enumerate(results or compat.bind(equation, operands, dict(equation.params))):
            self.keep(i, k, self.whole(x) if grouped else x)

    def whole(self, x: Any) -> Any:
        return _constrain(x, NamedSharding(self.mesh, PartitionSpec()))

    def operand(self, i: int, k: int) -> Any:
        op = self.emission.graph.ops[i]
        o = op.operands[k]
        return self.env[o] if isinstance(o, int) else self.emission.program.equations[op.equation].literals[k]

    def give(self, i: int, x: Any) -> None:
        self.keep(i, 0, x)

    def keep(self, i: int, k: int, x: Any) -> None:
        sharding = result_sharding(self.emission.rules[i], self.emission.plan.strategies[i], k)
        self.env[self.emission.graph.ops[i].results[k]] = (
            _constrain(x, named_sharding(sharding.without_partial(), self.mesh)) if any(sharding.dims) else x
        )

    def inner(self) -> _Values:
        return _Values(self.emission, self.mesh, self.zero, dict(self.env))


def _constrain(x: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, sharding)
