"""One stage at run time: its programs, compiled, and the arrays that stand on its devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from autopar.emit.hlo import CompiledCollective, read_collectives
from autopar.emit.manual import Emission, named_sharding
from autopar.emit.stage import Cutter, Form, Kind, Piece, Slot, StageProgram, form_of
from autopar.interop.split import AFTER, BEFORE, COTANGENT, FORWARD, WEIGHT, StageGraph
from autopar.ir.graph import Constant
from autopar.ir.sharding import TensorSharding
from autopar.runtime.executor import own_settings
from autopar.schedule import Schedule, Task
from autopar.trace import compat

PARTS = {"F": (FORWARD,), "B": (COTANGENT, WEIGHT), "I": (COTANGENT,), "W": (WEIGHT,)}
"""Kind of a task -> the parts of a stage's graph that it runs."""


@dataclass(frozen=True, eq=False)
class StageRun:
    """One stage ready to run: its graph, its emission, and its devices."""

    stage: StageGraph
    emission: Emission
    constants: tuple[Any, ...]
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a program, by places among the stage's values: `take` gets its arguments, its outputs go to `keep`, and what is at
    `drop` is then needed no longer.
    """

    take: Callable[[list[Any]], Sequence[Any]]
    keep: tuple[int, ...]
    drop: tuple[int, ...]


@dataclass(eq=False)
class Program:
    """A piece of a stage, compiled. `donated` are the positions of inputs that are given up."""

    piece: Piece
    program: StageProgram
    lowered: Any = None
    compiled: Any = None
    last: frozenset[Slot] = frozenset()
    calls: tuple[Call, ...] = ()

    @property
    def in_loop(self) -> bool:
        """Whether it runs once per microbatch."""
        return self.piece.parts[0] in (FORWARD, COTANGENT, WEIGHT)


class RunningStage:
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
        self.programs = {piece.parts: Program(piece, StageProgram(emission, stage.loop, piece)) for piece in pieces}
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

    def _call(self, program: Program, m: int) -> Call:
        piece, ends = program.piece, m == self.times - 1 or not program.in_loop
        keep = tuple(self.at(slot, m) for slot in piece.outputs)
        drop = [self.at(slot, m) for slot in program.last if slot.kind == "each" or (slot.kind == "once" and ends)]
        if all(slot.kind != "every" for slot in piece.inputs):
            return Call(_getter([self.at(slot, m) for slot in piece.inputs]), keep, tuple(drop))
        parts = [range(self.at(s), self.at(s) + self.times) if s.kind == "every" else self.at(s, m) for s in piece.inputs]
        drop += [k for part in parts if isinstance(part, range) for k in part]

        def take(values: list[Any]) -> Sequence[Any]:
            return [tuple(values[k] for k in p) if isinstance(p, range) else values[p] for p in parts]

        return Call(take, keep, tuple(drop))

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

    def donated(self, program: Program) -> tuple[int, ...]:
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

    def start(self, program: Program, m: int) -> Any:
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
        runs = [((BEFORE,), 0), *((PARTS[t.kind], t.microbatch) for t in tasks)]
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


def backward_of(schedule: Schedule, stage: int) -> list[tuple[int, ...]]:
    """The pieces of a stage's backward, in order."""
    kinds = {task.kind for task in schedule.tasks if task.stage == stage}
    return [PARTS[kind] for kind in "BIW" if kind in kinds]
