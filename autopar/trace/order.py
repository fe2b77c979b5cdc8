"""The order of a graph's ops: phases, what sinks to its reader, what is dropped, and updates leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import BOUNDARY, ROOT, Graph, Op, Operand, Phase


def arrange(graph: Graph) -> Graph:
    """Phases set, dead ops dropped, the rest in the order that memory is counted in, values numbered by it."""
    return compact(_order_updates(_sink(live(_phases(graph)))))


def _phases(graph: Graph) -> Graph:
    """Forward is what backward is computed from, and what nothing else needs; what depends on backward, or only feeds that, is the update.

    Scaling the old moments needs no gradient, yet belongs to the update.
    """
    groups = units(graph)
    backward = [any(op.phase == "backward" for op in unit) for unit in groups]
    feeds = _ancestors(groups, backward)
    late: set[int] = set()
    depends = []
    for unit, b in zip(groups, backward, strict=True):
        depends.append(b or any(o in late for op in unit for o in op.inputs))
        late.update(r for op in unit if depends[-1] for r in op.results)
    updates = _ancestors(groups, [d and not b and not f for d, b, f in zip(depends, backward, feeds, strict=True)])
    ops: list[Op] = []
    made: set[int] = set()
    for unit, b, feeds_backward, update in zip(groups, backward, feeds, updates, strict=True):
        after = update or any(o in made for op in unit for o in op.inputs)  # what reads an update's result comes after it
        phase: Phase = "backward" if b else "update" if after and not feeds_backward else "forward"
        made.update(r for op in unit if phase == "update" for r in op.results)
        ops.extend(op if phase == op.phase else replace(op, phase=phase) for op in unit)
    return replace(graph, ops=tuple(ops))


def units(graph: Graph) -> list[tuple[Op, ...]]:
    """The program's ops in groups that stay together: an op by itself, or an outermost region with what enters and leaves it."""
    found: list[tuple[Op, ...]] = []
    ends = {last: first for r, (first, last) in graph.spans.items() if graph.regions[r].parent == ROOT}
    inside = {i for last, first in ends.items() for i in range(first, last)}
    for i, op in enumerate(graph.ops):
        if i in ends:
            found.append(graph.ops[ends[i] : i + 1])
        elif i not in inside:
            found.append((op,))
    return found


# Ops that a compiler computes again where they are used rather than keep their result from forward to backward.
_CHEAP = frozenset(
    "add sub mul neg div square integer_pow eq ne ge gt le lt and or not select_n convert_element_type broadcast_in_dim "
    "reshape squeeze transpose max min copy".split()
)


def _sink(graph: Graph) -> Graph:
    """Cheap forward ops that only backward reads move to just before their first reader, where their operands live on anyway."""
    users: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for o in op.inputs:
            users.setdefault(o, []).append(i)
    outputs, inputs = graph.output_values, set(graph.inputs)
    place = list(range(len(graph.ops)))
    starts = [i - k for i, k in enumerate(k for unit in units(graph) for k in range(len(unit)))]
    phases = [op.phase for op in graph.ops]

    def stays(value: int, i: int) -> bool:
        """Whether a value is kept for backward whatever happens to op i."""
        small = graph.avals[value].size * 8 <= graph.avals[graph.ops[i].results[0]].size
        return small or value in inputs or any(phases[u] != "forward" for u in users[value] if u != i)

    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if phases[i] != "forward" or op.primitive not in _CHEAP or op.region != ROOT or op.effects or any(r in outputs for r in op.results):
            continue
        readers = [u for r in op.results for u in users.get(r, ())]
        if readers and all(phases[u] != "forward" for u in readers) and all(stays(o, i) for o in op.inputs):
            place[i] = min(place[starts[u]] for u in readers)
            phases[i] = "backward" if any(phases[u] == "backward" for u in readers) else "update"
    order = sorted(range(len(graph.ops)), key=lambda i: (place[i], i))
    return replace(graph, ops=tuple(replace(graph.ops[i], phase=phases[i]) for i in order))


def _ancestors(groups: Sequence[tuple[Op, ...]], chosen: Sequence[bool]) -> list[bool]:
    """Per unit: whether it is chosen, or a chosen one needs its results."""
    needed: set[int] = set()
    found = [False] * len(groups)
    for i in range(len(groups) - 1, -1, -1):
        if chosen[i] or any(r in needed for op in groups[i] for r in op.results):
            found[i] = True
            needed.update(o for op in groups[i] for o in op.inputs)
    return found


def live(graph: Graph) -> Graph:
    """Without ops whose results nobody uses, and without what a loop carries round for itself alone."""
    makes = {r: i for i, op in enumerate(graph.ops) for r in op.results}
    partner = {i: j for pair in graph.goes_round for i, j in (pair, pair[::-1]) if graph.ops[pair[1]].primitive == "loop_exit"}
    tests: dict[int, int] = {_loop(graph, op): i for i, op in enumerate(graph.ops) if op.primitive == "loop_test"}
    found: set[int] = set()
    waiting = [makes[o] for o in graph.outputs if isinstance(o, int) and o in makes] + [i for i, op in enumerate(graph.ops) if op.effects]
    while waiting:
        i = waiting.pop()
        if i in found:
            continue
        found.add(i)
        op = graph.ops[i]
        waiting.extend(makes[o] for o in op.inputs if o in makes)
        waiting.extend([partner[i]] if i in partner else [])
        around = graph.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region)
        waiting.extend(tests[r] for r in around if r in tests)
    return replace(graph, ops=tuple(op for i, op in enumerate(graph.ops) if i in found))


def _loop(graph: Graph, op: Op) -> int:
    """The loop whose predicate an op gives."""
    return graph.regions[int(op.param("region"))].parent


def _order_updates(graph: Graph) -> Graph:
    """Update ops depth first from each output: one leaf's update ends before the next one's begins.

    `tree_map` writes them level by level, which would keep every leaf's temporaries alive at once.
    """
    groups = units(graph)
    updates = {r: unit for unit in groups if unit[0].phase == "update" for op in unit for r in op.results}
    if any(op.effects for unit in updates.values() for op in unit):
        return graph
    ordered: list[Op] = []
    done: set[int] = set()
    stack: list[tuple[Operand, bool]] = [(o, False) for o in reversed(graph.outputs)]
    while stack:
        value, ready = stack.pop()
        unit = updates.get(value) if isinstance(value, int) else None
        if unit is None or id(unit) in done:
            continue
        if ready:
            done.add(id(unit))
            ordered.extend(unit)
        else:
            stack.append((value, True))
            stack.extend((o, False) for op in reversed(unit) for o in reversed(op.inputs) if updates.get(o) is not unit)
    return replace(graph, ops=tuple(op for unit in groups if unit[0].phase != "update" for op in unit) + tuple(ordered))


def compact(graph: Graph) -> Graph:
    """Values renumbered in order of definition."""
    return renumbered(graph)[0]


def renumbered(graph: Graph) -> tuple[Graph, dict[int, int]]:
    """The same, with the new number of each value."""
    number: dict[int, int] = {v: i for i, v in enumerate(graph.inputs)}
    for op in graph.ops:
        for r in op.results:
            number[r] = len(number)

    def new(o: Operand) -> Operand:
        return number[o] if isinstance(o, int) else o

    ops = tuple(
        replace(op, operands=tuple(map(new, op.operands)), results=tuple(number[r] for r in op.results)) for op in graph.ops
    )
    old = sorted(number, key=number.__getitem__)
    avals, outputs = tuple(graph.avals[v] for v in old), tuple(map(new, graph.outputs))
    return replace(graph, avals=avals, inputs=tuple(range(len(graph.inputs))), outputs=outputs, ops=ops), number
