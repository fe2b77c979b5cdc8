"""The per-device program of a plan, under `shard_map` with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.emit.collectives import apply_move, axis_index, named
from autopar.emit.gate import gate
from autopar.emit.lower import Place, lower
from autopar.emit.regions import run
from autopar.errors import CheckError
from autopar.ir.graph import GATE, Graph, Operand
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding, result_sharding
from autopar.rules.inside import Named, numbered
from autopar.trace import compat

_Form = tuple[int, TensorSharding, int]

ANCHORS = 16
"""Values that a gate waits for at most."""


def partition_spec(sharding: TensorSharding) -> PartitionSpec:
    """The border sharding of a leaf as JAX writes it."""
    return PartitionSpec(*(None if not d else d[0] if len(d) == 1 else d for d in sharding.dims))


def named_sharding(sharding: TensorSharding, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(sharding))


@dataclass(frozen=True, eq=False)
class Emission:
    """What emission needs to know beside the plan: the graph, JAX's equations, the rules, and how sums are held."""

    graph: Graph
    program: Any
    rules: Sequence[ShardingRule]
    plan: ShardingPlan
    as_written: bool = False

    @cached_property
    def inside(self) -> Mapping[int, tuple[Named, ...]]:
        """The collectives that ops themselves contain, by op."""
        return numbered(self.graph, self.rules, self.plan)


def per_device(emission: Emission, platform: str) -> Callable[..., tuple[Any, ...]]:
    """The function that runs on each device: `(zero, *local inputs) -> local outputs`.

    `zero` is a runtime int32 zero for the gates.
    """

    def body(zero: Any, *inputs: Any) -> tuple[Any, ...]:
        return Device(emission, platform, zero).run(inputs)

    return body


def emit(emission: Emission, mesh: Mesh) -> Callable[..., tuple[Any, ...]]:
    """The whole program over `mesh`: `(zero, *inputs) -> outputs`, to be jitted by the caller."""
    plan = emission.plan
    return jax.shard_map(
        per_device(emission, mesh.devices.flat[0].platform),
        mesh=mesh,
        in_specs=(PartitionSpec(), *map(partition_spec, plan.inputs)),
        out_specs=tuple(map(partition_spec, plan.outputs)),
        check_vma=False,
    )


@dataclass
class Device:
    """One device's run through the ops: reads each operand in the form that the strategy needs, and binds the primitive."""

    emission: Emission
    platform: str
    zero: Any
    forms: dict[_Form, Any] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    received: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.emission.plan
        self.place = Place(plan.mesh, axis_index, self.platform)
        self.moves: dict[_Form, PlannedMove] = {(m.value, m.target, m.generation): m for m in plan.moves}

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        e = self.emission
        for value, sharding, x in zip(e.graph.inputs, e.plan.inputs, _beside(self.zero, inputs), strict=True):
            self.forms[value, sharding, 0] = self.made[value] = x
        run(self, 0, len(e.graph.ops))
        return tuple(self.output(k, o) for k, o in enumerate(e.graph.outputs))

    def op(self, i: int) -> None:
        e = self.emission
        op, rule, strategy = e.graph.ops[i], e.rules[i], e.plan.strategies[i]
        if op.primitive == GATE:
            self.give(i, gate(self.operand(i, 0), before(e.graph, self.made), self.zero, self.platform))
            return
        equation = e.program.equations[op.equation]
        operands = [self.operand(i, k) for k in range(len(op.operands))]
        with jax.named_scope(op.scope or op.phase):
            results = lower(
                lambda params, xs: compat.bind(equation.equation, xs, params),
                op,
                dict(equation.equation.params),
                rule,
                strategy,
                tuple(e.graph.aval(o) for o in op.operands),
                tuple(e.graph.avals[r] for r in op.results),
                operands,
                self.place,
                as_written=e.as_written,
                equation=equation.equation,
                ids=tuple(c.id for c in e.inside.get(i, ())),
                received=self.received,
            )
        for k, (r, x) in enumerate(zip(op.results, results, strict=True)):
            self.forms[r, result_sharding(rule, strategy, k), 0] = self.made[r] = x

    def inner(self) -> Device:
        """A run inside a loop or branch, which begins with all that is there."""
        return Device(self.emission, self.platform, self.zero, dict(self.forms), dict(self.made), dict(self.received))

    def give(self, i: int, x: Any) -> None:
        """The result of an op that enters or leaves a region."""
        e = self.emission
        value = e.graph.ops[i].results[0]
        self.forms[value, result_sharding(e.rules[i], e.plan.strategies[i], 0), 0] = self.made[value] = x

    def operand(self, i: int, k: int) -> Any:
        """Operand k of op i in the form that the op needs."""
        e = self.emission
        operand = e.graph.ops[i].operands[k]
        if not isinstance(operand, int):
            return e.program.equations[e.graph.ops[i].equation].literals[k]
        needed = operand_sharding(e.rules[i], e.plan.strategies[i], k)
        return self.read(operand, needed, e.plan.generation(i, k))

    def output(self, k: int, operand: Operand) -> Any:
        e = self.emission
        aval = e.graph.aval(operand)
        if not isinstance(operand, int):
            return compat.with_weak_type(jnp.asarray(e.program.literal_outputs[k], dtype=aval.dtype), aval.weak_type)
        x = self.read(operand, e.plan.outputs[k], e.plan.generation(len(e.graph.ops), k))
        return compat.with_weak_type(x, aval.weak_type)

    def read(self, value: int, sharding: TensorSharding, generation: int) -> Any:
        """A form of a value, made by its planned move if it is not there yet."""
        form = (value, sharding, generation)
        if form not in self.forms:
            move = self.moves.get(form)
            if move is None:
                raise CheckError(f"the plan has no move that brings value {value} to {sharding} (generation {generation}).")
            self.forms[form] = self.convert(move, self.read(value, move.source, move.source_generation))
        return self.forms[form]

    def convert(self, m: PlannedMove, x: Any) -> Any:
        e = self.emission
        dtype = e.graph.avals[m.value].dtype
        if m.gate >= 0:
            x = gate(x, [self.anchor(m)], self.zero, self.platform)
        if m.move.kind == "to_partial":
            x = _cast(x, m.target.local_dtype(dtype, e.as_written))
        x = named(m.id, lambda: apply_move(m.move, x, e.plan.mesh.size(m.move.axes), axis_index))
        return _cast(x, m.target.local_dtype(dtype, e.as_written))

    def anchor(self, m: PlannedMove) -> Any:
        """What a gated move waits for: another operand of its op, as it was made; where an earlier op already needs the move, the
        newest value there is.
        """
        graph = self.emission.graph
        for o in graph.ops[m.gate].inputs:
            if o != m.value and o in self.made and o not in graph.unmoved and graph.avals[o].size:
                return self.made[o]
        return next(x for v, x in reversed(self.made.items()) if x.size and v not in graph.fixed_inside)


def before(graph: Graph, made: dict[int, Any]) -> list[Any]:
    """What must be there before a gate opens: the newest value that is not itself made again, and what was made since the last gate for
    the update alone, whose operands would else be kept while the next block is made again.
    """
    found: list[int] = []
    for v in reversed(made):
        if v in graph.again and found:
            break
        if v not in graph.again and v not in graph.free and made[v].size:
            for_update = all(graph.ops[u].phase == "update" for u, _ in graph.uses.get(v, ()))
            if not found or (for_update and graph.producer.get(v) is not None):
                found.append(v)
        if len(found) == ANCHORS:
            break
    return [made[v] for v in found]


def _beside(zero: Any, inputs: Sequence[Any]) -> list[Any]:
    """The inputs; those without elements beside `zero`: XLA refuses a region by hand that reads nothing but arrays without elements."""
    empty = [k for k, x in enumerate(inputs) if x.size == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.float0)]
    found = list(inputs)
    if empty:
        for k, x in zip(empty, jax.lax.optimization_barrier((zero, *(inputs[k] for k in empty)))[1:], strict=True):
            found[k] = x
    return found


def _cast(x: Any, dtype: str) -> Any:
    return x if dtype.startswith("key<") or dtype == "float0" or str(x.dtype) == dtype else x.astype(dtype)
