"""The compile of a plan in pipeline stages: layers to stages, a sharding for each, what they give each other, a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from autopar import costs, rules as rule_table
from autopar.compiler.compilation import Compilation, batch_of, budget_of, fingerprint_of, logical_meshes, plain_options, restriction_of
from autopar.compiler.pins import stage_pins
from autopar.compiler.predict import peak_rate
from autopar.costs import Pricer
from autopar.emit.manual import Emission
from autopar.emit.stage import Cutter, Piece
from autopar.errors import AutoparError, InfeasibleError, MicrobatchError, SolverError, UsageError
from autopar.interop import find_layers, ops_of
from autopar.interop.settle import Planned, settle
from autopar.interop.split import AFTER, BEFORE, COTANGENT, FORWARD, WEIGHT, StageGraph
from autopar.interop.timing import simulate_plan, step_seconds
from autopar.intraop.choose import Chosen, SolveOptions
from autopar.intraop.labels import Labels, Pieces, find_labels
from autopar.intraop.meshes import Search
from autopar.intraop.price import argument_bytes, collectives, op_seconds, whole_ops
from autopar.intraop.remat import Variants
from autopar.intraop.shape import Shape, shape_of
from autopar.ir.graph import Aval, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Leaf, Plan, Predicted, Sent, ShardingPlan, Solve, Stage, Timings
from autopar.ir.restriction import Restriction
from autopar.ir.serialize import fingerprint, plain
from autopar.ir.sharding import TensorSharding
from autopar.runtime.program import Layered, Staged, in_layers
from autopar.schedule import Schedule, Simulation, build
from autopar.trace.roles import batch_leaves

IN_TIME = ("eager_1f1b", "zero_bubble", "1f1b")
"""Schedules among which `auto` chooses, what holds most first: where memory decides nothing, one solution serves them all."""


def plan_in_stages(c: Compilation, count: int) -> Compilation:
    """A plan in so many stages of equal size. Raises `UsageError` where the devices, or the layers, do not divide into them."""
    chunks = c.interleave if c.options.schedule == "interleaved" else 1
    submesh, meshes = _submeshes(c, count)
    begin = time.perf_counter()
    ops = ops_of(c.traced.graph, c.traced.roles.carried)
    layers = find_layers(ops, count * chunks)
    best: _Candidate | None = None
    refused: list[InfeasibleError] = []
    unanswered: list[SolverError] = []
    tried: list[tuple[str, float]] = []
    for microbatches in _counts(c, count):
        before = best.seconds if best else float("inf")
        c.progress(f"{count} stages, {microbatches} microbatches")
        layered = in_layers(c.traced, layers, microbatches, c.options.batch_argnums, c.options.accumulate_dtype)
        cuts: dict[bool, _Cut] = {}
        for mesh in meshes:
            for name in _schedules(c):
                in_two = name == "zero_bubble"
                if in_two not in cuts:
                    cuts[in_two] = _Cut.of(layered, [(n, n + 1) for n in range(count * chunks)], name)
                try:
                    found = _Candidate(c, cuts[in_two], submesh, mesh, build(name, count, microbatches, chunks))
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
    plan = best.plan(time.perf_counter() - begin)
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


STAGE_SHARE = 0.25
"""Share of the time limit for a logical mesh that one stage on it may take."""


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


@dataclass(frozen=True, eq=False)
class _Cut:
    """A step in stages: where its layers begin, which of them each stage holds, and the stages themselves."""

    begins: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    staged: Staged
    known: dict[Any, Chosen] = field(default_factory=dict)
    """Stages that are solved: equal ones are solved once."""
    layouts: dict[Any, tuple[tuple[ShardingPlan, ...], tuple[tuple[Piece, ...], ...]]] = field(default_factory=dict)
    """Solutions of all stages in line with each other, and the pieces that they run as."""
    labelled: list[Labels] = field(default_factory=list)

    def labels(self, restriction: Restriction | None, batch: Sequence[int] | None) -> Labels:
        """What the dimensions of the whole step's values count."""
        if not self.labelled:
            whole = self.staged.whole
            found = [rule_table.rule_for(op, whole.graph.aval) for op in whole.graph.ops]
            experts = restriction is not None and any(role == "expert" for _, role in restriction.roles)
            self.labelled.append(find_labels(whole.graph, found, whole.roles.carried, experts, batch))
        return self.labelled[0]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(fingerprint(stage.graph, {"carried": stage.carried}) for stage in self.staged.stages)

    @staticmethod
    def of(layered: Layered, ranges: Sequence[tuple[int, int]], schedule: str) -> _Cut:
        stage_of = [s for s, r in enumerate(ranges) for _ in range(*r)]
        return _Cut(layered.layers.begins, tuple(ranges), layered.staged(stage_of, schedule))


@dataclass(frozen=True, eq=False)
class _Solved:
    """A stage as solved: what was chosen, the graph that it is for, and for how many microbatches in flight."""

    chosen: Chosen
    graph: Graph
    stage: StageGraph
    flight: int


class _Candidate:
    """One way to run the step: a logical mesh for the stages, a number of microbatches, a schedule."""

    def __init__(self, c: Compilation, cut: _Cut, submesh: Any, mesh: LogicalMesh, schedule: Schedule):
        self.c, self.cut, self.staged, self.submesh, self.mesh = c, cut, cut.staged, submesh, mesh
        self.pricer = Pricer(submesh, mesh, c.options.reduce_dtype == "as_written")
        self.schedule = replace(schedule, skips=self._skips(schedule))
        self.known = cut.known
        self.solved = self._solve()
        key = tuple(id(s.chosen) for s in self.solved)
        if key not in cut.layouts:
            plans = settle([self._planned(s) for s in self.solved])
            cut.layouts[key] = plans, tuple(self._pieces(n, plan) for n, plan in enumerate(plans))
        self.plans, self.pieces = cut.layouts[key]

    def _skips(self, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        pairs = {(min(n, p.other), max(n, p.other)) for n, s in enumerate(self.staged.stages) for p in s.sends if p.when == "each"}
        return tuple(sorted((a, b) for a, b in pairs if b > a + 1))

    def in_flight(self, stage: int) -> int:
        """Microbatches between a stage's forward and the end of its backward, at most."""
        held = peak = 0
        ends = "W" if any(t.kind == "W" and t.stage == stage for t in self.schedule.tasks) else "B"
        for task in self.schedule.orders[self.schedule.device_of[stage]]:
            if task.stage == stage:
                held += (task.kind == "F") - (task.kind == ends)
                peak = max(peak, held)
        return max(1, min(peak, self.schedule.num_microbatches))

    # Shardings

    def _solve(self) -> list[_Solved]:
        """Each stage in order; what comes from stages before, and goes to them, lies as they have decided."""
        found: list[_Solved] = []
        for n, stage in enumerate(self.staged.stages):
            pins = {}
            for port in stage.receives:
                if port.other < n:
                    pins[stage.graph.inputs[port.position]] = (self._lies_sent(found[port.other], port.value, n),)
            for port in stage.sends:
                if port.other < n:
                    pins[-1 - port.position] = (self._lies_received(found[port.other], port.value, n),)
            found.append(self._stage(n, stage, pins))
        return found

    def _lies_sent(self, solved: _Solved, value: int, to: int) -> TensorSharding:
        port = next(p for p in solved.stage.sends if p.value == value and p.other == to)
        return solved.chosen.plan.outputs[port.position]

    def _lies_received(self, solved: _Solved, value: int, source: int) -> TensorSharding:
        port = next(p for p in solved.stage.receives if p.value == value and p.other == source)
        return solved.chosen.plan.inputs[port.position]

    def _stage(self, n: int, stage: StageGraph, pins: Mapping[int, tuple[TensorSharding, ...]]) -> _Solved:
        c = self.c
        chunks = self.schedule.num_stages // self.schedule.num_devices
        budget, flight = budget_of(c) / chunks, self.in_flight(n)
        named = stage_pins(c, stage.graph, self.mesh)
        held = tuple(sorted((v, str(s[0])) for v, s in {**named, **pins}.items()))
        key = (self.cut.fingerprints[n], self.mesh, held, budget)
        chosen, held_for = self._solved_before(key, flight)
        if chosen is None:
            c.progress(f"stage {n} on mesh {self.mesh}")
            variants = Variants(stage.graph, lambda graph: self._shape(graph, stage, flight), c.options.remat)
            limit = None if c.options.time_limit_s is None else STAGE_SHARE * c.options.time_limit_s
            limits = SolveOptions(c.options.solver, limit, c.options.gap)
            clock, as_written = time.perf_counter, self.pricer.as_written
            search = Search(variants, self.submesh, budget, lambda mesh: {**named, **pins}, limits, lambda text: None, clock, as_written)
            chosen, held_for = search.best(self.mesh, c.least), flight
            self.known[(*key, flight)] = chosen
        return _Solved(chosen, chosen.shape.graph, stage, held_for)

    def _solved_before(self, key: tuple[Any, ...], flight: int) -> tuple[Chosen | None, int]:
        """A solution for as many microbatches in flight, or for more where memory decided nothing, and for how many."""
        for (*other, n), chosen in self.known.items():
            if tuple(other) == key and (n == flight or (n > flight and not chosen.memory_rows)):
                return chosen, n
        return None, flight

    def _shape(self, graph: Graph, stage: StageGraph, flight: int) -> Shape:
        found = tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops)
        pinned = {v: f"received {n}" for n, v in enumerate(graph.inputs) if n >= len(stage.leaves) - graph.num_constants}
        restriction = restriction_of(self.c)
        known = None if restriction is None else self._labels(stage)
        return shape_of(
            graph,
            found,
            stage.carried,
            pinned,
            donated=self.c.options.donate,
            restriction=restriction,
            flight=flight,
            known=known,
            streamed=_streamed(graph, stage),
        )

    def _labels(self, stage: StageGraph) -> dict[int, tuple[Pieces, ...]]:
        """What the dimensions of a stage's inputs count, as the whole step says."""
        whole, graph = self.cut.labels(restriction_of(self.c), batch_of(self.c)), stage.graph
        inputs = self.staged.whole.graph.inputs
        constants = graph.num_constants
        own = [*graph.inputs[: len(stage.leaves) - constants], *graph.inputs[len(graph.inputs) - constants :]]
        found = {v: whole.dims[inputs[k]] for v, k in zip(own, stage.leaves, strict=True) if k < len(inputs)}
        for port in stage.receives:
            dims = whole.dims[port.value]
            v = graph.inputs[port.position]
            found[v] = ((("", graph.avals[v].shape[0]),), *dims) if port.when == "each" else dims
        return found

    def _planned(self, solved: _Solved) -> Planned:
        return Planned(solved.stage, solved.graph, solved.chosen.shape.rules, solved.chosen.plan, self.pricer.move)

    # What it takes

    def _pieces(self, n: int, plan: ShardingPlan) -> tuple[Piece, ...]:
        solved = self.solved[n]
        emission = Emission(solved.graph, self.staged.whole.program, solved.chosen.shape.rules, plan, self.pricer.as_written)
        return Cutter.of(emission, solved.stage, [(COTANGENT,), (WEIGHT,)]).pieces()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stage_data(n) for n in range(len(self.solved)))

    def _stage_data(self, n: int) -> Stage:
        solved, plan, pieces = self.solved[n], self.plans[n], self.pieces[n]
        graph, shape, times = solved.graph, solved.chosen.shape, self.schedule.num_microbatches
        seconds = {piece.parts[0]: 0.0 for piece in pieces}
        for piece in pieces:
            for i in (i for first, stop in piece.ops for i in range(first, stop)):
                seconds[piece.parts[0]] += op_seconds(graph, shape.rules, plan, self.pricer, shape.charges, i)
            for m in (plan.moves[k] for k in piece.moves):
                if m.value not in graph.free:
                    cost = self.pricer.move(m.move, m.source, graph.avals[m.value])
                    seconds[piece.parts[0]] += cost * (times if FORWARD <= piece.parts[0] <= WEIGHT else 1)
        every = sum(seconds.values())
        launch = self.submesh.launch_seconds * shape.charges.launches
        seconds = {part: s + launch * (s / every if every else 0.0) for part, s in seconds.items()}
        kept = {slot.form for piece in pieces for slot in piece.inputs if slot.kind == "each"}
        as_written = self.pricer.as_written
        residual = sum(f.sharding.local_bytes(graph.avals[f.value], self.mesh, as_written) for f in kept)
        streamed = _streamed(graph, solved.stage)
        coming = sum(
            s.local_bytes(graph.avals[v], self.mesh, as_written) for v, s in zip(graph.inputs, plan.inputs, strict=True) if v in streamed
        )
        arguments = argument_bytes(graph, plan) - coming
        size = self.mesh.num_devices
        device = self.schedule.device_of[n]
        return Stage(
            self.cut.ranges[n],
            (device * size, size),
            plan,
            solved.chosen.recomputed,
            seconds.get(BEFORE, 0.0),
            seconds.get(FORWARD, 0.0) / times,
            seconds.get(COTANGENT, 0.0) / times,
            seconds.get(WEIGHT, 0.0) / times,
            sum(s for part, s in seconds.items() if part >= AFTER),
            arguments,
            int(max(solved.chosen.peak_bytes - (solved.flight - self.in_flight(n)) * residual, arguments)),
            int(residual),
            self.in_flight(n),
            tuple(self._sent(n)),
        )

    def _sent(self, n: int) -> Iterator[Sent]:
        """What a stage gives others, by where it goes and when."""
        stage, plan = self.solved[n].stage, self.plans[n]
        graph = self.solved[n].graph
        by: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for port in stage.sends:
            o = graph.outputs[port.position]
            aval = graph.avals[o] if isinstance(o, int) else Aval((), "float32")
            times = self.schedule.num_microbatches if port.when == "each" else 1
            local = plan.outputs[port.position].local_bytes(aval, self.mesh) // times
            by.setdefault((port.other, port.when), []).append((aval.nbytes // times, local))
        size = self.mesh.num_devices
        for (other, when), values in sorted(by.items()):
            here, there = self.schedule.device_of[n] * size, self.schedule.device_of[other] * size
            flows = [(here + d, there + d) for d in range(size)]
            seconds = self.c.cluster.transfer_seconds(sum(local for _, local in values), flows) if here != there else 0.0
            yield Sent(other, when, len(values), sum(whole for whole, _ in values), seconds)

    @cached_property
    def simulation(self) -> Simulation:
        return simulate_plan(self.schedule, self.stages)

    @property
    def seconds(self) -> float:
        return step_seconds(self.simulation, self.stages)

    def check(self) -> None:
        """Raise `InfeasibleError` where a device's stages do not fit together."""
        budget = budget_of(self.c)
        for d in range(self.schedule.num_devices):
            peak = self._bytes(d, "peak_bytes")
            if peak > budget:
                raise InfeasibleError(
                    f"the stages on device group {d} need {peak:,} bytes per device under {self.schedule.name}, of {budget:,.0f}. "
                    "Use more stages, a schedule with fewer microbatches in flight, or more memory.",
                    peak_bytes=peak,
                    budget_bytes=int(budget),
                )

    # The plan

    def plan(self, seconds: float) -> Plan:
        c = self.c
        inputs, outputs = self._leaves()
        solves = [s.chosen.solve for s in self.solved]
        names = (STAGE_AXIS, *self.mesh.names) if self.mesh.num_devices > 1 else (STAGE_AXIS,)
        sizes = (self.schedule.num_devices, *(self.mesh.sizes if self.mesh.num_devices > 1 else ()))
        sharding = ShardingPlan(
            LogicalMesh(names, sizes), (), tuple(leaf.sharding for leaf in inputs), tuple(leaf.sharding for leaf in outputs)
        )
        recomputed = any(s.recomputed for s in self.stages)
        solve_s = sum(s.solve_s for s in self.known.values())
        enumerate_s = sum(s.enumerate_s for s in self.known.values())
        return Plan(
            fingerprint_of(c.traced),
            c.target or getattr(c.traced.function, "__name__", ""),
            plain(c.cluster.to_dict()),
            sharding,
            inputs,
            outputs,
            tuple(found for n in range(len(self.solved)) for found in self._collectives(n)),
            tuple(w for n in range(len(self.solved)) for w in self._whole(n)),
            self._predicted(),
            _together(solves, self.seconds),
            Timings(c.trace_s, enumerate_s, solve_s, max(0.0, seconds - enumerate_s - solve_s), c.trace_s + seconds),
            self._split(),
            max((s.chosen for s in self.solved), key=lambda chosen: chosen.peak_bytes).live,
            (),
            plain_options(c.options),
            tuple(c.traced.roles.notes),
            jax.__version__,
            stages=self.stages,
            layers=self.cut.begins,
            microbatches=self.schedule.num_microbatches,
            schedule=self.schedule.name,
            remat=c.options.remat if recomputed else "none",
        )

    def _leaves(self) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
        graph = self.staged.whole.graph
        state = {i for i, _ in self.c.traced.roles.carried}
        first = len(graph.inputs) - graph.num_constants
        own = len(self.c.traced.graph.inputs)
        inputs: dict[int, Leaf] = {}
        outputs: dict[int, Leaf] = {}
        for n, solved in enumerate(self.solved):
            plan = self.plans[n]
            count = len(solved.stage.leaves)
            constants = solved.graph.num_constants
            lies = [*plan.inputs[: count - constants], *plan.inputs[len(plan.inputs) - constants :]]
            for k, sharding in zip(solved.stage.leaves, lies, strict=True):
                if k < own or k >= first:
                    inputs.setdefault(k, _leaf(graph, k, state, sharding, n))
            for k, sharding in zip(solved.stage.results, plan.outputs, strict=False):
                aval = graph.aval(graph.outputs[k])
                outputs[k] = Leaf(graph.output_names[k], aval.shape, aval.dtype, "output", sharding, n)
        for k in range(own):
            aval = graph.avals[graph.inputs[k]]
            inputs.setdefault(k, _leaf(graph, k, state, TensorSharding.replicated(aval.ndim), 0))
        return tuple(inputs[k] for k in range(own)), tuple(outputs[k] for k in range(len(graph.outputs)))

    def _collectives(self, n: int) -> Iterator[Any]:
        s = self.solved[n]
        for found in collectives(s.graph, s.chosen.shape.rules, self.plans[n], self.pricer):
            yield replace(found, stage=n)

    def _whole(self, n: int) -> Sequence[Any]:
        s = self.solved[n]
        has = [rule_table.has_rule(op) for op in s.graph.ops]
        return whole_ops(s.graph, s.chosen.shape.rules, self.plans[n], self.pricer, s.chosen.shape.charges, has)

    def _busiest(self) -> int:
        return max(range(self.schedule.num_devices), key=self.simulation.busy_s)

    def _split(self) -> tuple[tuple[str, float], ...]:
        """Seconds by kind on the devices that work most."""
        found: dict[str, float] = {}
        for n, s in enumerate(self.solved):
            if self.schedule.device_of[n] == self._busiest():
                for kind, seconds in s.chosen.price.by_kind:
                    found[kind] = found.get(kind, 0.0) + seconds
        return tuple(sorted(found.items(), key=lambda item: -item[1]))

    def _bytes(self, device: int, name: str) -> int:
        """Bytes of all stages on one group of devices."""
        return sum(getattr(s, name) for n, s in enumerate(self.stages) if self.schedule.device_of[n] == device)

    def _predicted(self) -> Predicted:
        """Of the devices that work most; what they wait for is the bubble."""
        mine = [n for n in range(len(self.solved)) if self.schedule.device_of[n] == self._busiest()]
        communication = sum(self.solved[n].chosen.price.communication_s for n in mine)
        busy = sum(_busy(self.stages[n], self.schedule.num_microbatches) for n in mine)
        peak, arguments = max((self._bytes(d, "peak_bytes"), self._bytes(d, "argument_bytes")) for d in range(self.schedule.num_devices))
        work = costs.graph_flops(self.c.traced.graph)
        rate = peak_rate(self.c)
        return Predicted(
            self.seconds,
            max(0.0, busy - communication),
            communication,
            communication,
            max(0.0, self.seconds - busy),
            peak,
            arguments,
            peak - arguments,
            work,
            min(1.0, work / (self.seconds * rate)) if rate and self.seconds else 0.0,
        )


def _streamed(graph: Graph, stage: StageGraph) -> frozenset[int]:
    """What comes and goes microbatch by microbatch, as it stands stacked in a stage's graph."""
    coming = {graph.inputs[p.position] for p in stage.receives if p.when == "each"}
    going = {graph.outputs[p.position] for p in stage.sends if p.when == "each"}
    return frozenset(v for v in coming | going if isinstance(v, int))


def _leaf(graph: Graph, k: int, state: set[int], sharding: TensorSharding, stage: int) -> Leaf:
    aval = graph.avals[graph.inputs[k]]
    first = len(graph.inputs) - graph.num_constants
    role = "state" if k in state else "batch" if k < first else "constant"
    return Leaf(graph.input_names[k], aval.shape, aval.dtype, role, sharding, stage)


def _busy(stage: Stage, microbatches: int) -> float:
    """Seconds in which a stage works."""
    return stage.before_s + microbatches * (stage.forward_s + stage.input_s + stage.weight_s) + stage.after_s


def _together(solves: Sequence[Solve], seconds: float) -> Solve:
    """The solves of all stages as one: the bound holds for the stages as they are cut."""
    order = ("optimal", "feasible")
    worst = max(solves, key=lambda s: order.index(s.status) if s.status in order else len(order))
    gap = max(s.gap for s in solves)
    return Solve(
        worst.solver,
        worst.status,
        seconds,
        seconds * (1 - gap),
        gap,
        sum(s.variables for s in solves),
        sum(s.constraints for s in solves),
        "stages",
    )
