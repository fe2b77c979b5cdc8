"""Which stage runs which ops of a step, and which values go from one stage to another.

Forward goes on where its operands are or later, backward where its cotangents come from or earlier: no stage waits for one that waits for
it. What depends on no batch is made by each stage that reads it. State lives on the stage that makes its next value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.ir.graph import BOUNDARY, ENTERING, LEAVING, ROOT, Graph
from autopar.trace.order import units

SMALL = 64
"""Elements of a value that stages make for themselves, each, rather than send, where it depends on the microbatch's number alone."""

When = Literal["before", "each", "after"]
"""When a value goes to other stages: before the microbatches, in each of them, or after them."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that stay together: `kind` is `before`, `enter`, `inside`, `leave` or `after`."""

    kind: str
    ops: tuple[int, ...]


@dataclass
class Places:
    """Where each op of the whole graph runs, and who needs which values."""

    graph: Graph
    loop: int
    carried: Sequence[tuple[int, int]]
    stage_of: tuple[int, ...]
    units: list[Unit] = field(default_factory=list)
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
                self.units.append(Unit("before" if here[0] < first else "after", here))
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
                self.units.append(Unit("inside", tuple(group)))
                group = []
            around = region
            if region != ROOT:
                group.append(i)
                continue
            kind = "enter" if op.primitive in ENTERING else "leave" if op.primitive in LEAVING else "inside"
            self.units.append(Unit(kind, (i,)))
        if group:
            self.units.append(Unit("inside", tuple(group)))

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
        """The units that each stage runs for itself: what depends on no batch, before or after, and what spreads a number after; in the
        loop what depends on nothing but the microbatch's number and single numbers from outside, if it is small or free."""
        graph, found = self.graph, set[int]()
        known = set(graph.inputs)
        for n, unit in enumerate(self.units):
            ops = [graph.ops[i] for i in unit.ops]
            pure = not any(op.effects for op in ops)
            if unit.kind == "before" and pure:
                found.add(n)
                known.update(self.made(n))
            elif unit.kind == "after" and pure and all(v in known for v in self.outer(n)) and not self._has_place(n):
                found.add(n)
                known.update(self.made(n))
            elif unit.kind == "after" and pure and self._spreads_a_number(n):
                found.add(n)
            elif unit.kind == "inside" and pure and all(self._is_plain(v, found) for v in self.outer(n)):
                made = self.made(n)
                if all(v in graph.free for v in made) or sum(graph.avals[v].size for v in made) <= SMALL:
                    found.add(n)
        return found

    def _spreads_a_number(self, n: int) -> bool:
        """Whether a unit makes an array of a number: the number is less to send."""
        ops = [self.graph.ops[i] for i in self.units[n].ops]
        if ops[0].primitive != "broadcast_in_dim" or not self.graph.output_values.isdisjoint(self.made(n)):
            return False
        return all(self.graph.aval(o).size == 1 for o in ops[0].operands)

    def _has_place(self, n: int) -> bool:
        """Whether a unit makes what the step gives back, or less of a layer's own state than that is: each has one place."""
        if not self.graph.output_values.isdisjoint(self.made(n)):
            return True
        read, made = (sum(self.graph.avals[v].size for v in values) for values in (self.outer(n), self.made(n)))
        return read > max(made, SMALL) and any(self.graph.ops[i].part >= 0 for i in self.units[n].ops)

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
            begin = self.graph.begins[self.units[n].ops[0]]
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
