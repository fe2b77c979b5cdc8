"""Run a plan in stages: one program per stage and piece, each on its stage's devices, started in the order of the schedule.

One thread starts every program; JAX runs them when their inputs are there. What one stage gives another is put on the other's devices as
soon as the program that makes it has been started. Arrays are let go with the last program that reads them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.emit.hlo import CompiledCollective
from autopar.emit.manual import Emission, named_sharding
from autopar.emit.stage import Form, Kind, Slot, form_of, form_spec
from autopar.interop.home import home_of, spread_over
from autopar.interop.split import AFTER, BEFORE, Port
from autopar.interop.timing import schedule_of, simulate_plan
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Part, Plan
from autopar.ir.sharding import TensorSharding
from autopar.runtime.executor import Owned, check_leaves, copy_of, own_settings, put
from autopar.runtime.program import planned_stages
from autopar.runtime.spread import Spread
from autopar.runtime.stage import PARTS, Program, RunningStage, StageRun, backward_of
from autopar.schedule import Schedule, Task
from autopar.trace.parts import Parts, Pieces
from autopar.trace.trace import Traced

IN_FLIGHT = 128
"""Programs that are started ahead of those that have ended."""

IN_FLIGHT_CPU = 24
"""The same on CPUs before JAX 0.11 for stages of several devices: some 34 waiting programs with collectives block each other for ever."""


@dataclass(frozen=True, slots=True)
class _Sending:
    """What goes from a stage to others at once: where the arrays stand there, the values of others that take them, and where.

    `step` is 1 for values of each microbatch, which stand one after the other. `drop` are those that the stage itself needs no longer.
    State for another stage on the same devices is `copied`: each of the two gives up its own.
    """

    source: int
    sent: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, int, int], ...]
    shardings: tuple[NamedSharding, ...]
    drop: tuple[int, ...]
    copied: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    """A program to be started, and what is sent then."""

    stage: RunningStage
    program: Program
    microbatch: int
    sending: _Sending | None


@dataclass
class _Flight:
    """Programs that are started and may not have ended."""

    most: int
    tokens: deque[Any] = field(default_factory=deque)

    def add(self, token: Any) -> None:
        self.tokens.append(token)
        if len(self.tokens) > self.most:
            self.tokens.popleft().block_until_ready()


@dataclass(frozen=True, eq=False)
class LoweredStages:
    """The programs of all stages, lowered."""

    programs: tuple[Any, ...]

    def as_text(self) -> str:
        """All of them, one after the other."""
        return "\n".join(p.as_text() for p in self.programs)


@dataclass(frozen=True, eq=False)
class CompiledStages:
    """The programs of all stages, compiled."""

    programs: tuple[Any, ...]

    def as_text(self) -> str:
        """All of them, one after the other."""
        return "\n".join(p.as_text() for p in self.programs)

    def cost_analysis(self) -> dict[str, float]:
        """What JAX says of each program, added up; each counts once, however often a step runs it."""
        found: dict[str, float] = {}
        for program in self.programs:
            for key, value in (program.cost_analysis() or {}).items():
                found[key] = found.get(key, 0.0) + float(value)
        return found


class PipelineExecutable:
    """A plan in stages, compiled for devices that are here. Calling it with flat leaves runs one step and returns flat outputs."""

    def __init__(
        self,
        runs: Sequence[StageRun],
        schedule: Schedule,
        order: Sequence[Task],
        donate: bool,
        mesh: Mesh,
        traced: Traced,
        pieces: Pieces = Pieces(),  # noqa: B008
    ):
        self.schedule, self.order, self.mesh, self.traced = schedule, tuple(order), mesh, traced
        self.names, self.num_outputs = traced.graph.input_names, len(traced.graph.outputs)
        self.stages = [RunningStage(n, run, backward_of(schedule, n), donate, schedule.num_microbatches) for n, run in enumerate(runs)]
        self.rounds = max(run.stage.rounds for run in runs)
        graph = traced.graph
        self.spread_inputs = {k: self._spread(graph.avals[graph.inputs[k]].shape, p, self._taken_by) for k, p in pieces.inputs.items()}
        self.spread_outputs = {k: self._spread(graph.aval(graph.outputs[k]).shape, p, self._made_by) for k, p in pieces.outputs.items()}
        state = {stage.run.stage.leaves[i] for stage in self.stages for i in stage.carried}
        self.spread_state = {k for k, spread in self.spread_inputs.items() if not state.isdisjoint(spread.positions)}
        self.sendings = self._sendings()
        self.sequence = tuple(self._sequence())
        for stage in self.stages:
            stage.clear()
        cpu = runs[0].mesh.devices.flat[0].platform == "cpu" and tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
        self.most = IN_FLIGHT_CPU if cpu and any(run.mesh.size > 1 for run in runs) else IN_FLIGHT

    @cached_property
    def lowered(self) -> LoweredStages:
        """Every program, lowered once."""
        for stage in self.stages:
            stage.lower()
        return LoweredStages(tuple(p.lowered for stage in self.stages for p in stage.programs.values()))

    def lower(self) -> LoweredStages:
        """The programs lowered for the mesh."""
        return self.lowered

    @cached_property
    def compiled(self) -> CompiledStages:
        """Every program, compiled once."""
        self.lowered  # noqa: B018
        for stage in self.stages:
            stage.compile()
        return CompiledStages(tuple(p.compiled for stage in self.stages for p in stage.programs.values()))

    def collectives(self, stage: int) -> tuple[CompiledCollective, ...]:
        """What one stage's compiled programs contain, as often as a step runs them."""
        self.compiled  # noqa: B018
        return self.stages[stage].collectives()

    def memory(self) -> dict[str, int]:
        """Bytes on the fullest device: of leaves, of all else, and together, from what XLA says of each program and what stands by."""
        self.compiled  # noqa: B018
        found: dict[int, tuple[int, int]] = {}
        for n, stage in enumerate(self.stages):
            arguments, peak = stage.peak_bytes(self.order)
            a, b = found.get(self.schedule.device_of[n], (0, 0))
            found[self.schedule.device_of[n]] = a + arguments, b + peak
        arguments, peak = max(found.values(), key=lambda pair: pair[1])
        return {"argument": arguments, "output": 0, "alias": 0, "temp": peak - arguments, "total": peak}

    def _taken_by(self, position: int) -> tuple[int, TensorSharding] | None:
        """The stage that has a leaf, and how it lies there."""
        for n, stage in enumerate(self.stages):
            if position in (own := stage.run.stage.leaves):
                return n, stage.plan.inputs[own.index(position)]
        return None

    def _made_by(self, position: int) -> tuple[int, TensorSharding] | None:
        """The stage that gives an output, and how it lies there."""
        for n, stage in enumerate(self.stages):
            if position in (own := stage.run.stage.results):
                return n, stage.plan.outputs[own.index(position)]
        return None

    def _spread(self, shape: tuple[int, ...], parts: Parts, find: Callable[[int], tuple[int, TensorSharding] | None]) -> Spread:
        """A leaf that stages have in parts; a part that none has goes to the first."""
        nowhere = 0, TensorSharding.replicated(len(shape))
        there = [find(position) or nowhere for position in parts.positions]
        placed = [Part(n, parts.dimension, *span, s) for (n, s), span in zip(there, parts.spans, strict=True)]
        shardings = tuple(named_sharding(p.sharding, self.stages[p.stage].mesh) for p in placed)
        meshes = [self.stages[p.stage].mesh for p in placed]
        home = home_of(placed, self.schedule.device_of) if len({m.devices.shape for m in meshes}) == 1 else None
        if home is None:
            logical = LogicalMesh(tuple(self.mesh.axis_names), self.mesh.devices.shape)
            where = named_sharding(spread_over(shape, logical), self.mesh)
        else:
            where = named_sharding(home.sharding, self._mesh_of(meshes))
        return Spread(shape, parts.dimension, where, parts.positions, parts.borders[:-1], shardings, home is not None)

    def _mesh_of(self, meshes: Sequence[Mesh]) -> Mesh:
        """The meshes of some stages as one; that of the plan where it is all of them."""
        devices = np.stack([m.devices for m in meshes])
        same = self.mesh.axis_names[:1] == (STAGE_AXIS,) and list(self.mesh.devices.flat) == list(devices.flat)
        return self.mesh if same else Mesh(devices, (STAGE_AXIS, *meshes[0].axis_names))

    def _sendings(self) -> Mapping[tuple[int, tuple[int, ...]], _Sending]:
        """(stage, parts of a piece) -> what goes to other stages once that piece has run."""
        found = {}
        for n, stage in enumerate(self.stages):
            for parts in stage.programs:
                ports = [port for part in parts for port in stage.run.stage.sends if port.piece == part]
                if ports:
                    found[n, parts] = self._sending(n, stage, ports)
        return found

    def _sending(self, n: int, stage: RunningStage, ports: Sequence[Port]) -> _Sending:
        sent, taken, shardings, drop, copied = [], [], [], [], []
        for port in ports:
            other = self.stages[port.other]
            kind: Kind = "each" if port.when == "each" else "once"
            there = next(p for p in other.run.stage.receives if p.value == port.value and p.other == n)
            mine, theirs, step = _sent(stage, port), _taken(other, there), int(kind == "each")
            sent.append((stage.at(Slot(kind, mine)), step))
            taken.append((port.other, other.at(Slot(kind, theirs)), step))
            shardings.append(NamedSharding(other.mesh, form_spec(theirs.sharding)))
            if step and not stage.reads(mine):
                drop.append(sent[-1][0])
            if port.when == "before" and self.schedule.device_of[n] == self.schedule.device_of[port.other]:
                copied.append(len(sent) - 1)
        return _Sending(n, tuple(sent), tuple(taken), tuple(shardings), tuple(dict.fromkeys(drop)), tuple(copied))

    def _sequence(self) -> Iterator[_Start]:
        """All programs of a step in the order in which they are started, each with what is sent when it has been."""
        for stage in self.stages:
            yield _Start(stage, stage.programs[(BEFORE,)], 0, None)
        for task in self.order:
            parts = PARTS[task.kind]
            stage = self.stages[task.stage]
            yield _Start(stage, stage.programs[parts], task.microbatch, self.sendings.get((task.stage, parts)))
        for r in range(self.rounds):
            for n, stage in enumerate(self.stages):
                if r < stage.run.stage.rounds:
                    yield _Start(stage, stage.programs[(AFTER + r,)], 0, self.sendings.get((n, (AFTER + r,))))

    def __call__(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        check_leaves(leaves, self.names)
        self.compiled  # noqa: B018
        try:
            return self._step(leaves, owned)
        finally:
            for stage in self.stages:
                stage.clear()

    def _step(self, leaves: Sequence[Any], owned: Owned) -> list[Any]:
        flight = _Flight(self.most)
        with jax.disable_jit(False), jax.transfer_guard("allow"):
            self._place(self._in_parts(leaves, owned), owned)
            for n in range(len(self.stages)):
                if (n, (BEFORE,)) in self.sendings:
                    self._send(self.sendings[n, (BEFORE,)], 0)
            for start in self.sequence:
                flight.add(start.stage.start(start.program, start.microbatch))
                if start.sending is not None:
                    self._send(start.sending, start.microbatch)
            outputs: list[Any] = [None] * (self.num_outputs + sum(len(spread.positions) - 1 for spread in self.spread_outputs.values()))
            for stage in self.stages:
                for k, x in stage.outputs():
                    outputs[k] = x
            self._join(outputs)
            del outputs[self.num_outputs :]
        for array in outputs:
            owned.add(array)
        return outputs

    def _join(self, outputs: list[Any]) -> None:
        """Put leaves together of their parts. Two leaves of the same parts are one array, so that a step which takes both copies one; where
        only some parts are the same, they are copied here. No two arrays have the same memory.
        """
        given = {k: [outputs[position] for position in spread.positions] for k, spread in self.spread_outputs.items()}
        joined: dict[tuple[Any, ...], Any] = {}
        used: set[int] = set()
        for k, parts in given.items():
            spread = self.spread_outputs[k]
            key = spread.home, *map(id, parts)
            if key not in joined:
                joined[key] = spread.join([_unused(x, used) for x in parts])
            used.update(map(id, parts))
            outputs[k] = joined[key]

    def _send(self, sending: _Sending, m: int) -> None:
        """Put what a stage has made for others on their devices."""
        values = self.stages[sending.source].values
        arrays = [values[k + m * step] for k, step in sending.sent]
        for n in sending.copied:
            with own_settings(self.stages[sending.source].mesh):
                arrays[n] = copy_of(arrays[n])
        if len(arrays) == 1:  # a tenth faster than a list of one
            moved = [jax.device_put(arrays[0], sending.shardings[0])]
        else:
            moved = jax.device_put(arrays, list(sending.shardings))
        for (n, k, step), x in zip(sending.taken, moved, strict=True):
            self.stages[n].values[k + m * step] = x
        for k in sending.drop:
            values[k + m] = None

    def _in_parts(self, leaves: Sequence[Any], owned: Owned) -> Sequence[Any]:
        """Leaves as stages have them. State that is not ours, or given twice, is copied: its parts are given up.

        So is a leaf whose parts stages have in memory of their own.
        """
        if not self.spread_inputs:
            return leaves
        given = [*leaves, *[None] * sum(len(spread.positions) - 1 for spread in self.spread_inputs.values())]
        kept = Counter(id(x) for x in leaves)
        for k, spread in self.spread_inputs.items():
            state, leaf = k in self.spread_state, leaves[k]
            ours = leaf in owned and kept[id(leaf)] == 1
            kept[id(leaf)] -= state
            dtype = self.traced.graph.avals[self.traced.graph.inputs[k]].dtype
            with own_settings(spread.mesh):
                at_home = put(leaf, dtype, spread.home, copy=state and spread.direct and not ours)
            for position, part in zip(spread.positions, spread.split(at_home, fresh=state), strict=True):
                given[position] = part
                owned.add(part)
            if state and ours and not spread.direct:
                leaf.delete()
        return given

    def _place(self, leaves: Sequence[Any], owned: Owned) -> None:
        """Leaves on the devices of the stages that read them. State that is not ours, or given twice, is copied before it is given up,
        and so is what the step gives back as it came.
        """
        kept = Counter(id(x) for x in leaves)
        for stage in self.stages:
            own, graph = stage.run.stage.leaves, stage.graph
            count = len(own) - len(stage.constants)
            with own_settings(stage.mesh):
                for position, k in enumerate(own[:count]):
                    leaf, sharding = leaves[k], stage.shardings[position]
                    if position in stage.carried:
                        copy = not (leaf in owned and kept[id(leaf)] == 1)
                        kept[id(leaf)] -= 1
                    else:
                        copy = position in stage.passed_on
                    dtype = graph.avals[graph.inputs[position]].dtype
                    stage.values[stage.inputs[position]] = put(leaf, dtype, sharding, copy)
            for place, constant in zip(stage.inputs[len(stage.inputs) - len(stage.constants) :], stage.constants, strict=True):
                stage.values[place] = constant


def _unused(array: jax.Array, used: Collection[int]) -> jax.Array:
    """The array, or a copy of it where that is in use."""
    if id(array) not in used:
        return array
    assert isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh)
    with own_settings(array.sharding.mesh):
        return copy_of(array)


def _sent(stage: RunningStage, port: Port) -> Form:
    """The form in which a stage gives a value to another."""
    graph, plan = stage.graph, stage.plan
    o = graph.outputs[port.position]
    assert isinstance(o, int)
    if port.when != "each":
        return form_of(o, plan.outputs[port.position], plan.generation(len(graph.ops), port.position))
    i = graph.producer[o]
    value = graph.ops[i].operands[0]
    assert isinstance(value, int)
    return form_of(value, _without_first(plan.outputs[port.position]), plan.generation(i, 0))


def _taken(stage: RunningStage, port: Port) -> Form:
    """The form in which a stage takes a value from another."""
    graph, plan = stage.graph, stage.plan
    v = graph.inputs[port.position]
    if port.when != "each":
        return form_of(v, plan.inputs[port.position])
    (i, _), *_ = graph.uses[v]
    return form_of(graph.ops[i].results[0], _without_first(plan.inputs[port.position]))


def _without_first(sharding: TensorSharding) -> TensorSharding:
    return TensorSharding(sharding.dims[1:])


def pipeline_for(plan: Plan, traced: Traced, mesh: Mesh, donate: bool = True) -> PipelineExecutable:
    """A plan in stages and the program that it belongs to, ready to be compiled for `mesh`, whose first axis is that of the stages."""
    program, planned = planned_stages(traced, plan)
    schedule = schedule_of(plan)
    as_written = plan.options.get("reduce_dtype") == "as_written"
    runs = []
    for n, (stage, data, (graph, found)) in enumerate(zip(program.stages, plan.stages, planned, strict=True)):
        where = np.asarray(mesh.devices[schedule.device_of[n]]).reshape(data.sharding.mesh.sizes)
        emission = Emission(graph, program.whole.program, found, data.sharding, as_written)
        runs.append(StageRun(stage, emission, program.constants(n), Mesh(where, data.sharding.mesh.names)))
    order = [span.task for span in simulate_plan(schedule, plan.stages).order]
    return PipelineExecutable(runs, schedule, order, donate, mesh, traced, program.whole.pieces)
