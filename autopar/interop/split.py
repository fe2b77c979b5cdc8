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
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import CheckError
from autopar.ir.check import check_graph
from autopar.ir.graph import BOUNDARY, ENTERING, LEAVING, ROOT, Aval, Graph, Op, Operand, Phase
from autopar.trace.order import units

BEFORE, FORWARD, COTANGENT, WEIGHT, AFTER = range(5)
"""Pieces of a stage's graph, as `Op.part` says: `AFTER` and up are the rounds after the microbatches."""

_PHASES: tuple[Phase, ...] = ("forward", "forward", "backward", "backward")
_SMALL = 64
"""Elements of a value that stages make for themselves, each, rather than send, where it depends on the microbatch's number alone."""

When = Literal["before", "each", "after"]


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
    places = _Places(graph, loop, carried, tuple(stage_of))
    places.demand()
    return tuple(_Writer(places, s, in_two).stage() for s in range(places.count))


@dataclass(frozen=True, slots=True)
class _Unit:
    """Ops that stay together: `kind` is `before`, `enter`, `inside`, `leave` or `after`."""

    kind: str
    ops: tuple[int, ...]


@dataclass
class _Places:
    """Where each op of the whole graph runs, and who needs which values."""

    graph: Graph
    loop: int
    carried: Sequence[tuple[int, int]]
    stage_of: tuple[int, ...]
    units: list[_Unit] = field(default_factory=list)
    unit_of: dict[int, int] = field(default_factory=dict)
    """Value -> the unit that makes it."""
    stage: dict[int, int] = field(default_factory=dict)
    """Unit -> its stage; units that each stage runs for itself have none."""
    late: set[int] = field(default_factory=set)
    """Units of the loop that belong to backward."""
    included: list[set[int]] = field(default_factory=list)
    """By stage, the units that it runs."""
    receives: list[dict[int, int]] = field(default_factory=list)
    """By stage, the values that it receives, and from which stage."""
    reads: dict[int, set[int]] = field(default_factory=dict)
    """Input of the graph -> the stages that read it."""
    rounds: dict[tuple[int, int], int] = field(default_factory=dict)
    """(stage, value) -> the round after the microbatches in which it is there."""

    def __post_init__(self) -> None:
        self.count = max(self.stage_of) + 1
        self.end = self.count - 1
        self.inputs = {v: n for n, v in enumerate(self.graph.inputs)}
        self.included = [set() for _ in range(self.count)]
        self.receives = [{} for _ in range(self.count)]
        self._find_units()
        self._find_stages()

    # Units

    def _find_units(self) -> None:
        graph, first, last = self.graph, *self.graph.spans[self.loop]
        at = 0
        for group in units(graph):
            here = tuple(range(at, at + len(group)))
            at += len(group)
            if here[0] == first:
                self._inside(first, last)
            else:
                self.units.append(_Unit("before" if here[0] < first else "after", here))
        for n, unit in enumerate(self.units):
            self.unit_of.update({r: n for i in unit.ops for r in graph.ops[i].results})

    def _inside(self, first: int, last: int) -> None:
        """The ports of the loop one by one, its ops in groups that are in one inner loop."""
        group: list[int] = []
        around = ROOT
        for i in range(first, last + 1):
            op = self.graph.ops[i]
            path = self.graph.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region)
            region = path[1] if len(path) > 1 else ROOT
            if group and (region == ROOT or region != around):
                self.units.append(_Unit("inside", tuple(group)))
                group = []
            around = region
            if region != ROOT:
                group.append(i)
                continue
            kind = "enter" if op.primitive in ENTERING else "leave" if op.primitive in LEAVING else "inside"
            self.units.append(_Unit(kind, (i,)))
        if group:
            self.units.append(_Unit("inside", tuple(group)))

    def outer(self, n: int) -> list[int]:
        """The values that a unit reads of others."""
        own = {r for i in self.units[n].ops for r in self.graph.ops[i].results}
        return [o for i in self.units[n].ops for o in self.graph.ops[i].inputs if o not in own]

    def made(self, n: int) -> list[int]:
        return [r for i in self.units[n].ops for r in self.graph.ops[i].results]

    # Stages

    def _find_stages(self) -> None:
        shared = self._shared()
        for n, unit in enumerate(self.units):
            parts = [self.graph.ops[i].part for i in unit.ops if self.graph.ops[i].part >= 0]
            asked = [self.stage_of[p] for p in parts]
            if unit.kind == "inside":
                self._stage_inside(n, asked, n in shared)
            elif unit.kind == "leave":
                maker = self.unit_of[self.graph.ops[unit.ops[0]].inputs[0]]
                self.stage[n] = self.stage.get(maker, self.end)
            elif unit.kind == "after" and n not in shared:
                found = set(asked) or {self.stage[m] for v in self.outer(n) if (m := self.unit_of.get(v, -1)) in self.stage}
                self.stage[n] = found.pop() if len(found) == 1 else self.end

    def _shared(self) -> set[int]:
        """The units that each stage runs for itself: what depends on no batch, before or after; in the loop what depends on nothing but
        the microbatch's number and single numbers from outside, if it is small or free."""
        graph, found = self.graph, set[int]()
        known = set(graph.inputs)
        for n, unit in enumerate(self.units):
            ops = [graph.ops[i] for i in unit.ops]
            pure = not any(op.effects for op in ops)
            if unit.kind == "before" and pure:
                found.add(n)
                known.update(self.made(n))
            elif unit.kind == "after" and pure and all(v in known for v in self.outer(n)) and not self._is_state(n):
                found.add(n)
                known.update(self.made(n))
            elif unit.kind == "inside" and pure and all(self._is_plain(v, found) for v in self.outer(n)):
                made = self.made(n)
                if all(v in graph.free for v in made) or sum(graph.avals[v].size for v in made) <= _SMALL:
                    found.add(n)
        return found

    def _is_state(self, n: int) -> bool:
        """Whether a unit makes what the step gives back: that has one place."""
        return not self.graph.output_values.isdisjoint(self.made(n))

    def _is_plain(self, v: int, shared: set[int]) -> bool:
        n = self.unit_of.get(v)
        if v in self.graph.free or n in shared:
            return True
        if n is None or self.units[n].kind != "enter":
            return False
        op = self.graph.ops[self.units[n].ops[0]]
        if op.primitive == "loop_slice":
            return op.operands[0] in self.graph.free
        return op.primitive == "loop_read" and self.graph.avals[v].size <= 1

    def _stage_inside(self, n: int, asked: list[int], shared: bool) -> None:
        """Forward goes on where its operands are or later, backward where its cotangents come from or earlier."""
        before = [m for v in self.outer(n) if (m := self.unit_of.get(v, -1)) >= 0 and self.units[m].kind == "inside"]
        late = any(m in self.late for m in before) or any(self.graph.ops[i].phase == "backward" for i in self.units[n].ops)
        if late:
            self.late.add(n)
        if shared:
            return
        if late:
            self.stage[n] = min([*(asked[:1] or [self.end]), *(self.stage[m] for m in before if m in self.late and m in self.stage)])
        else:
            self.stage[n] = max([*(asked[:1] or [0]), *(self.stage[m] for m in before if m in self.stage)])

    def piece(self, n: int) -> int:
        """The piece of a unit of the loop, backward not yet split."""
        return WEIGHT if n in self.late else FORWARD

    # Who needs what

    def demand(self) -> None:
        """From the outputs back: which stage runs what and receives what."""
        waiting: list[tuple[int, int]] = []
        self.owner: dict[int, int] = {}
        for k, o in enumerate(self.graph.outputs):
            if not isinstance(o, int):
                self.owner[k] = self.end
            elif o not in self.inputs:
                self.owner[k] = self.stage.get(self.unit_of[o], self.end)
                waiting.append((self.owner[k], o))
        for n, unit in enumerate(self.units):
            if any(self.graph.ops[i].effects for i in unit.ops):
                s = self.stage.get(n, self.end)
                self._include(s, n, waiting)
        self._close(waiting)
        self._settle_leaves()
        self._count_rounds()

    def _close(self, waiting: list[tuple[int, int]]) -> None:
        seen: set[tuple[int, int]] = set()
        while waiting:
            s, v = waiting.pop()
            if (s, v) in seen:
                continue
            seen.add((s, v))
            if v in self.inputs:
                self.reads.setdefault(v, set()).add(s)
                continue
            n = self.unit_of[v]
            there = self.stage.get(n, s)
            if there == s:
                self._include(s, n, waiting)
            else:
                self.receives[s][v] = there
                waiting.append((there, v))

    def _include(self, s: int, n: int, waiting: list[tuple[int, int]]) -> None:
        if n in self.included[s]:
            return
        self.included[s].add(n)
        op = self.graph.ops[self.units[n].ops[0]]
        if op.primitive == "loop_exit" and self.units[n].kind == "leave":
            begin = next(i for i, j in self.graph.goes_round if j == self.units[n].ops[0])
            self._include(s, self.unit_of[self.graph.ops[begin].results[0]], waiting)
        waiting.extend((s, v) for v in self.outer(n))

    def _settle_leaves(self) -> None:
        """State lives where its next value is made, or where it is first read; other stages receive it. The rest is given to each."""
        self.home: dict[int, int] = {}
        tied = {self.graph.inputs[i]: o for i, o in self.carried}
        for v in self.graph.inputs:
            readers = self.reads.get(v, set())
            if v in tied:
                self.home[v] = self.owner.get(tied[v], min(readers, default=0))
                for s in readers - {self.home[v]}:
                    self.receives[s][v] = self.home[v]
        for k, o in enumerate(self.graph.outputs):
            if isinstance(o, int) and o in self.inputs:
                self.owner[k] = self.home.get(o, min(self.reads.get(o, ()), default=0))
                self.reads.setdefault(o, set()).add(self.owner[k])

    def _count_rounds(self) -> None:
        for n, unit in enumerate(self.units):
            for s in range(self.count):
                if n in self.included[s] and unit.kind in ("leave", "after"):
                    found = 0 if unit.kind == "leave" else max((self._round(s, v) for v in self.outer(n)), default=0)
                    self.rounds.update({(s, v): found for v in self.made(n)})

    def _round(self, s: int, v: int) -> int:
        """The round in which a stage has a value."""
        there = self.receives[s].get(v)
        if there is not None and v not in self.inputs:
            return self.rounds.get((there, v), 0) + 1
        return self.rounds.get((s, v), 0)

    def when(self, v: int) -> When:
        """When a value goes to other stages."""
        if v in self.inputs:
            return "before"
        return "each" if self.units[self.unit_of[v]].kind == "inside" else "after"


class _Writer:
    """Writes the graph of one stage."""

    def __init__(self, places: _Places, stage: int, in_two: bool):
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
            self.ops.append(
                replace(op, operands=operands, results=results, region=region, phase=phase, part=part, params=self._params(op))
            )

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
