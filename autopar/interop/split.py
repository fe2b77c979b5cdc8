"""A step as stages: the graph of each stage's share of a step that runs in microbatches, and what stages give each other.

The step comes as a loop over microbatches whose ops know their layer (`Op.part`). Each stage takes the ops of its layers, with what runs
before and after the loop for them; values of other stages become inputs, and what other stages read becomes outputs. The ops of a stage's
graph stand in *pieces*, one after the other, which the runtime runs one by one: what comes before the microbatches, forward, the part of
backward that makes cotangents for other stages, the rest of backward, and what comes after, in as many rounds as values go to and fro.

What depends on no batch is made by each stage that reads it. State lives on the stage that makes its next value, and goes from there to
other stages that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import CheckError
from autopar.interop.places import Places, When
from autopar.ir.check import check_graph
from autopar.ir.graph import BOUNDARY, ROOT, Aval, Graph, Op, Operand, Phase

BEFORE, FORWARD, COTANGENT, WEIGHT, AFTER = range(5)
"""Pieces of a stage's graph, as `Op.part` says: `AFTER` and up are the rounds after the microbatches."""

_PHASES: tuple[Phase, ...] = ("forward", "forward", "backward", "backward")


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """A value that goes from one stage to another: `before` the microbatches, in `each`, or `after` them.

    `value` is that of the whole step's graph, `position` where it stands among the inputs or outputs of the stage's graph, and `other` the
    stage at the other end. Those of each microbatch are stacked there, along a first dimension of their own. `piece` makes it.
    """

    when: When
    value: int
    other: int
    position: int
    piece: int


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage's share of a step. `leaves` and `results` are the positions of its first inputs and outputs among the step's own; then
    come the values that it `receives` and `sends`. `carried` pairs its state's inputs and outputs. `loop` is the region of the loop over
    microbatches, in which a stage may have no ops.
    """

    graph: Graph
    carried: tuple[tuple[int, int], ...]
    leaves: tuple[int, ...]
    results: tuple[int, ...]
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    rounds: int
    loop: int


def microbatch_loop(graph: Graph) -> int:
    """The outermost loop of a whole step in which ops of layers stand."""
    return next(graph.path(op.region)[0] for op in graph.ops if op.region != ROOT and op.part >= 0 and op.primitive not in BOUNDARY)


def split(
    graph: Graph, loop: int, carried: Sequence[tuple[int, int]], stage_of: Sequence[int], in_two: bool = False
) -> tuple[StageGraph, ...]:
    """The stages of a step whose `loop` runs over microbatches. `stage_of[layer]` is a layer's stage; stages are numbered as data flows.

    Backward is one piece, layer after layer; `in_two`, what makes cotangents for other stages comes first, as schedules ask for that
    run the rest of it later.
    """
    places = Places(graph, loop, carried, tuple(stage_of))
    places.demand()
    return tuple(_Writer(places, s, in_two).stage() for s in range(places.count))


class _Writer:
    """Writes the graph of one stage."""

    def __init__(self, places: Places, stage: int, in_two: bool):
        self.places, self.number, self.in_two, self.old = places, stage, in_two, places.graph
        self.times = self.old.regions[places.loop].times
        self.avals: list[Aval] = []
        self.ops: list[Op] = []
        self.now: dict[tuple[int, int], int] = {}
        """(piece, value of the whole graph) -> value of the stage's; piece -1 stands for all pieces."""
        self.positions: dict[int, int] = {}
        """Position of what a loop carries -> the new one."""
        self.units = sorted(places.included[stage])
        self.regions = {r: k for k, r in enumerate(sorted(self._regions()))}
        self.pieces = self._pieces()

    def stage(self) -> StageGraph:
        places, s, old = self.places, self.number, self.old
        first = len(old.inputs) - old.num_constants
        leaves = [k for k, v in enumerate(old.inputs) if places.home.get(v, -1 if s not in places.reads.get(v, ()) else s) == s]
        constants, leaves = [k for k in leaves if k >= first], [k for k in leaves if k < first]
        results = [k for k in range(len(old.outputs)) if places.owner[k] == s]
        inputs = [self._leaf(k) for k in leaves]
        receives = self._receives(len(leaves))
        inputs += [self._received(port) for port in receives]
        inputs += [self._leaf(k) for k in constants]
        self._write(receives, dict(zip(receives, inputs[len(leaves) :], strict=False)))
        sends = self._sends(len(results))
        outputs = [*(self._now(old.outputs[k], -1) for k in results), *map(self._sent, sends)]
        names = [old.input_names[k] for k in leaves] + [f"stage[{p.other}].{p.when}[{n}]" for n, p in enumerate(receives)]
        graph = Graph(
            tuple(self.avals),
            tuple(inputs),
            tuple(outputs),
            tuple(self.ops),
            (*names, *(old.input_names[k] for k in constants)),
            (*(old.output_names[k] for k in results), *(f"to.stage[{p.other}].{p.when}[{n}]" for n, p in enumerate(sends))),
            len(constants),
            tuple(replace(old.regions[r], parent=self.regions.get(old.regions[r].parent, ROOT)) for r in self.regions),
        )
        carried = [(leaves.index(i), results.index(o)) for i, o in places.carried if i in leaves and o in results]
        rounds = 1 + max([op.part - AFTER for op in self.ops], default=0)
        loop = self.regions[places.loop]
        return StageGraph(check_graph(graph), tuple(carried), (*leaves, *constants), tuple(results), receives, sends, max(1, rounds), loop)

    def _regions(self) -> set[int]:
        used = {self.places.loop}
        for op in (self.old.ops[i] for n in self.units for i in self.places.units[n].ops):
            used.update(self.old.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region))
        return used

    def _pieces(self) -> dict[int, set[int]]:
        """The pieces in which each unit of the loop runs."""
        places = self.places
        sent = {v for there in places.receives for v, source in there.items() if source == self.number}
        found: dict[int, set[int]] = {n: set() for n in self.units}
        readers: dict[int, list[int]] = {}
        for n in self.units:
            for v in places.outer(n):
                readers.setdefault(v, []).append(n)
        for n in reversed(self.units):
            unit = places.units[n]
            if unit.kind != "inside":
                continue
            reading = {p for v in places.made(n) for u in readers.get(v, ()) for p in found[u] if places.units[u].kind == "inside"}
            if n not in places.stage:
                found[n] = reading or {FORWARD}
            elif n in places.late:
                found[n] = {COTANGENT if not self.in_two or COTANGENT in reading or not sent.isdisjoint(places.made(n)) else WEIGHT}
            else:
                found[n] = {FORWARD}
        return found

    # Inputs and outputs

    def _value(self, aval: Aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _leaf(self, k: int) -> int:
        v = self.old.inputs[k]
        return self.now.setdefault((-1, v), self._value(self.old.avals[v]))

    def _receives(self, first: int) -> tuple[Port, ...]:
        found = sorted((self.places.when(v), v, there) for v, there in self.places.receives[self.number].items())
        return tuple(Port(when, v, there, first + n, self._made_by(there, v)) for n, (when, v, there) in enumerate(found))

    def _received(self, port: Port) -> int:
        new = self._value(self._aval(port))
        if port.when != "each":
            self.now[-1, port.value] = new
        return new

    def _aval(self, port: Port) -> Aval:
        aval = self.old.avals[port.value]
        return replace(aval, shape=(self.times, *aval.shape), weak_type=False) if port.when == "each" else aval

    def _made_by(self, stage: int, v: int) -> int:
        """The piece of its stage that makes a value which is sent."""
        places, when = self.places, self.places.when(v)
        if when == "before":
            return BEFORE
        if when == "after":
            return AFTER + places.rounds[stage, v]
        return COTANGENT if places.unit_of[v] in places.late else FORWARD

    def _sends(self, first: int) -> tuple[Port, ...]:
        s, places = self.number, self.places
        found = sorted((places.when(v), v, r) for r, there in enumerate(places.receives) for v, source in there.items() if source == s)
        return tuple(Port(when, v, r, first + n, self._made_by(s, v)) for n, (when, v, r) in enumerate(found))

    def _sent(self, port: Port) -> int:
        value = self.now[-1, port.value]
        if port.when != "each":
            return value
        stacked = self._value(self._aval(port))
        params = (("position", len(self.ops)), ("region", self.regions[self.places.loop]))
        op = Op("loop_stack", params, (value,), (stacked,), _PHASES[port.piece], equation=self._loop_equation(), part=AFTER)
        self.ops.insert(self.leaving, op)
        return stacked

    def _loop_equation(self) -> int:
        return self.old.regions[self.places.loop].equation

    # Ops

    def _write(self, receives: Sequence[Port], new: Mapping[Port, int]) -> None:
        places = self.places
        kinds: dict[str, list[int]] = {"before": [], "enter": [], "inside": [], "leave": [], "after": []}
        for n in self.units:
            kinds[places.units[n].kind].append(n)
        for n in kinds["before"]:
            self._unit(n, BEFORE, -1)
        for port in receives:
            if port.when == "each":
                self._enter(port, new[port])
        for n in kinds["enter"]:
            self._unit(n, BEFORE, -1)
        for piece in (FORWARD, COTANGENT, WEIGHT):
            for n in kinds["inside"]:
                if piece in self.pieces[n]:
                    self._unit(n, piece, -1 if n in places.stage else piece)
        for n in kinds["leave"]:
            self._unit(n, AFTER, -1)
        self.leaving = len(self.ops)
        rounds = {n: max((places.rounds[self.number, v] for v in places.made(n)), default=0) for n in kinds["after"]}
        for n in sorted(rounds, key=lambda n: (rounds[n], n)):
            self._unit(n, AFTER + rounds[n], -1)

    def _enter(self, port: Port, stacked: int) -> None:
        """A value of each microbatch that another stage has made."""
        params = (("position", len(self.ops)), ("region", self.regions[self.places.loop]))
        result = self.now[-1, port.value] = self._value(self.old.avals[port.value])
        self.ops.append(Op("loop_slice", params, (stacked,), (result,), equation=self._loop_equation(), part=BEFORE))

    def _unit(self, n: int, part: int, piece: int) -> None:
        for i in self.places.units[n].ops:
            op = self.old.ops[i]
            operands = tuple(self._now(o, part if FORWARD <= part <= WEIGHT else -1) for o in op.operands)
            results = tuple(self._value(self.old.avals[r]) for r in op.results)
            self.now.update({(piece, r): new for r, new in zip(op.results, results, strict=True)})
            phase = _PHASES[part] if part in (FORWARD, COTANGENT, WEIGHT) else op.phase
            region = self.regions.get(op.region, ROOT)
            self.ops.append(replace(op, operands=operands, results=results, region=region, phase=phase, part=part, params=self._params(op)))

    def _params(self, op: Op) -> tuple[tuple[str, Any], ...]:
        if op.primitive not in BOUNDARY:
            return op.params
        region, position = int(op.param("region")), op.param("position")
        if region == self.places.loop:
            carries = op.primitive in ("loop_carry", "loop_exit")
            position = self.positions.setdefault(position, len(self.ops)) if carries else len(self.ops)
        changed = {"region": self.regions[region], "position": position}
        return tuple((name, changed.get(name, value)) for name, value in op.params)

    def _now(self, o: Operand, piece: int) -> Operand:
        """An operand as the stage has it. Ports read what any piece has made."""
        if not isinstance(o, int):
            return o
        for p in (piece, -1, FORWARD, COTANGENT, WEIGHT):
            if (p, o) in self.now:
                return self.now[p, o]
        raise CheckError(f"stage {self.number} reads value {o} of the step, which it neither makes nor receives.")
