"""Run a plan in stages: one program per stage and piece, each on its stage's devices, started in the order of the schedule.

One thread starts every program; JAX runs them when their inputs are there. What one stage gives another is put on the other's devices as
soon as the program that makes it has been started. Arrays are let go with the last program that reads them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar import rules
from autopar.emit.hlo import CompiledCollective, read_collectives
from autopar.emit.manual import Emission, named_sharding
from autopar.emit.stage import Cutter, Form, Kind, Piece, Slot, StageProgram, form_of, form_spec
from autopar.interop.split import AFTER, BEFORE, COTANGENT, FORWARD, WEIGHT, Port, StageGraph
from autopar.interop.timing import schedule_of, simulate_plan
from autopar.ir.check import check_plan
from autopar.ir.graph import Constant
from autopar.ir.plan import Plan
from autopar.ir.sharding import TensorSharding
from autopar.runtime.executor import Owned, check_leaves, own_settings, put
from autopar.runtime.program import staged
from autopar.schedule import Schedule, Task
from autopar.trace import compat
from autopar.trace.recompute import recompute
from autopar.trace.trace import Traced

IN_FLIGHT = 128
"""Programs that are started ahead of those that have ended."""

IN_FLIGHT_CPU = 24
"""The same on CPUs before JAX 0.11 for stages of several devices: some 34 waiting programs with collectives block each other for ever."""


@dataclass(frozen=True, eq=False)
class StageRun:
    """One stage ready to run: its graph, its emission, and its devices."""

    stage: StageGraph
    emission: Emission
    constants: tuple[Any, ...]
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a program, by places among the stage's values: `take` gets its arguments, its outputs go to `keep`, and what is at
    `drop` is then needed no longer.
    """

    take: Callable[[list[Any]], Sequence[Any]]
    keep: tuple[int, ...]
    drop: tuple[int, ...]


@dataclass(eq=False)
class _Program:
    """A piece of a stage, compiled. `donated` are the positions of inputs that are given up."""

    piece: Piece
    program: StageProgram
    lowered: Any = None
    compiled: Any = None
    last: frozenset[Slot] = frozenset()
    calls: tuple[_Call, ...] = ()

    @property
    def in_loop(self) -> bool:
        """Whether it runs once per microbatch."""
        return self.piece.parts[0] in (FORWARD, COTANGENT, WEIGHT)


class _Stage:
    """What a stage has on its devices: its programs, and the arrays that stand there."""

    def __init__(self, number: int, run: StageRun, backward: Sequence[tuple[int, ...]], donate: bool, times: int):
        self.number, self.run, self.mesh, self.times, self.backward = number, run, run.mesh, times, tuple(backward)
        stage, emission = run.stage, run.emission
        self.graph, self.plan = emission.graph, emission.plan
        pieces = Cutter.of(emission, stage, self.backward).pieces()
        self.shardings = [named_sharding(s, run.mesh) for s in self.plan.inputs]
        self.carried = frozenset(i for i, _ in stage.carried) if donate else frozenset()
        self.passed_on = frozenset(self.graph.inputs.index(o) for o in self.graph.outputs if o in self.graph.inputs)
        self.place: dict[Form, int] = {form_of(v, s): k for k, (v, s) in enumerate(zip(self.graph.inputs, self.plan.inputs, strict=True))}
        outputs = list(zip(stage.results, self.graph.outputs, self.plan.outputs, strict=False))
        self.results = {k: self._result(n, o) for n, (k, o, _) in enumerate(outputs) if isinstance(o, int)}
        self.literals = {k: (self._literal(k, o), named_sharding(s, run.mesh)) for k, o, s in outputs if not isinstance(o, int)}
        self.programs = {piece.parts: _Program(piece, StageProgram(emission, stage.loop, piece)) for piece in pieces}
        self._find_last(pieces)
        with own_settings(run.mesh):
            nothing = named_sharding(TensorSharding(()), run.mesh)
            self.zero = jax.device_put(np.int32(0), nothing)
            self.numbers = [jax.device_put(np.int32(m), nothing) for m in range(times)]
            first = len(self.shardings) - len(run.constants)
            self.constants = [jax.device_put(c, s) for c, s in zip(run.constants, self.shardings[first:], strict=True)]
        self.places: dict[Slot, int] = {}
        """Slot -> where its array stands among the stage's values; those of all microbatches stand one after the other."""
        self.width = 0
        for program in self.programs.values():
            program.calls = tuple(self._call(program, m) for m in range(times if program.in_loop else 1))
        self.inputs = [self.at(Slot("once", form_of(v, s))) for v, s in zip(self.graph.inputs, self.plan.inputs, strict=True)]
        self.given = [(k, self.at(Slot("once", form))) for k, form in self.results.items()]
        self.values: list[Any] = []

    def at(self, slot: Slot, m: int = 0) -> int:
        """Where a slot's array stands. What the loop carries has one place, however it lies when it begins."""
        kind: Kind = "each" if slot.kind == "every" else "carry" if slot.kind == "begin" else slot.kind
        key = Slot(kind, form_of(slot.form.value, TensorSharding(()))) if kind == "carry" else Slot(kind, slot.form)
        if key not in self.places:
            self.places[key] = self.width
            self.width += self.times if kind == "each" else 1
        return self.places[key] + (m if kind == "each" else 0)

    def _call(self, program: _Program, m: int) -> _Call:
        piece, ends = program.piece, m == self.times - 1 or not program.in_loop
        keep = tuple(self.at(slot, m) for slot in piece.outputs)
        drop = [self.at(slot, m) for slot in program.last if slot.kind == "each" or (slot.kind == "once" and ends)]
        if all(slot.kind != "every" for slot in piece.inputs):
            return _Call(_getter([self.at(slot, m) for slot in piece.inputs]), keep, tuple(drop))
        parts = [range(self.at(s), self.at(s) + self.times) if s.kind == "every" else self.at(s, m) for s in piece.inputs]
        drop += [k for part in parts if isinstance(part, range) for k in part]

        def take(values: list[Any]) -> Sequence[Any]:
            return [tuple(values[k] for k in p) if isinstance(p, range) else values[p] for p in parts]

        return _Call(take, keep, tuple(drop))

    def _result(self, n: int, value: int) -> Form:
        return form_of(value, self.plan.outputs[n], self.plan.generation(len(self.graph.ops), n))

    def _literal(self, k: int, constant: Constant) -> Any:
        """An output of the step that is a number of the program's own."""
        found = jnp.asarray(self.run.emission.program.literal_outputs[k], dtype=constant.aval.dtype)
        return compat.with_weak_type(found, constant.aval.weak_type)

    def outputs(self) -> Iterator[tuple[int, Any]]:
        """The step's outputs that the stage makes, by position."""
        for k, place in self.given:
            yield k, self.values[place]
        for k, (x, sharding) in self.literals.items():
            yield k, jax.device_put(x, sharding, may_alias=False)

    def _find_last(self, pieces: Sequence[Piece]) -> None:
        """The inputs that each piece is the last to read."""
        reader: dict[Slot, int] = {}
        for n, piece in enumerate(pieces):
            for slot in piece.inputs:
                reader[Slot("each", slot.form) if slot.kind == "every" else slot] = n
        kept = set(self.results.values())
        self.read = {slot.form for slot in reader if slot.kind == "each"}
        for n, piece in enumerate(pieces):
            mine = frozenset(s for s in piece.inputs if reader.get(s) == n and s.kind in ("each", "once") and s.form not in kept)
            self.programs[piece.parts].last = mine

    def donated(self, program: _Program) -> tuple[int, ...]:
        """Positions, among a program's arguments, of what it may write over: sums as they grow, and state that nobody reads any more."""
        found = []
        for n, slot in enumerate(program.piece.inputs):
            leaf = self.place.get(slot.form, -1)
            grows = slot.kind == "carry" and slot in program.piece.outputs
            if grows or (slot in program.last and leaf in self.carried and not program.in_loop):
                found.append(2 + n)
        return tuple(found)

    def lower(self) -> None:
        """Lower every piece."""
        with own_settings(self.mesh):
            for program in self.programs.values():
                built = program.program.build(self.mesh, self.times)
                jitted = jax.jit(built, donate_argnums=self.donated(program))
                structs = [program.program.struct(s, self.mesh) for s in program.piece.inputs]
                structs = [(x,) * self.times if s.kind == "every" else x for s, x in zip(program.piece.inputs, structs, strict=True)]
                number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.zero.sharding)
                program.lowered = jitted.lower(number, number, *structs)

    def compile(self) -> None:
        """Compile every piece that is lowered."""
        with own_settings(self.mesh):
            for program in self.programs.values():
                program.compiled = program.lowered.compile()

    def start(self, program: _Program, m: int) -> Any:
        """Start a piece, for microbatch m where it is one of the loop. Returns its token."""
        call, values = program.calls[m], self.values
        token, *outputs = program.compiled(self.zero, self.numbers[m], *call.take(values))
        for k, x in zip(call.keep, outputs, strict=True):
            values[k] = x
        for k in call.drop:
            values[k] = None
        return token

    def collectives(self) -> tuple[CompiledCollective, ...]:
        """Those of all pieces, as often as a step runs them."""
        found: list[CompiledCollective] = []
        for program in self.programs.values():
            times = self.times if program.in_loop else 1
            found += [replace(c, times=c.times * times) for c in read_collectives(program.compiled.as_text())]
        return tuple(found)

    def peak_bytes(self, order: Sequence[Task]) -> tuple[int, int]:
        """Bytes of its leaves on one device, and of all that stands there at the fullest time, what programs work with included."""
        streamed = {p.position for p in self.run.stage.receives if p.when == "each"}
        arguments = sum(self._bytes(Slot("once", form)) for form, k in self.place.items() if k not in streamed)
        held, peak = arguments, 0
        once: set[Slot] = set()
        tasks = [t for t in order if t.stage == self.number]
        runs = [((BEFORE,), 0), *((_PARTS[t.kind], t.microbatch) for t in tasks)]
        runs += [((AFTER + r,), 0) for r in range(self.run.stage.rounds)]
        arriving = {slot for p in self.programs.values() for slot in p.piece.inputs if slot.kind == "each"} - {
            slot for p in self.programs.values() for slot in p.piece.outputs
        }
        for parts, m in runs:
            program = self.programs[parts]
            new = [slot for slot in program.piece.outputs if slot.kind in ("each", "begin") or (slot.kind == "once" and slot not in once)]
            if parts == (FORWARD,):
                new += [slot for slot in program.piece.inputs if slot in arriving]
            elif program.in_loop:
                forward = self.programs[(FORWARD,)].piece.inputs
                new += [slot for slot in program.piece.inputs if slot in arriving and slot not in forward]
            given_up = (program.piece.inputs[k - 2] for k in self.donated(program))
            donated = sum(self._bytes(slot) for slot in given_up if slot.kind == "once")
            held += sum(map(self._bytes, new)) - donated
            peak = max(peak, held + int(program.compiled.memory_analysis().temp_size_in_bytes))
            once.update(slot for slot in new if slot.kind == "once")
            for slot in program.last:
                if slot.kind == "each":
                    held -= self._bytes(slot) * (self.times if not program.in_loop else 1)
                elif slot in once and (m == self.times - 1 or not program.in_loop):
                    held -= self._bytes(slot)
            held -= sum(self._bytes(slot) for slot in program.piece.outputs if slot.kind == "each" and not self.reads(slot.form))
        return arguments, peak

    def _bytes(self, slot: Slot) -> int:
        return slot.form.sharding.local_bytes(self.graph.avals[slot.form.value], self.plan.mesh, self.run.emission.as_written)

    def reads(self, form: Form) -> bool:
        """Whether the stage itself still needs what each microbatch makes."""
        return form in self.read

    def clear(self) -> None:
        """Let go of all arrays."""
        self.values = [None] * self.width


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """What gets the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[k] for k in places]


@dataclass(frozen=True, slots=True)
class _Sending:
    """What goes from a stage to others at once: where the arrays stand there, the values of others that take them, and where.

    `step` is 1 for values of each microbatch, which stand one after the other. `drop` are those that the stage itself needs no longer.
    """

    source: int
    sent: tuple[tuple[int, int], ...]
    taken: tuple[tuple[int, int, int], ...]
    shardings: tuple[NamedSharding, ...]
    drop: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    """A program to be started, and what is sent then."""

    stage: _Stage
    program: _Program
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

    def __init__(self, runs: Sequence[StageRun], schedule: Schedule, order: Sequence[Task], donate: bool, mesh: Mesh, traced: Traced):
        self.schedule, self.order, self.mesh, self.traced = schedule, tuple(order), mesh, traced
        self.names, self.num_outputs = traced.graph.input_names, len(traced.graph.outputs)
        self.stages = [_Stage(n, run, _backward(schedule, n), donate, schedule.num_microbatches) for n, run in enumerate(runs)]
        self.rounds = max(run.stage.rounds for run in runs)
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

    def _sendings(self) -> Mapping[tuple[int, tuple[int, ...]], _Sending]:
        """(stage, parts of a piece) -> what goes to other stages once that piece has run."""
        found = {}
        for n, stage in enumerate(self.stages):
            for parts in stage.programs:
                ports = [port for part in parts for port in stage.run.stage.sends if port.piece == part]
                if ports:
                    found[n, parts] = self._sending(n, stage, ports)
        return found

    def _sending(self, n: int, stage: _Stage, ports: Sequence[Port]) -> _Sending:
        sent, taken, shardings, drop = [], [], [], []
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
        return _Sending(n, tuple(sent), tuple(taken), tuple(shardings), tuple(dict.fromkeys(drop)))

    def _sequence(self) -> Iterator[_Start]:
        """All programs of a step in the order in which they are started, each with what is sent when it has been."""
        for stage in self.stages:
            yield _Start(stage, stage.programs[(BEFORE,)], 0, None)
        for task in self.order:
            parts = _PARTS[task.kind]
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
            self._place(leaves, owned)
            for n in range(len(self.stages)):
                if (n, (BEFORE,)) in self.sendings:
                    self._send(self.sendings[n, (BEFORE,)], 0)
            for start in self.sequence:
                flight.add(start.stage.start(start.program, start.microbatch))
                if start.sending is not None:
                    self._send(start.sending, start.microbatch)
            outputs: list[Any] = [None] * self.num_outputs
            for stage in self.stages:
                for k, x in stage.outputs():
                    outputs[k] = x
        for array in outputs:
            owned.add(array)
        return outputs

    def _send(self, sending: _Sending, m: int) -> None:
        """Put what a stage has made for others on their devices."""
        values = self.stages[sending.source].values
        arrays = [values[k + m * step] for k, step in sending.sent]
        if len(arrays) == 1:  # a tenth faster than a list of one
            moved = [jax.device_put(arrays[0], sending.shardings[0])]
        else:
            moved = jax.device_put(arrays, list(sending.shardings))
        for (n, k, step), x in zip(sending.taken, moved, strict=True):
            self.stages[n].values[k + m * step] = x
        for k in sending.drop:
            values[k + m] = None

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


def _sent(stage: _Stage, port: Port) -> Form:
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


def _taken(stage: _Stage, port: Port) -> Form:
    """The form in which a stage takes a value from another."""
    graph, plan = stage.graph, stage.plan
    v = graph.inputs[port.position]
    if port.when != "each":
        return form_of(v, plan.inputs[port.position])
    (i, _), *_ = graph.uses[v]
    return form_of(graph.ops[i].results[0], _without_first(plan.inputs[port.position]))


def _without_first(sharding: TensorSharding) -> TensorSharding:
    return TensorSharding(sharding.dims[1:])


_PARTS = {"F": (FORWARD,), "B": (COTANGENT, WEIGHT), "I": (COTANGENT,), "W": (WEIGHT,)}
"""Kind of a task -> the parts of a stage's graph that it runs."""


def _backward(schedule: Schedule, stage: int) -> list[tuple[int, ...]]:
    """The pieces of a stage's backward, in order."""
    kinds = {task.kind for task in schedule.tasks if task.stage == stage}
    return [_PARTS[kind] for kind in "BIW" if kind in kinds]


def pipeline_for(plan: Plan, traced: Traced, mesh: Mesh, donate: bool = True) -> PipelineExecutable:
    """A plan in stages and the program that it belongs to, ready to be compiled for `mesh`, whose first axis is that of the stages."""
    program = staged(traced, plan)
    schedule = schedule_of(plan)
    as_written = plan.options.get("reduce_dtype") == "as_written"
    runs = []
    for n, (stage, data) in enumerate(zip(program.stages, plan.stages, strict=True)):
        graph = recompute(stage.graph, data.recomputed) if data.recomputed else stage.graph
        found = tuple(rules.rule_for(op, graph.aval) for op in graph.ops)
        where = np.asarray(mesh.devices[schedule.device_of[n]]).reshape(data.sharding.mesh.sizes)
        emission = Emission(graph, program.whole.program, found, check_plan(graph, found, data.sharding), as_written)
        runs.append(StageRun(stage, emission, program.constants(n), Mesh(where, data.sharding.mesh.names)))
    order = [span.task for span in simulate_plan(schedule, plan.stages).order]
    return PipelineExecutable(runs, schedule, order, donate, mesh, traced)
