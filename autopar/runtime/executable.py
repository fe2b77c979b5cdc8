"""From a plan to what runs it: one program, or one for each stage."""

from __future__ import annotations

from jax.sharding import Mesh

from autopar import rules
from autopar.emit.manual import Emission
from autopar.ir.plan import Plan
from autopar.runtime.executor import Executable
from autopar.runtime.pipeline import PipelineExecutable, pipeline_for
from autopar.runtime.program import planned
from autopar.trace.trace import Traced

AnyExecutable = Executable | PipelineExecutable


def executable_for(plan: Plan, traced: Traced, mesh: Mesh, donate: bool = True, emitter: str = "shard_map") -> AnyExecutable:
    """A plan and the program that it belongs to, ready to be compiled for `mesh`."""
    if plan.stages:
        return pipeline_for(plan, traced, mesh, donate)
    traced = planned(traced, plan)
    found = tuple(rules.rule_for(op, traced.graph.aval) for op in traced.graph.ops)
    as_written = plan.options.get("reduce_dtype") == "as_written"
    return Executable(traced, Emission(traced.graph, traced.program, found, plan.sharding, as_written), mesh, donate, emitter)
