"""A plan's program whose ops know the parts of its model: where they begin, and in which part and phase an op stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar import rules
from autopar.api.plans import Plan
from autopar.interop import Layers, layers_at, ops_of
from autopar.ir.graph import Graph
from autopar.ir.plan import ShardingPlan
from autopar.ir.rule import ShardingRule
from autopar.runtime.program import in_layers
from autopar.trace.recompute import recompute
from autopar.trace.trace import Traced


@dataclass(frozen=True, eq=False)
class Marked:
    """A plan and its program. `gives` are bytes that a microbatch hands from each part to the next, whole."""

    plan: Plan
    traced: Traced
    graph: Graph
    gives: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.gives)

    @property
    def sharding(self) -> ShardingPlan:
        return self.plan.data.sharding

    @property
    def as_written(self) -> bool:
        return self.plan.data.options.get("reduce_dtype") == "as_written"

    @cached_property
    def rules(self) -> tuple[ShardingRule, ...]:
        return tuple(rules.rule_for(op, self.graph.aval) for op in self.graph.ops)

    def part(self, i: int) -> int:
        """The part of an op; the last one's where it belongs to several or none."""
        part = self.graph.ops[min(i, len(self.graph.ops) - 1)].part
        return part if 0 <= part < self.count else self.count - 1

    def phase(self, i: int) -> str:
        """The phase of an op; what stands before and after the microbatches' loop, if there is one, is part of the update."""
        if i >= len(self.graph.ops):
            return "update"
        return self.graph.ops[i].phase if self.plan.data.microbatches == 1 or self.graph.times[i] > 1 else "update"

    def readers(self, value: int) -> list[int]:
        """The ops that read a value."""
        return [i for i, _ in self.graph.uses.get(value, ()) if i < len(self.graph.ops)]


def marked(plan: Plan, begins: Sequence[str]) -> Marked:
    """A plan's program, its parts beginning with the first op and with the first forward ops in the scopes that are called `begins`."""
    assert plan._traced is not None
    traced, found = plan._traced, plan.data
    layers = layers_at(ops_of(traced.graph, traced.roles.carried), _places(traced.graph, begins))
    if found.microbatches > 1:
        graph = in_layers(traced, layers, found.microbatches, (), str(found.options.get("accumulate_dtype"))).traced.graph
    else:
        graph = _in_parts(traced.graph, layers)
    gives = (*(b / found.microbatches for b in layers.chain.forward_bytes[1:-1]), 0.0)
    return Marked(plan, traced, recompute(graph, found.recomputed), gives)


def _places(graph: Graph, names: Sequence[str]) -> list[int]:
    """The first forward op in each of these scopes."""
    forward = [(i, op.scope.split("/")) for i, op in enumerate(graph.ops) if op.phase == "forward"]
    return [next(i for i, scope in forward if name in scope) for name in names]


def _in_parts(graph: Graph, layers: Layers) -> Graph:
    return replace(graph, ops=tuple(replace(op, part=part) for op, part in zip(graph.ops, layers.layer_of, strict=True)))
