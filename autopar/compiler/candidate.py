"""One way to run a step in pipeline stages: a sharding for each stage, in line with the others, and what that takes and holds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar import rules as rule_table
from autopar.compiler.compilation import Compilation, batch_of, budget_of, restriction_of
from autopar.compiler.pins import stage_pins
from autopar.costs import pricer_of
from autopar.emit.manual import Emission
from autopar.emit.stage import Cutter, Piece
from autopar.errors import InfeasibleError
from autopar.interop.settle import Planned, settle
from autopar.interop.split import AFTER, BEFORE, COTANGENT, FORWARD, WEIGHT, StageGraph
from autopar.interop.timing import simulate_plan, skipping, step_seconds
from autopar.intraop.choose import Chosen, SolveOptions
from autopar.intraop.enumerate import Pins
from autopar.intraop.labels import Labels, Pieces, find_labels
from autopar.intraop.meshes import Search
from autopar.intraop.price import argument_bytes, op_seconds
from autopar.intraop.remat import Variants
from autopar.intraop.shape import Shape, shape_of
from autopar.ir.graph import Aval, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Sent, ShardingPlan, Stage
from autopar.ir.restriction import Restriction
from autopar.ir.same import Memo
from autopar.ir.serialize import fingerprint
from autopar.ir.sharding import TensorSharding
from autopar.runtime.program import Layered, Staged
from autopar.schedule import Schedule, Simulation

STAGE_SHARE = 0.25
"""Share of the time limit for a logical mesh that one stage on it may take."""


MANY = 2**24
"""Bytes by which a link's rate is told from its latency."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A step in stages: where its layers begin, which of them each stage holds, and the stages themselves."""

    begins: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    staged: Staged
    known: dict[Any, Chosen] = field(default_factory=dict)
    """Stages that are solved: equal ones are solved once."""
    layouts: dict[Any, tuple[tuple[ShardingPlan, ...], tuple[tuple[Piece, ...], ...]]] = field(default_factory=dict)
    """Solutions of all stages in line with each other, and the pieces that they run as."""
    labelled: list[Labels] = field(default_factory=list)
    variants: dict[LogicalMesh, Memo] = field(default_factory=dict)

    def variants_on(self, mesh: LogicalMesh) -> Memo:
        """What is known of the stages' programs, on the mesh that was asked for last."""
        if mesh not in self.variants:
            self.variants.clear()
        return self.variants.setdefault(mesh, Memo())

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
    def of(layered: Layered, ranges: Sequence[tuple[int, int]], schedule: str) -> Cut:
        stage_of = [s for s, r in enumerate(ranges) for _ in range(*r)]
        return Cut(layered.layers.begins, tuple(ranges), layered.staged(stage_of, schedule))


@dataclass(frozen=True, eq=False)
class Solved:
    """A stage as solved: what was chosen, the graph that it is for, and for how many microbatches in flight."""

    chosen: Chosen
    graph: Graph
    stage: StageGraph
    flight: int


class Candidate:
    """One way to run the step: a logical mesh for the stages, a number of microbatches, a schedule, and what each stage makes again.

    `prices` are by stage those of memory (`SolveOptions.memory_price`) that are tried in turn until an answer fits; None states it. With
    `flight` each stage has so many microbatches in flight, whatever the schedule says.
    """

    def __init__(
        self,
        c: Compilation,
        cut: Cut,
        submesh: Any,
        mesh: LogicalMesh,
        schedule: Schedule,
        remat: Sequence[str] = (),
        prices: Sequence[Sequence[float | None]] = (),
        flight: int = 0,
    ):
        self.flight = flight
        self.c, self.cut, self.staged, self.submesh, self.mesh = c, cut, cut.staged, submesh, mesh
        self.remat = tuple(remat) or (c.options.remat,) * len(cut.ranges)
        self.prices = tuple(map(tuple, prices)) or ((None,),) * len(cut.ranges)
        self.pricer = pricer_of(submesh, mesh, c.options.reduce_dtype == "as_written")
        self.schedule = skipping(schedule, [(n, p.other) for n, s in enumerate(self.staged.stages) for p in s.sends if p.when == "each"])
        self.known = cut.known
        self.latency, self.rate = self._link()
        self.solved = self._solve()
        key = tuple(id(s.chosen) for s in self.solved)
        self.alike = self._alike()
        if key not in cut.layouts:
            plans = settle([self._planned(s) for s in self.solved], self.alike)
            pieces = {n: self._pieces(n, plans[n]) for n in sorted(set(self.alike))}
            cut.layouts[key] = plans, tuple(pieces[n] for n in self.alike)
        self.plans, self.pieces = cut.layouts[key]

    def _alike(self) -> tuple[int, ...]:
        """By stage, the first that is as it is: the same ops, solved so, and so are those with which it shares values in microbatches."""
        first: dict[Any, int] = {}
        kinds = [(self.cut.fingerprints[n], id(s.chosen)) for n, s in enumerate(self.solved)]
        return tuple(
            first.setdefault(
                (kinds[n], *((p.position, kinds[p.other]) for p in (*s.stage.receives, *s.stage.sends) if p.when == "each")), n
            )
            for n, s in enumerate(self.solved)
        )

    def in_flight(self, stage: int) -> int:
        """Microbatches between a stage's forward and the end of its backward, at most."""
        return max(1, min(self.flight or self._flights.get(stage, 0), self.schedule.num_microbatches))

    @cached_property
    def _flights(self) -> dict[int, int]:
        """The same by stage, as the schedule has it."""
        ends = "W" if any(task.kind == "W" for task in self.schedule.tasks) else "B"
        held: dict[int, int] = {}
        peak: dict[int, int] = {}
        for order in self.schedule.orders:
            for task in order:
                held[task.stage] = held.get(task.stage, 0) + (task.kind == "F") - (task.kind == ends)
                peak[task.stage] = max(peak.get(task.stage, 0), held[task.stage])
        return peak

    def _flows(self, here: int, there: int) -> list[tuple[int, int]]:
        """What goes from one group of devices to another: each device to its own. Layers that are planned alone are more than groups."""
        size = self.mesh.num_devices
        groups = max(1, self.c.cluster.num_devices // size)
        return [(here % groups * size + d, there % groups * size + d) for d in range(size)]

    def _link(self) -> tuple[float, float]:
        """Between neighbours in the pipeline, the farthest of them: the latency, and seconds per byte of each device."""
        size, whole = self.mesh.num_devices, self.c.cluster.num_devices
        pairs = [self._flows(d, d + 1) for d in range(max(1, whole // size - 1))] if whole > size else []
        once, twice = (max((self.c.cluster.transfer_seconds(n * MANY, p) for p in pairs), default=0.0) for n in (1, 2))
        return max(0.0, 2 * once - twice), (twice - once) / MANY

    @cached_property
    def parts(self) -> float:
        """In how many parts what crosses between stages in each microbatch lies."""
        whole = local = 0
        for n, solved in enumerate(self.solved):
            for port in (p for p in solved.stage.sends if p.when == "each"):
                aval = solved.graph.aval(solved.graph.outputs[port.position])
                whole, local = whole + aval.nbytes, local + self.plans[n].outputs[port.position].local_bytes(aval, self.mesh)
        return whole / local if local else 1.0

    # Shardings

    def _solve(self) -> list[Solved]:
        """Each stage in order; what comes from stages before, and goes to them, lies as they have decided."""
        found: list[Solved] = []
        for n, stage in enumerate(self.staged.stages):
            pins: dict[int, tuple[TensorSharding, ...]] = {}
            for port in stage.receives:
                if port.other < n:
                    pins[stage.graph.inputs[port.position]] = (self._lies_sent(found[port.other], port.value, n),)
            for port in stage.sends:
                if port.other < n:
                    pins[-1 - port.position] = (self._lies_received(found[port.other], port.value, n),)
            pins |= self._as_before(stage, found)
            found.append(self._stage(n, stage, pins))
        return found

    def _as_before(self, stage: StageGraph, before: Sequence[Solved]) -> dict[int, tuple[TensorSharding, ...]]:
        """Parts of a leaf lie as an equal part on a stage before does, so that all of them are one array."""
        where = {k: (s, n) for s in before for n, k in enumerate(s.stage.leaves)}
        pins: dict[int, tuple[TensorSharding, ...]] = {}
        for parts in self.staged.whole.pieces.inputs.values():
            for n, k in enumerate(stage.leaves):
                known = [where[q] for q in parts.positions if q in where] if k in parts.positions else []
                for solved, m in known[:1]:
                    if solved.graph.avals[solved.graph.inputs[m]] == stage.graph.avals[stage.graph.inputs[n]]:
                        pins[stage.graph.inputs[n]] = (solved.chosen.plan.inputs[m],)
        return pins

    def _lies_sent(self, solved: Solved, value: int, to: int) -> TensorSharding:
        port = next(p for p in solved.stage.sends if p.value == value and p.other == to)
        return solved.chosen.plan.outputs[port.position]

    def _lies_received(self, solved: Solved, value: int, source: int) -> TensorSharding:
        port = next(p for p in solved.stage.receives if p.value == value and p.other == source)
        return solved.chosen.plan.inputs[port.position]

    def _stage(self, n: int, stage: StageGraph, pins: Mapping[int, tuple[TensorSharding, ...]]) -> Solved:
        c = self.c
        chunks = self.schedule.num_stages // self.schedule.num_devices
        budget, flight = budget_of(c) / chunks, self.in_flight(n)
        named = stage_pins(c, stage.graph, self.mesh)
        held = tuple(sorted((v, str(s[0])) for v, s in {**named, **pins}.items()))
        key = (self.cut.fingerprints[n], self.mesh, held, budget, self.remat[n], self.prices[n])
        chosen, held_for = self._solved_before(key, flight)
        if chosen is None:
            c.progress(f"stage {n} on mesh {self.mesh}")
            told = {v: str(s[0]) for v, s in {**named, **pins}.items() if v >= 0}
            which = self.cut.fingerprints[n], held, flight, self.rate
            variants = self.cut.variants_on(self.mesh).get(
                which, lambda: Variants(stage.graph, lambda graph: self._shape(graph, stage, flight, told))
            )
            chosen, held_for = self._cheapest(n, variants.in_mode(self.remat[n]), budget, {**named, **pins}), flight
            self.known[(*key, flight)] = chosen
        return Solved(chosen, chosen.shape.graph, stage, held_for)

    def _cheapest(self, n: int, variants: Variants, budget: float, pins: Pins) -> Chosen:
        """The best plan of a stage, at the first price of memory at which one fits."""
        options = self.c.options
        limit = None if options.time_limit_s is None else STAGE_SHARE * options.time_limit_s
        clock, as_written = time.perf_counter, self.pricer.as_written
        for price in self.prices[n]:
            limits = SolveOptions(options.solver, limit, options.gap, price, self.c.bases)
            search = Search(variants, self.submesh, budget, lambda mesh: pins, limits, lambda text: None, clock, as_written)
            try:
                return search.best(self.mesh, self.c.least)
            except InfeasibleError:
                if price == self.prices[n][-1]:
                    raise
        raise AssertionError("a stage has at least one price of memory")

    def _solved_before(self, key: tuple[Any, ...], flight: int) -> tuple[Chosen | None, int]:
        """A solution for as many microbatches in flight, or for more where memory decided nothing, and for how many."""
        for (*other, n), chosen in self.known.items():
            if tuple(other) == key and (n == flight or (n > flight and not chosen.memory_rows)):
                return chosen, n
        return None, flight

    def _shape(self, graph: Graph, stage: StageGraph, flight: int, told: Mapping[int, str]) -> Shape:
        """The fold of a stage's graph; `told` says how inputs must lie."""
        found = tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops)
        first = len(stage.leaves) - graph.num_constants
        pinned = {**told, **{v: f"received {n}" for n, v in enumerate(graph.inputs) if n >= first}}
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
            streamed=dict.fromkeys(_streamed(graph, stage), self.rate),
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

    def _planned(self, solved: Solved) -> Planned:
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
        graph, times = solved.graph, self.schedule.num_microbatches
        seconds = self._by_piece[self.alike[n]]
        kept = {slot.form for piece in pieces for slot in piece.inputs if slot.kind == "each"}
        as_written = self.pricer.as_written
        residual = sum(f.sharding.local_bytes(graph.avals[f.value], self.mesh, as_written) for f in kept)
        arguments = self._given(n)
        running, updating = solved.chosen.peaks
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
            int(max(running - (solved.flight - self.in_flight(n)) * residual, updating, arguments)),
            int(residual),
            self.in_flight(n),
            tuple(self._sent(n)),
        )

    def standing(self, n: int) -> int:
        """Bytes on a device of a stage that are there for the whole of a step: what it is given, what it has made of that before the
        microbatches, and what it adds up over them."""
        solved, plan, pieces = self.solved[n], self.plans[n], self.pieces[n]
        made = {slot.form for slot in pieces[0].outputs if slot.kind == "once"}
        summed = {slot.form for piece in pieces for slot in piece.outputs if slot.kind == "carry"}
        return self._given(n) + sum(
            f.sharding.local_bytes(solved.graph.avals[f.value], plan.mesh, self.pricer.as_written) for f in made | summed
        )

    def _given(self, n: int) -> int:
        """Bytes of a stage's leaves on a device."""
        graph, plan = self.solved[n].graph, self.plans[n]
        streamed = _streamed(graph, self.solved[n].stage)
        coming = (
            s.local_bytes(graph.avals[v], self.mesh, self.pricer.as_written)
            for v, s in zip(graph.inputs, plan.inputs, strict=True)
            if v in streamed
        )
        return argument_bytes(graph, plan) - sum(coming)

    @cached_property
    def _by_piece(self) -> dict[int, dict[int, float]]:
        """What the pieces of each stage that is not as one before take."""
        return {n: self._seconds_by_piece(n) for n in sorted(set(self.alike))}

    def _seconds_by_piece(self, n: int) -> dict[int, float]:
        """Seconds per step of a stage's pieces, by the first part of each; launches are shared out alike."""
        solved, plan = self.solved[n], self.plans[n]
        graph, shape, times = solved.graph, solved.chosen.shape, self.schedule.num_microbatches
        seconds = {piece.parts[0]: 0.0 for piece in self.pieces[n]}
        for piece in self.pieces[n]:
            for i in (i for first, stop in piece.ops for i in range(first, stop)):
                seconds[piece.parts[0]] += op_seconds(graph, shape.rules, plan, self.pricer, shape.charges, i)
            for m in (plan.moves[k] for k in piece.moves):
                if m.value not in graph.free:
                    cost = self.pricer.move(m.move, m.source, graph.avals[m.value])
                    seconds[piece.parts[0]] += cost * (times if FORWARD <= piece.parts[0] <= WEIGHT else 1)
        every = sum(seconds.values())
        launch = self.submesh.launch_seconds * shape.charges.launches
        return {part: s + launch * (s / every if every else 0.0) for part, s in seconds.items()}

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
        for (other, when), values in sorted(by.items()):
            here, there = self.schedule.device_of[n], self.schedule.device_of[other]
            seconds = self.c.cluster.transfer_seconds(sum(local for _, local in values), self._flows(here, there)) if here != there else 0.0
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
            peak = self.bytes(d, "peak_bytes")
            if peak > budget:
                raise InfeasibleError(
                    f"the stages on device group {d} need {peak:,} bytes per device under {self.schedule.name}, of {budget:,.0f}. "
                    "Use more stages, a schedule with fewer microbatches in flight, or more memory.",
                    peak_bytes=peak,
                    budget_bytes=int(budget),
                )

    def bytes(self, device: int, name: str) -> int:
        """Bytes of all stages on one group of devices."""
        return sum(getattr(s, name) for n, s in enumerate(self.stages) if self.schedule.device_of[n] == device)


def _streamed(graph: Graph, stage: StageGraph) -> frozenset[int]:
    """What comes and goes microbatch by microbatch, as it stands stacked in a stage's graph."""
    coming = {graph.inputs[p.position] for p in stage.receives if p.when == "each"}
    going = {graph.outputs[p.position] for p in stage.sends if p.when == "each"}
    return frozenset(v for v in coming | going if isinstance(v, int))
