"""Values made again after forward rather than kept for it: forward's ops once more, just before their first late reader.

What the repeated ops read of forward comes through *gates*, identities that a compiler cannot see through (`emit/gate.py`): so
it neither merges an op with its first run nor starts it before the backward pass is there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import BOUNDARY, GATE, ROOT, Graph, Op, Operand
from autopar.trace.order import compact, live, renumbered


def repeatable(graph: Graph) -> frozenset[int]:
    """The values that can be made again: results of forward's pure ops where backward follows, but for those that depend on no input."""
    home = home_of_backward(graph)
    return frozenset(r for op in graph.ops if op.region == home and _pure(op) for r in op.results if r not in graph.free)


def home_of_backward(graph: Graph) -> int:
    """The region in which forward is followed by backward: the loop over microbatches, or the program itself."""
    phases: dict[int, set[str]] = {}
    for op in graph.ops:
        if op.region != ROOT and op.primitive not in BOUNDARY:
            phases.setdefault(op.region, set()).add(op.phase)
    return next((r for r, found in phases.items() if found >= {"forward", "backward"}), ROOT)


def _pure(op: Op) -> bool:
    return op.phase == "forward" and not (op.effects or op.primitive in BOUNDARY)


def recompute(graph: Graph, values: Collection[int]) -> Graph:
    """The graph in which backward and update read `values` as made again, from the inputs and those forward values that are not among them.

    Values that no late op needs are not made again, and what only late ops need is made there alone. `values` are canonical, as
    `repeatable` gives them; so is the result.
    """
    if not values:
        return graph
    return compact(live(_Rewriter(graph, frozenset(values)).graph()))


@dataclass(frozen=True)
class Doubled:
    """A graph in which everything that can be made again is.

    `twin` maps a value of `graph` to itself made again, `origin` what is made again to its number in the graph that this one came
    from. `added` are the ops that came in: each of them can be left out where its readers read the first value instead. `idle` are the
    forward ops that nobody needs where all of it is made again.
    """

    graph: Graph
    twin: Mapping[int, int]
    origin: Mapping[int, int]
    added: frozenset[int]
    idle: frozenset[int]


def doubled(graph: Graph, kept: Collection[int] = ()) -> Doubled:
    """The graph with every value of forward that a later op needs made again, but for those that are always kept."""
    rewriter = _Rewriter(graph, repeatable(graph).difference(kept))
    new, number = renumbered(rewriter.graph())
    twin = {number[v]: number[w] for v, w in rewriter.twin.items()}
    fresh = {number[w] for w in (*rewriter.twin.values(), *rewriter.gates.values())}
    added = frozenset(i for i, op in enumerate(new.ops) if any(r in fresh for r in op.results))
    needed = {op.results for op in live(new).ops}
    idle = frozenset(i for i, op in enumerate(new.ops) if op.phase == "forward" and op.results not in needed)
    return Doubled(new, twin, {number[w]: v for v, w in rewriter.twin.items()}, added, idle)


def recomputed_ops(graph: Graph) -> tuple[int, ...]:
    """The ops that are there for the second time, gates left out."""
    return tuple(i for i, op in enumerate(graph.ops) if op.again and op.primitive != GATE)


class _Rewriter:
    def __init__(self, old: Graph, values: frozenset[int]):
        self.old, self.ops = old, old.ops
        self.again = {old.producer[v] for v in values}
        self.avals = list(old.avals)
        self.twin: dict[int, int] = {}
        self.gates: dict[int, int] = {}
        self.place: dict[int, int] = {}
        self.home = home_of_backward(old)
        self.starts = [self._start(i, op) for i, op in enumerate(old.ops)]

    def graph(self) -> Graph:
        self._find_places()
        for i in sorted(self.place):
            for r in self.ops[i].results:
                self.twin[r] = self._new(r)
        placed: list[tuple[tuple[int, int, int], Op]] = []
        for i in sorted(self.place):
            at = self.place[i]
            for o in self.ops[i].inputs:
                if self._needs_gate(o):
                    self.gates[o] = self._new(o)
                    where = self._gate_place(o)
                    placed.append(((*where, 0), self._gate(o, self.ops[where[0]], i)))
            op = self.ops[i]
            results = tuple(self.twin[r] for r in op.results)
            reader, operands = self.ops[at], tuple(map(self._read, op.operands))
            again = replace(op, operands=operands, results=results, phase=reader.phase, again=True, part=reader.part)
            placed.append(((at, i, 1), again))
        for i, op in enumerate(self.ops):
            late = op.phase != "forward" and not self._leaves(op)
            placed.append(((i, len(self.ops), 0), replace(op, operands=tuple(map(self._late, op.operands))) if late else op))
        return replace(self.old, avals=tuple(self.avals), ops=tuple(op for _, op in sorted(placed, key=lambda p: p[0])))

    def _start(self, i: int, op: Op) -> int:
        """The first op of the loop or branch, next inside of where ops are made again, to which op i belongs; itself if there is none."""
        path = self.old.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region)
        inside = path[path.index(self.home) + 1 :] if self.home in path else path
        return self.old.spans[inside[0]][0] if inside else i

    def _leaves(self, op: Op) -> bool:
        """Whether an op brings values out of where ops are made again."""
        return op.primitive in BOUNDARY and op.param("region") == self.home

    def _find_places(self) -> None:
        """For each op that is made again, the op that it comes just before: its first late reader, or that of what is made of it."""
        for i in range(len(self.ops) - 1, -1, -1):
            if i not in self.again:
                continue
            found = []
            for r in self.ops[i].results:
                for u, _ in self.old.uses.get(r, ()):
                    if self.ops[u].phase != "forward" and not self._leaves(self.ops[u]):
                        found.append(self.starts[u])
                    elif u in self.place:
                        found.append(self.place[u])
            if found:
                self.place[i] = min(found)

    def _needs_gate(self, o: int) -> bool:
        return o not in self.gates and o not in self.twin and o not in self.old.free

    def _gate_place(self, o: int) -> tuple[int, int]:
        """Just before the first op made again that reads it."""
        return min((self.place[u], u) for u, _ in self.old.uses[o] if u in self.place)

    def _gate(self, o: int, at: Op, reader: int) -> Op:
        """The gate of a value that `reader` reads when it is made again, just before `at`."""
        op = self.ops[reader]
        return Op(GATE, (), (o,), (self.gates[o],), at.phase, op.scope, op.source, region=op.region, again=True, part=at.part)

    def _new(self, like: int) -> int:
        self.avals.append(self.old.avals[like])
        return len(self.avals) - 1

    def _read(self, o: Operand) -> Operand:
        """An operand of an op that is made again."""
        return self.twin.get(o, self.gates.get(o, o)) if isinstance(o, int) else o

    def _late(self, o: Operand) -> Operand:
        """An operand of an op that comes after forward."""
        return self.twin.get(o, o) if isinstance(o, int) else o
