"""The search for a plan in pipeline stages: how many stages and microbatches, which logical mesh, which schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from autopar.compiler.candidate import Candidate, Cut
from autopar.compiler.compilation import Compilation, logical_meshes
from autopar.compiler.stage_plan import plan_of
from autopar.errors import AutoparError, InfeasibleError, MicrobatchError, SolverError, UsageError
from autopar.interop import find_layers, ops_of
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS
from autopar.runtime.program import in_layers, in_pieces
from autopar.schedule import build
from autopar.trace.parts import even_borders
from autopar.trace.roles import batch_leaves

IN_TIME = ("eager_1f1b", "zero_bubble", "1f1b")
"""Schedules among which `auto` chooses, what holds most first: where memory decides nothing, one solution serves them all."""


def plan_in_stages(c: Compilation, count: int) -> Compilation:
    """A plan in so many stages of equal size. Raises `UsageError` where the devices, or the layers, do not divide into them."""
    chunks = c.interleave if c.options.schedule == "interleaved" else 1
    submesh, meshes = _submeshes(c, count)
    begin = time.perf_counter()
    step = in_pieces(c.traced, lambda length: even_borders(length, count * chunks), c.options.batch_argnums)
    ops = ops_of(step.graph, step.roles.carried)
    layers = find_layers(ops, count * chunks)
    best: Candidate | None = None
    refused: list[InfeasibleError] = []
    unanswered: list[SolverError] = []
    tried: list[tuple[str, float]] = []
    for microbatches in _counts(c, count):
        before = best.seconds if best else float("inf")
        c.progress(f"{count} stages, {microbatches} microbatches")
        layered = in_layers(step, layers, microbatches, c.options.batch_argnums, c.options.accumulate_dtype)
        cuts: dict[bool, Cut] = {}
        for mesh in meshes:
            for name in _schedules(c):
                in_two = name == "zero_bubble"
                if in_two not in cuts:
                    cuts[in_two] = Cut.of(layered, [(n, n + 1) for n in range(count * chunks)], name)
                try:
                    found = Candidate(c, cuts[in_two], submesh, mesh, build(name, count, microbatches, chunks))
                    found.check()
                except InfeasibleError as error:
                    refused.append(error)
                    continue
                except SolverError as error:
                    c.progress(f"mesh {mesh} a stage: {error}")
                    unanswered.append(error)
                    break  # nor would another schedule help
                c.progress(f"mesh {mesh} a stage, {name}: {found.seconds * 1e3:.3f} ms")
                tried.append((f"{count} stages of {mesh}, {microbatches} microbatches, {name}", found.seconds))
                if best is None or found.seconds < best.seconds * (1 - 1e-9):
                    best = found
        if best is not None and best.seconds >= before:
            break  # more microbatches are no faster
    if best is None:
        raise min(refused, key=lambda e: e.peak_bytes or float("inf")) if refused else unanswered[0]
    plan = plan_of(best, time.perf_counter() - begin)
    return replace(c, microbatches=best.schedule.num_microbatches, plan=replace(plan, candidates=tuple(tried)))


def plan_for_any_stages(c: Compilation, whole: Callable[[Compilation], Compilation]) -> Compilation:
    """The fastest plan over numbers of stages, `whole` giving that in one. More stages are tried as long as they help or nothing fits."""
    found: list[Compilation] = []
    tried: list[tuple[str, float]] = []
    refused: AutoparError | None = None
    worse = 0
    for count in _stage_counts(c):
        c.progress("one stage" if count == 1 else f"{count} stages")
        try:
            done = whole(c) if count == 1 else plan_in_stages(c, count)
        except (InfeasibleError, MicrobatchError, SolverError) as error:
            refused = error if refused is None or isinstance(error, InfeasibleError) else refused
            continue
        except UsageError:
            break  # no more layers to cut
        assert done.plan is not None
        seconds = done.plan.predicted.step_time_s
        tried += [("one stage", seconds)] if count == 1 else done.plan.candidates
        worse = worse + 1 if found and seconds >= min(map(_seconds, found)) else 0
        found.append(done)
        if worse == 2:
            break
    if not found:
        assert refused is not None
        raise refused
    best = min(found, key=_seconds)
    assert best.plan is not None
    candidates = best.plan.candidates if not best.plan.stages else ()
    return replace(best, plan=replace(best.plan, candidates=(*candidates, *tried)))


def _seconds(c: Compilation) -> float:
    assert c.plan is not None
    return c.plan.predicted.step_time_s


def _stage_counts(c: Compilation) -> Iterator[int]:
    """Numbers of stages to try: 1, 2, 4, ... that divide the devices, or the one that the user's mesh has an axis for."""
    fixed = next((mesh for mesh in c.meshes if STAGE_AXIS in mesh.names), None)
    if fixed is not None:
        yield fixed.by_name[STAGE_AXIS]
        return
    count = 1
    while count <= c.cluster.num_devices:
        if c.cluster.num_devices % count == 0:
            yield count
        count *= 2


def _schedules(c: Compilation) -> tuple[str, ...]:
    if c.options.schedule != "auto":
        return (c.options.schedule,)
    has_backward = any(op.phase == "backward" for op in c.traced.graph.ops)
    return IN_TIME if has_backward else ("forward",)


def _counts(c: Compilation, stages: int) -> Iterator[int]:
    """The numbers of microbatches to try: the one asked for, or a few multiples of the number of stages that divide the batch."""
    asked = c.options.microbatches
    if isinstance(asked, int):
        yield asked
        return
    batch = batch_leaves(c.traced.signature, c.traced.roles, c.traced.graph, c.options.batch_argnums)
    size = c.traced.graph.avals[c.traced.graph.inputs[batch[0]]].shape[0] if batch else 1
    wanted = [n for n in (stages, 2 * stages, 4 * stages) if size % n == 0]
    yield from wanted or [max(n for n in range(1, size + 1) if size % n == 0 and n <= 2 * stages)]


def _submeshes(c: Compilation, count: int) -> tuple[Any, tuple[LogicalMesh, ...]]:
    """One stage's share of the cluster, and the logical meshes worth trying on it."""
    whole = c.cluster.num_devices
    fixed = next((mesh for mesh in c.meshes if STAGE_AXIS in mesh.names), None)
    if whole % count:
        raise UsageError(f"{whole} devices do not divide into {count} stages. Ask for a number of stages that divides them.")
    size = whole // count
    part = _part(c.cluster, size)
    if c.restriction is not None:
        return part, c.meshes
    if fixed is None:
        return part, logical_meshes(part, c.options.axis_names) if size > 1 else (LogicalMesh(c.options.axis_names[:1], (1,)),)
    if fixed.names[0] != STAGE_AXIS or fixed.sizes[0] != count:
        raise UsageError(
            f"{count} stages on a mesh of ({fixed}): let its first axis be {STAGE_AXIS!r}, of size {count}, or leave that axis out."
        )
    return part, (LogicalMesh(fixed.names[1:], fixed.sizes[1:]) if len(fixed.names) > 1 else LogicalMesh(("x",), (1,)),)


def _part(cluster: Any, size: int) -> Any:
    """So many devices that stand together."""
    shape = list(cluster.shape)
    left = size
    for d in reversed(range(len(shape))):
        shape[d] = next(n for n in range(min(shape[d], left), 0, -1) if shape[d] % n == 0 and left % n == 0)
        left //= shape[d]
    if left != 1:
        raise UsageError(f"{size} devices of {cluster.name}, whose shape is {cluster.shape}, do not stand together. Ask for other stages.")
    return cluster.submesh(*shape)
