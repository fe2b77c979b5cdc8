"""The programs of one stage: its graph cut into pieces, each of which runs by itself on the stage's submesh.

What a piece needs of another comes to it in the very form that the plan says: a value that stands cut or partial goes over cut or partial,
so that every collective of the plan runs in exactly one piece, once. A value that is partial goes over as an array with a dimension more,
which is cut along the axes over which it is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.emit.manual import Device, Emission
from autopar.emit.regions import run
from autopar.errors import CheckError
from autopar.interop.split import AFTER, BEFORE, FORWARD, StageGraph
from autopar.ir.graph import BOUNDARY, ROOT, Aval, Graph
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import operand_sharding, result_sharding
from autopar.trace import compat

Kind = Literal["once", "each", "every", "begin", "carry"]


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """One form of a value: how it lies, and which generation of it."""

    value: int
    sharding: TensorSharding = field(compare=False)
    text: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """What goes into a piece or comes out of it.

    `once`: there once per step. `each`: there once per microbatch. `every`: those of all microbatches together. `carry`: what is added up
    over the microbatches, as it stands; `begin` is what it begins with.
    """

    kind: Kind
    form: Form


@dataclass(frozen=True)
class Piece:
    """One program of a stage. `parts` are the parts of the graph that it runs (`Op.part`), `extra` the ops that it runs for itself first.

    `inputs` and `outputs` are in order; `moves` are those of the plan that it makes.
    """

    parts: tuple[int, ...]
    ops: tuple[tuple[int, int], ...]
    extra: tuple[int, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    moves: tuple[int, ...]


def form_of(value: int, sharding: TensorSharding, generation: int = 0) -> Form:
    return Form(value, sharding, str(sharding), generation)


@dataclass
class _Draft:
    """A piece as it is being found."""

    parts: tuple[int, ...]
    extra: dict[int, None] = field(default_factory=dict)
    inputs: dict[Slot, None] = field(default_factory=dict)
    outputs: dict[Slot, None] = field(default_factory=dict)
    there: set[Form] = field(default_factory=set)
    moves: list[int] = field(default_factory=list)


class Cutter:
    """Finds what each piece of a stage needs of the others, and gives them.

    `pieces` are the parts of each piece, in the order in which the pieces run; `received` are the inputs of the graph that come once per
    microbatch, and `sent` its outputs that go once per microbatch.
    """

    def __init__(self, emission: Emission, loop: int, pieces: Sequence[tuple[int, ...]], received: Sequence[int], sent: Sequence[int]):
        self.emission, self.loop = emission, loop
        self.graph: Graph = emission.graph
        self.sent = frozenset(sent)
        self.stacked = {self.graph.inputs[k] for k in received}
        self.moves = {(m.value, str(m.target), m.generation): k for k, m in enumerate(emission.plan.moves)}
        self.drafts = [_Draft(parts) for parts in pieces]
        self.of_part = {p: n for n, parts in enumerate(pieces) for p in parts}
        self.where: dict[Form, int] = {}
        """Form -> the piece that makes it first; -1 for inputs."""

    @staticmethod
    def of(emission: Emission, stage: StageGraph, backward: Sequence[tuple[int, ...]]) -> Cutter:
        """The cutter of a stage whose backward runs as these pieces."""
        parts = [(BEFORE,), (FORWARD,), *backward, *((AFTER + r,) for r in range(stage.rounds))]
        received = [p.position for p in stage.receives if p.when == "each"]
        sent = [p.position for p in stage.sends if p.when == "each"]
        return Cutter(emission, stage.loop, parts, received, sent)

    def pieces(self) -> tuple[Piece, ...]:
        graph, plan = self.graph, self.emission.plan
        for v, s in zip(graph.inputs, plan.inputs, strict=True):
            self.where[form_of(v, s)] = -1
        for n in range(len(self.drafts)):
            for i in self._ops(n):
                self._op(i, n)
            if n == 0:
                self._prepare()
            self._leave(n)
        return tuple(map(self._finished, range(len(self.drafts))))

    def _ops(self, n: int) -> list[int]:
        parts = self.drafts[n].parts
        return [i for i, op in enumerate(self.graph.ops) if op.part in parts and not self._is_port(i)]

    def _is_port(self, i: int) -> bool:
        op = self.graph.ops[i]
        return op.primitive in BOUNDARY and op.param("region") == self.loop

    def _op(self, i: int, n: int) -> None:
        graph = self.graph
        for k, o in enumerate(graph.ops[i].operands):
            if isinstance(o, int):
                self.need(self._operand(i, k), n)
        for r in graph.ops[i].results:
            made = form_of(r, self._result(i, r))
            self.where.setdefault(made, n)
            self.drafts[n].there.add(made)

    def _operand(self, i: int, k: int) -> Form:
        plan = self.emission.plan
        o = self.graph.ops[i].operands[k]
        assert isinstance(o, int)
        return form_of(o, operand_sharding(self.emission.rules[i], plan.strategies[i], k), plan.generation(i, k))

    def _prepare(self) -> None:
        """Values from outside come into the forms that the loop reads before it begins."""
        graph = self.graph
        for i, op in enumerate(graph.ops):
            if op.primitive == "loop_carry" and self._is_port(i):
                if isinstance(op.operands[0], int):
                    self.need(self._operand(i, 0), 0)
                self.drafts[0].outputs[Slot("begin", form_of(op.results[0], self._result(i, op.results[0])))] = None
            elif self.loop in graph.path(op.region) or (op.primitive in ("loop_slice", "loop_read") and self._is_port(i)):
                for k, o in enumerate(op.operands):
                    if isinstance(o, int) and o not in self.stacked and o not in graph.free and graph.home(o) == ROOT:
                        form = self._operand(i, k)
                        if self.where.get(form) != -1:
                            self.need(form, 0)

    def _leave(self, n: int) -> None:
        """What leaves the loop or the stage and is made in piece n. Later pieces may read it so; this one must not wait for them."""
        for i, op in enumerate(self.graph.ops):
            if not self._is_port(i) or op.primitive not in ("loop_exit", "loop_stack"):
                continue
            form = self._operand(i, 0)
            if self._maker(form.value) != n:
                continue
            self.need(form, n)
            slot = self._carried(i) if op.primitive == "loop_exit" else Slot("each", form)
            self.drafts[n].outputs[slot] = None
        for k, o in enumerate(self.graph.outputs):
            if isinstance(o, int) and k not in self.sent and self._gives(o) == n:
                self._out(k, o, n)

    def _carried(self, i: int) -> Slot:
        """What the loop carries round by op i."""
        begin = self.graph.begins[i]
        value = self.graph.ops[begin].results[0]
        return Slot("carry", form_of(value, self._result(begin, value)))

    def _maker(self, value: int) -> int:
        """The piece that makes a value of the loop, or the first that can."""
        p = self.graph.producer[value]
        part = self.graph.ops[p].part
        return self.of_part[part] if not self._is_port(p) else 1

    def _gives(self, value: int) -> int:
        """The piece that gives a value which does not leave the loop."""
        p = self.graph.producer.get(value)
        return 0 if p is None else self._loop_end() if self._is_port(p) else self.of_part[self.graph.ops[p].part]

    def _out(self, k: int, o: int, n: int) -> None:
        """A result of the stage, or what it sends before or after the microbatches."""
        plan, graph = self.emission.plan, self.graph
        form = form_of(o, plan.outputs[k], plan.generation(len(graph.ops), k))
        if self.where.get(form) != -1:
            self.need(form, n)
            self.drafts[n].outputs[Slot("once", form)] = None

    def _loop_end(self) -> int:
        """The first piece after the loop."""
        return next(n for n, draft in enumerate(self.drafts) if draft.parts[0] >= AFTER)

    def need(self, form: Form, n: int) -> None:
        """Piece n needs a form: it is there, comes from another piece, is made by a move, or by an op run once more."""
        draft = self.drafts[n]
        if form in draft.there:
            return
        draft.there.add(form)
        p = self.graph.producer.get(form.value)
        made = None if p is None else form_of(form.value, self._result(p, form.value))
        if p is not None and form == made and (self._is_port(p) or form.value in self.graph.free):
            self._port(p, form, n)
            return
        source = self.where.get(form)
        if source is not None and source != n and form.value not in self.graph.free:  # what depends on nothing is made where it is read
            self._bring(form, source, n)
            return
        k = self.moves.get((form.value, form.text, form.generation))
        if k is None:
            if source == n:
                return
            raise CheckError(f"the plan has no move that brings value {form.value} to {form.text} (generation {form.generation}).")
        move = self.emission.plan.moves[k]
        self.need(form_of(move.value, move.source, move.source_generation), n)
        self.where.setdefault(form, n)
        draft.moves.append(k)

    def _result(self, i: int, value: int) -> TensorSharding:
        return result_sharding(self.emission.rules[i], self.emission.plan.strategies[i], self.graph.ops[i].results.index(value))

    def _bring(self, form: Form, source: int, n: int) -> None:
        """A form goes from one piece to another."""
        each = source >= 0 and self._inside(source)
        slot = Slot("each" if each else "once", form)
        self.drafts[n].inputs[slot] = None
        if source >= 0:
            self.drafts[source].outputs[slot] = None

    def _inside(self, n: int) -> bool:
        """Whether a piece runs once per microbatch."""
        return 0 < n < self._loop_end()

    def _port(self, i: int, form: Form, n: int) -> None:
        """A value that a port of the loop gives, or that nothing feeds: each piece has it from outside, or makes it itself."""
        draft, op = self.drafts[n], self.graph.ops[i]
        kind = op.primitive if self._is_port(i) else ""
        if kind == "loop_slice" and op.operands[0] in self.stacked:
            draft.inputs[Slot("each", form)] = None
        elif kind == "loop_carry":
            draft.inputs[Slot("carry", form)] = None
        elif kind == "loop_exit":
            draft.inputs[self._carried(i)] = None
            draft.extra[i] = None
        elif kind == "loop_stack":
            draft.inputs[Slot("every", self._operand(i, 0))] = None
            draft.extra[i] = None
        else:
            for k, o in enumerate(op.operands):
                if isinstance(o, int):
                    self.need(self._operand(i, k), n)
            for r in op.results:
                draft.there.add(form_of(r, self._result(i, r)))
            draft.extra[i] = None

    def _finished(self, n: int) -> Piece:
        draft, ops = self.drafts[n], self._ops(n)
        extra = tuple(sorted(i for i in draft.extra if i not in set(ops)))
        return Piece(draft.parts, _ranges(ops), extra, tuple(draft.inputs), tuple(draft.outputs), tuple(draft.moves))


def _ranges(ops: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of consecutive numbers, as (first, stop)."""
    found: list[tuple[int, int]] = []
    for i in ops:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class StageProgram:
    """A piece as a program: its emission, and the loop over microbatches that it was cut from."""

    emission: Emission
    loop: int
    piece: Piece

    def spec(self, slot: Slot) -> PartitionSpec:
        """How a slot's array lies on the mesh."""
        return form_spec(slot.form.sharding)

    def struct(self, slot: Slot, mesh: Mesh) -> Any:
        """The array of a slot as a `jax.ShapeDtypeStruct`."""
        aval, sharding = self.emission.graph.avals[slot.form.value], slot.form.sharding
        shape = (*(self.emission.plan.mesh.size((a,)) for a, _ in sharding.partial), *aval.shape)
        return compat.struct(Aval(shape, sharding.local_dtype(aval.dtype, self.emission.as_written)), NamedSharding(mesh, self.spec(slot)))

    def build(self, mesh: Mesh, times: int) -> Callable[..., tuple[Any, ...]]:
        """The program over a mesh: `(zero, number of the microbatch, *inputs) -> (token, *outputs)`.

        `every` inputs are tuples of arrays. The token is there when the program has run, and nobody else's.
        """
        inputs = tuple(self.spec(s) if s.kind != "every" else (self.spec(s),) * times for s in self.piece.inputs)
        return jax.shard_map(
            self._body(mesh.devices.flat[0].platform),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(), *inputs),
            out_specs=(PartitionSpec(), *map(self.spec, self.piece.outputs)),
            check_vma=False,
        )

    def _body(self, platform: str) -> Callable[..., tuple[Any, ...]]:
        def body(zero: Any, number: Any, *inputs: Any) -> tuple[Any, ...]:
            return _Run(self, platform, zero, number).run(inputs)

        return body

    @cached_property
    def exits(self) -> dict[int, int]:
        """Value that the loop carries -> the op by which it leaves."""
        graph = self.emission.graph
        return {graph.ops[i].results[0]: j for i, j in graph.goes_round}


class _Run:
    """One run of a piece on one device."""

    def __init__(self, program: StageProgram, platform: str, zero: Any, number: Any):
        self.program, self.number = program, number
        self.device = Device(program.emission, platform, zero)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        piece, device = self.program.piece, self.device
        every: dict[int, Sequence[Any]] = {}
        for slot, x in zip(piece.inputs, inputs, strict=True):
            if slot.kind == "every":
                every[slot.form.value] = [_part(y, slot.form.sharding) for y in x]
            else:
                self._set(slot.form, _part(x, slot.form.sharding))
        for i in piece.extra:
            self._extra(i, every)
        for first, stop in piece.ops:
            op = device.emission.graph.ops[first]
            path = device.emission.graph.path(op.region)
            run(device, first, stop, self.program.loop if self.program.loop in path else ROOT)
        return self.number + device.zero, *map(self._given, piece.outputs)

    def _given(self, slot: Slot) -> Any:
        """A slot's array as the program gives it."""
        weak = slot.kind == "once" and self.device.emission.graph.avals[slot.form.value].weak_type
        return compat.with_weak_type(_whole(self._get(slot), slot.form.sharding), weak)

    def _set(self, form: Form, x: Any) -> None:
        self.device.forms[form.value, form.sharding, form.generation] = x
        self.device.made.setdefault(form.value, x)

    def _get(self, slot: Slot) -> Any:
        """What a slot gives: what the loop carries, as it goes round."""
        form = slot.form
        if slot.kind == "carry":
            return self.device.operand(self.program.exits[form.value], 0)
        if slot.kind == "begin":
            return jnp.asarray(self.device.operand(self.device.emission.graph.producer[form.value], 0))
        return self.device.read(form.value, form.sharding, form.generation)

    def _extra(self, i: int, every: dict[int, Sequence[Any]]) -> None:
        """An op that each piece runs for itself: a port of the loop, or what nothing feeds."""
        device, graph = self.device, self.device.emission.graph
        op = graph.ops[i]
        if op.primitive not in BOUNDARY or op.param("region") != self.program.loop:
            device.op(i)
        elif op.primitive == "loop_read":
            device.give(i, device.operand(i, 0))
        elif op.primitive == "loop_slice":
            device.give(i, lax.dynamic_index_in_dim(device.operand(i, 0), self.number, 0, keepdims=False))
        elif op.primitive == "loop_exit":
            value = graph.ops[graph.begins[i]].results[0]
            device.give(i, next(x for (v, _, _), x in device.forms.items() if v == value))
        else:
            assert isinstance(op.operands[0], int)
            device.give(i, jnp.stack(every[op.operands[0]]))


def form_spec(sharding: TensorSharding) -> PartitionSpec:
    """How a form lies as an array: a dimension for each axis over which it is partial, then its own."""
    return PartitionSpec(*(a for a, _ in sharding.partial), *(None if not d else d[0] if len(d) == 1 else d for d in sharding.dims))


def _part(x: Any, sharding: TensorSharding) -> Any:
    return x.reshape(x.shape[len(sharding.partial) :]) if sharding.partial else x


def _whole(x: Any, sharding: TensorSharding) -> Any:
    return x.reshape((1,) * len(sharding.partial) + x.shape) if sharding.partial else x
