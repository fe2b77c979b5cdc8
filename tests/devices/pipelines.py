"""Steps in pipeline stages under random legal plans, beside one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from programs import EXACT

import cost_models
from autopar import rules
from autopar.costs import Pricer
from autopar.emit.compare import compare_collectives
from autopar.emit.manual import Emission
from autopar.interop import find_layers, ops_of
from autopar.interop.settle import Planned, settle
from autopar.interop.split import StageGraph
from autopar.interop.timing import skipping
from autopar.intraop.forced import random_plan
from autopar.intraop.price import collectives
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.executor import Owned, make_mesh
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.program import Staged, in_layers, in_pieces
from autopar.runtime.stage import StageRun
from autopar.runtime.verify import alone, leaf_error
from autopar.schedule import build
from autopar.schedule.check import running
from autopar.trace.parts import even_borders
from autopar.trace.recompute import recompute, repeatable
from autopar.trace.trace import Traced, trace

AXES = ("x", "y")


@dataclass(frozen=True, eq=False)
class Forced:
    """A step under random plans: what runs it, and by stage the collectives that its plan has."""

    traced: Traced
    staged: Staged
    planned: tuple[Planned, ...]
    executable: PipelineExecutable
    collectives: tuple[tuple[Any, ...], ...]


def in_stages(traced: Traced, count: int, microbatches: int, schedule: str = "1f1b") -> Staged:
    """A traced step in so many stages, cut where its layers are found."""
    traced = in_pieces(traced, lambda length: even_borders(length, count))
    layers = find_layers(ops_of(traced.graph, traced.roles.carried), count)
    return in_layers(traced, layers, microbatches).staged(range(count), schedule)


def forced(
    step: Callable[..., Any],
    args: Sequence[Any],
    stages: int = 2,
    microbatches: int = 4,
    schedule: str = "1f1b",
    sizes: Sequence[int] = (1,),
    seed: int = 0,
    again: bool = False,
    donate: bool = True,
) -> Forced:
    """A random plan for each stage, on a mesh of these sizes; `again` makes values of forward again in backward."""
    traced = trace(step, args)
    chunks = 2 if schedule == "interleaved" else 1
    program = in_stages(traced, stages * chunks, microbatches, schedule)
    mesh = LogicalMesh(AXES[: len(sizes)], tuple(sizes))
    pricer = Pricer(cost_models.load_cluster(f"fast-link:{mesh.num_devices}", measure=False), mesh)
    planned = [_planned(s, _again(s.graph) if again else s.graph, mesh, pricer, seed + n) for n, s in enumerate(program.stages)]
    plans = settle(planned)
    order = build(schedule, stages, microbatches, chunks)
    runs = []
    for n, (p, plan) in enumerate(zip(planned, plans, strict=True)):
        begin = order.device_of[n] * mesh.num_devices
        devices = make_mesh(mesh, jax.devices()[begin : begin + mesh.num_devices])
        runs.append(StageRun(p.stage, Emission(p.graph, program.whole.program, p.rules, plan), program.constants(n), devices))
    order = skipping(order, [(n, p.other) for n, s in enumerate(program.stages) for p in s.sends if p.when == "each"])
    tasks = [task for _, task in running(order)]
    whole = make_mesh(LogicalMesh(("all",), (prod(sizes) * stages,)))
    found = tuple(tuple(collectives(p.graph, p.rules, plan, pricer)) for p, plan in zip(planned, plans, strict=True))
    executable = PipelineExecutable(runs, order, tasks, donate, whole, traced, program.whole.pieces)
    return Forced(traced, program, tuple(planned), executable, found)


def _planned(stage: StageGraph, graph: Graph, mesh: LogicalMesh, pricer: Pricer, seed: int) -> Planned:
    found = tuple(rules.rule_for(op, graph.aval) for op in graph.ops)
    return Planned(stage, graph, found, random_plan(graph, found, mesh, stage.carried, pricer.move, seed), pricer.move)


def _again(graph: Graph) -> Graph:
    """All that backward can make again is made again."""
    return recompute(graph, tuple(sorted(repeatable(graph))))


def check(found: Forced, args: Sequence[Any], steps: int = 3, leave_out: Sequence[str] = ()) -> None:
    """So many steps give what one device gives, and the compiled programs have the collectives that the plans have."""
    traced, leaves, owned = found.traced, jax.tree.leaves(tuple(args)), Owned()
    reference = jax.jit(lambda *x: jax.tree.leaves(traced.function(*jax.tree.unflatten(jax.tree.structure(tuple(args)), x))))
    ours, theirs = list(leaves), [alone(x) for x in leaves]
    for n in range(steps):
        outputs, expected = found.executable(ours, owned), reference(*theirs)
        for name, a, e in zip(traced.graph.output_names, outputs, expected, strict=True):
            if not any(part in name for part in leave_out):
                error = leaf_error(name, a, e)
                assert error.relative <= EXACT, f"step {n}: {error}"
        for i, o in traced.roles.carried:
            ours[i], theirs[i] = outputs[o], expected[o]
    for n, planned in enumerate(found.collectives):
        same = compare_collectives(planned, found.executable.collectives(n), "cpu", found.planned[n].plan.mesh)
        assert same.agree, f"stage {n}: {same}"
