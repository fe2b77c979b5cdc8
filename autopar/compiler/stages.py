"""The search for a plan in pipeline stages: how many stages and microbatches, which logical mesh, which schedule."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autopar.compiler.candidate import Candidate
from autopar.compiler.compilation import Compilation, logical_meshes
from autopar.compiler.sketch import FEW_OPS, Division, Sketch, Table
from autopar.compiler.stage_plan import plan_of
from autopar.errors import AutoparError, InfeasibleError, MicrobatchError, SolverError, UsageError
from autopar.interop import Layers, find_layers, fine_layers, ops_of
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS
from autopar.runtime.program import in_pieces
from autopar.schedule.formulas import Formula
from autopar.trace.parts import even_borders
from autopar.trace.roles import batch_leaves
from autopar.trace.trace import Traced

IN_TIME = ("eager_1f1b", "zero_bubble", "1f1b")
"""Schedules among which `auto` chooses, what holds most first: where memory decides nothing, one solution serves them all."""

MOST = 4
"""Sketches of which the stages are planned."""

FAILURES = 12
"""Sketches whose stages are planned and do not fit, after which no more are."""

LIKELY = 4
"""Microbatches per stage that are tried first, where it is not known how many suit other numbers of stages."""

GAIN = 0.01
"""Share of the seconds that twice or half as many microbatches must save to go on."""


def plan_in_stages(c: Compilation, count: int) -> Compilation:
    """A plan in so many stages. Raises `UsageError` where the devices, or the layers, do not divide into them."""
    begin = time.perf_counter()
    search = StageSearch(c, count * _chunks(c))
    search.sketch(count)
    return search.planned(search.best(c.least), begin)


def plan_for_any_stages(c: Compilation, whole: Callable[[Compilation], Compilation]) -> Compilation:
    """The fastest plan over numbers of stages, `whole` giving that in one, if there is one that takes less than `Compilation.below`."""
    begin = time.perf_counter()
    counts = [count for count in _stage_counts(c) if count > 1]
    search = StageSearch(c, min([2, *counts]) * _chunks(c))
    refused: AutoparError | None = None
    best: Candidate | None = None
    try:
        for count in counts:
            with suppress(TooFewLayers):
                search.sketch(count)
        best = search.best(False) if search.sketches or search.too_much else None
    except (InfeasibleError, MicrobatchError, SolverError) as error:
        refused = error
    if best is not None and _fixed(c) is not None:
        return search.planned(best, begin)
    c.progress("one stage")
    try:
        one = whole(replace(c, below=best.seconds if best else None, least=c.least and best is None))
    except (InfeasibleError, MicrobatchError, SolverError) as error:
        if best is None:
            raise (error if refused is None or isinstance(error, InfeasibleError) else refused) from None
        return search.planned(best, begin)
    assert one.plan is not None
    alone = one.plan.predicted.step_time_s
    tried = (("one stage", alone), *search.tried)
    if best is not None and best.seconds < alone:
        return search.planned(best, begin, (("one stage", alone),))
    return replace(one, plan=replace(one.plan, candidates=(*one.plan.candidates, *tried)))


def _faster(a: Candidate | None, b: Candidate | None) -> Candidate | None:
    """The faster of two; of equals the first."""
    return a if b is None or (a is not None and a.seconds <= b.seconds * (1 + 1e-9)) else b


class TooFewLayers(UsageError):
    """A step has not as many layers as stages are asked for."""


class StageSearch:
    """Sketches of plans in stages, and the fastest of them whose stages are planned.

    Layers are found once, for `least` of them or more; or for each number of stages, where scans over layers are cut for that.
    """

    def __init__(self, c: Compilation, least: int):
        self.c = c
        self.least = least
        self.steps: dict[int, tuple[Traced, Layers]] = {}
        self.known: dict[int, tuple[int, Traced, Layers]] = {}
        self.divisions: dict[tuple[int, int], Division] = {}
        self.sketches: list[Sketch] = []
        self.too_much: list[tuple[Table, Formula]] = []
        self.passed_over: list[tuple[Table, Formula]] = []
        self.foretold: list[InfeasibleError] = []
        self.refused: list[InfeasibleError] = []
        self.unanswered: list[SolverError] = []
        self.tried: list[tuple[str, float]] = []

    def _step(self, count: int) -> tuple[int, Traced, Layers]:
        """The step that is cut into so many stages and its layers, with a number that is that of others where these are the same."""
        parts = count * _chunks(self.c)
        if parts in self.known:
            return self.known[parts]
        step = in_pieces(self.c.traced, lambda length: even_borders(length, parts), self.c.options.batch_argnums)
        key = parts if step.pieces.borders else 0
        if key not in self.steps:
            ops = ops_of(step.graph, step.roles.carried)
            try:
                self.steps[key] = step, find_layers(ops, parts) if key else fine_layers(ops, self.least, _chunks(self.c))
            except UsageError as error:
                raise TooFewLayers(str(error)) from None
        found, layers = self.steps[key]
        if len(layers.costs) < parts:
            raise TooFewLayers(f"the step has {len(layers.costs)} layers, which do not make {parts} stages. Ask for fewer.")
        self.known[parts] = key, found, layers
        return self.known[parts]

    def sketch(self, count: int) -> None:
        """Sketches in so many stages: with the number of microbatches that is asked for, or up and down from a likely one.

        That number is sought on the first logical mesh, which has one axis if the user does not say; then the others are tried.
        """
        submesh, meshes = _submeshes(self.c, count)
        if isinstance(self.c.options.microbatches, int):
            self._sketches(count, submesh, meshes, self.c.options.microbatches)
            return
        counts = _microbatch_counts(self.c, count)
        fastest = min(self.sketches, key=lambda s: s.seconds, default=None)
        likely = LIKELY * count if fastest is None else fastest.formula.microbatches
        first = min(range(len(counts)), key=lambda k: abs(math.log2(counts[k] / likely)))
        known = {first: self._sketches(count, submesh, meshes[:1], counts[first])}
        for step in (1, -1):
            at = first
            while 0 <= at + step < len(counts) and not (step < 0 and known[at] == float("inf")):  # fewer hold more
                known[at + step] = self._sketches(count, submesh, meshes[:1], counts[at + step])
                if known[at + step] >= known[at] * (1 - GAIN) and known[at] < float("inf"):
                    break
                at += step
        self._sketches(count, submesh, meshes[1:], counts[min(sorted(known, reverse=True), key=lambda k: known[k])])

    def _sketches(self, count: int, submesh: Any, meshes: Sequence[LogicalMesh], microbatches: int) -> float:
        """Sketches on these logical meshes, under every schedule; the seconds of the fastest."""
        key, step, layers = self._step(count)
        if (key, microbatches) not in self.divisions:
            self.divisions[key, microbatches] = Division.of(self.c, step, layers, microbatches)
        least = float("inf")
        for mesh in meshes:
            table = Table(self.c, self.divisions[key, microbatches], count, submesh, mesh)
            for name in _schedules(self.c):
                formula = Formula(name, microbatches, _chunks(self.c))
                try:
                    found = table.sketch(formula, below=min((s.seconds for s in self.sketches), default=float("inf")))
                except InfeasibleError as error:
                    self.foretold.append(error)
                    self.too_much.append((table, formula))
                    continue
                except SolverError as error:
                    self.c.progress(f"{count} stages of {mesh}: {error}")
                    self.unanswered.append(error)
                    break
                if found is None:
                    self.passed_over.append((table, formula))
                    least = min(least, table.fastest)
                    continue
                self.c.progress(f"{found}: about {found.seconds * 1e3:.4g} ms")
                self.sketches.append(found)
                least = min(least, found.seconds)
        return least

    def best(self, least: bool) -> Candidate:
        """The fastest candidate. Raises `InfeasibleError` where none fits, having looked for one that holds `least`."""
        heap = [(s.seconds, n, s) for n, s in enumerate(self.sketches)]
        heapq.heapify(heap)
        best: Candidate | None = None
        planned = failed = 0
        while failed < FAILURES and planned < MOST:
            if not heap and best is None:
                heap = [(s.seconds, n, s) for n, s in enumerate(self._passed_over())]
                heapq.heapify(heap)
            if not heap:
                break
            seconds, n, sketch = heapq.heappop(heap)
            if best is not None and seconds >= best.seconds:
                break
            refused = len(self.refused)
            found = self._candidate(sketch)
            if (found is None or sketch.makes_again) and self.c.options.remat == "auto" and sketch.num_ops <= FEW_OPS:
                found = _faster(found, self._candidate(sketch, "auto"))
            if found is None:
                smaller = sketch.smaller(self.refused[-1].peak_bytes) if len(self.refused) > refused else None
                if smaller is not None:
                    heapq.heappush(heap, (smaller.seconds, n, smaller))
            best = _faster(best, found)
            planned += found is not None
            failed += found is None
        return best or self._at_last(least)

    def _passed_over(self) -> list[Sketch]:
        """The sketches that were not looked for, as none could be as fast as one that does not fit after all."""
        found: list[Sketch] = []
        while self.passed_over:
            table, formula = self.passed_over.pop()
            with suppress(InfeasibleError, SolverError):
                found += filter(None, [table.sketch(formula)])
        return found

    def _at_last(self, least: bool) -> Candidate:
        """What holds less than sketches foretell may fit after all. Raises the least bad `InfeasibleError`."""
        best: Candidate | None = None
        beyond = [sketch for table, formula in self.too_much for sketch in table.beyond(formula)]
        for sketch in sorted([*self.sketches, *beyond], key=lambda s: s.fullest)[:MOST]:
            exactly = self.c.options.remat == "auto" and sketch.num_ops <= FEW_OPS
            best = _faster(best, self._candidate(sketch, "auto" if exactly else None, least))
        if best is not None:
            return best
        for errors in (self.refused, self.foretold):
            if errors:
                raise min(errors, key=lambda e: e.peak_bytes or float("inf"))
        raise self.unanswered[0]

    def _candidate(self, sketch: Sketch, remat: str | None = None, least: bool = False) -> Candidate | None:
        """A sketch's stages, planned."""
        try:
            found = sketch.candidate(remat, least)
        except InfeasibleError as error:
            self.refused.append(error)
            return None
        except SolverError as error:
            self.c.progress(f"{sketch}: {error}")
            self.unanswered.append(error)
            return None
        self.c.progress(f"{sketch}: {found.seconds * 1e3:.4g} ms")
        self.tried.append((str(sketch), found.seconds))
        return found

    def planned(self, best: Candidate, begin: float, others: Sequence[tuple[str, float]] = ()) -> Compilation:
        """The compilation with the plan of a candidate; `others` are plans that were found elsewhere, with their seconds."""
        plan = plan_of(best, time.perf_counter() - begin)
        return replace(self.c, microbatches=best.schedule.num_microbatches, plan=replace(plan, candidates=(*others, *self.tried)))


def _stage_counts(c: Compilation) -> Iterator[int]:
    """Numbers of stages to try: 1, 2, 4, ... that divide the devices, one for each node first, or the one that the user's mesh has an axis
    for."""
    fixed = _fixed(c)
    if fixed is not None:
        yield fixed.by_name[STAGE_AXIS]
        return
    devices = c.cluster.num_devices
    found = [2**k for k in range(devices.bit_length()) if devices % 2**k == 0]
    yield from sorted(found, key=lambda count: abs(math.log2(count / c.cluster.shape[0])))


def _fixed(c: Compilation) -> LogicalMesh | None:
    """The user's own mesh that has an axis for stages."""
    return next((mesh for mesh in c.meshes if STAGE_AXIS in mesh.names), None)


def _schedules(c: Compilation) -> tuple[str, ...]:
    if c.options.schedule != "auto":
        return (c.options.schedule,)
    has_backward = any(op.phase == "backward" for op in c.traced.graph.ops)
    return IN_TIME if has_backward else ("forward",)


def _microbatch_counts(c: Compilation, stages: int) -> list[int]:
    """The numbers of microbatches that may be tried: multiples of the number of stages by powers of two that divide the batch, or what
    comes nearest."""
    batch = batch_leaves(c.traced.signature, c.traced.roles, c.traced.graph, c.options.batch_argnums)
    size = c.traced.graph.avals[c.traced.graph.inputs[batch[0]]].shape[0] if batch else 1
    wanted = [stages * 2**k for k in range(size.bit_length()) if size % (stages * 2**k) == 0]
    return wanted or [max((n for n in range(1, size + 1) if size % n == 0 and n <= 2 * stages), default=1)]


def _chunks(c: Compilation) -> int:
    return c.interleave if c.options.schedule == "interleaved" else 1


def _submeshes(c: Compilation, count: int) -> tuple[Any, tuple[LogicalMesh, ...]]:
    """One stage's share of the cluster, and the logical meshes worth trying on it."""
    whole = c.cluster.num_devices
    fixed = _fixed(c)
    if whole % count:
        raise UsageError(f"{whole} devices do not divide into {count} stages. Ask for a number of stages that divides them.")
    size = whole // count
    part = _part(c.cluster, size)
    if c.restriction is not None:
        return part, c.meshes
    if fixed is None:
        return part, _aligned(part, c.options.axis_names) if size > 1 else (LogicalMesh(c.options.axis_names[:1], (1,)),)
    if fixed.names[0] != STAGE_AXIS or fixed.sizes[0] != count:
        raise UsageError(
            f"{count} stages on a mesh of ({fixed}): let its first axis be {STAGE_AXIS!r}, of size {count}, or leave that axis out."
        )
    return part, (LogicalMesh(fixed.names[1:], fixed.sizes[1:]) if len(fixed.names) > 1 else LogicalMesh(("x",), (1,)),)


def _aligned(cluster: Any, axis_names: Sequence[str]) -> tuple[LogicalMesh, ...]:
    """The logical meshes of a stage, that of one axis first; where it has several nodes, an axis is within one or across them."""
    found = logical_meshes(cluster, axis_names)
    inner = math.prod(cluster.shape[1:])
    whole = [mesh for mesh in found if len(mesh.sizes) == 1 or cluster.num_devices == inner or mesh.sizes[-1] == inner]
    return tuple(sorted(whole or found, key=lambda mesh: len(mesh.sizes)))


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
