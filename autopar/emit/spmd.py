"""The second emitter: the program as written under `jit`, each value constrained to its planned sharding.

The compiler finds the collectives itself, so they need not be those of the plan; numbers and placement are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autopar.emit.manual import Emission, named_sharding
from autopar.ir.strategy import result_sharding
from autopar.trace import compat


def emit_jit(emission: Emission, mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The whole program over `mesh`: `(zero, *inputs) -> outputs`, to be jitted by the caller. `zero` is not used."""
    graph, plan = emission.graph, emission.plan

    def program(zero: Any, *inputs: Any) -> tuple[Any, ...]:
        env = dict(zip(graph.inputs, inputs, strict=True))
        for i, op in enumerate(graph.ops):
            equation = emission.program.equations[op.equation]
            operands = [env[o] if isinstance(o, int) else equation.literals[k] for k, o in enumerate(op.operands)]
            results = compat.bind(equation.equation, operands, dict(equation.equation.params))
            for k, (r, x) in enumerate(zip(op.results, results, strict=True)):
                sharding = result_sharding(emission.rules[i], plan.strategies[i], k)
                env[r] = _constrain(x, named_sharding(sharding.without_partial(), mesh)) if any(sharding.dims) else x
        outputs = [
            env[o] if isinstance(o, int) else jnp.asarray(emission.program.literal_outputs[k], dtype=graph.aval(o).dtype)
            for k, o in enumerate(graph.outputs)
        ]
        outputs = [compat.with_weak_type(x, graph.aval(o).weak_type) for x, o in zip(outputs, graph.outputs, strict=True)]
        return tuple(_constrain(x, named_sharding(s, mesh)) for x, s in zip(outputs, plan.outputs, strict=True))

    return program


def _constrain(x: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, sharding)
