"""Sums over microbatches whose terms come from several stages, added up where they come from.

The gradient of a weight that two stages read is the sum of what both make. Each stage adds up its own over the microbatches, and the sums
meet once after them, instead of one stage sending its term in each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.graph import BOUNDARY, ROOT, Graph, Op

_ADDS = frozenset({"add", "add_any"})
MIXED = -2
"""The origin of a sum of what several stages make."""
_LINEAR = frozenset({"transpose", "reshape", "squeeze", "convert_element_type", "mul", "neg"})
"""Ops that a term of a sum goes through by itself, with what no microbatch changes."""


def summed_apart(graph: Graph, loop: int, stage_of: Sequence[int]) -> Graph:
    """The graph in which no term of a sum that `loop` carries crosses from one stage to another in each microbatch."""
    while (changed := _one_apart(graph, loop, stage_of)) is not None:
        graph = changed
    return graph


def _one_apart(graph: Graph, loop: int, stage_of: Sequence[int]) -> Graph | None:
    """The graph with one sum more taken apart, if there is one."""
    for begin, end in graph.goes_round:
        if graph.ops[end].primitive == "loop_exit" and graph.ops[end].param("region") == loop:
            chain = _chain(graph, begin, end)
            if chain is not None and _crosses(graph, chain[-1], stage_of):
                return _rewritten(graph, begin, end, chain, stage_of)
    return None


def _chain(graph: Graph, begin: int, end: int) -> tuple[int, ...] | None:
    """The ops from what is carried on back to a sum of two: the one that adds to it, a cast if there is one, and the sum."""
    carried = graph.ops[begin].results[0]
    adds = graph.producer.get(graph.ops[end].inputs[0]) if graph.ops[end].inputs else None
    if adds is None or graph.ops[adds].primitive not in _ADDS or carried not in graph.ops[adds].inputs or len(graph.ops[adds].inputs) != 2:
        return None
    found = [adds]
    term = next(o for o in graph.ops[adds].inputs if o != carried) if len(set(graph.ops[adds].inputs)) == 2 else carried
    for kinds in (frozenset({"convert_element_type"}), _ADDS):
        p = graph.producer.get(term)
        if p is None or len(graph.uses.get(term, ())) != 1 or term in graph.output_values:
            return None
        if graph.ops[p].primitive in kinds:
            found.append(p)
            term = graph.ops[p].inputs[0] if graph.ops[p].inputs else term
    last = graph.ops[found[-1]]
    return tuple(found) if len(found) > 1 and last.primitive in _ADDS and len(set(last.inputs)) == 2 else None


def _crosses(graph: Graph, i: int, stage_of: Sequence[int]) -> bool:
    """Whether the terms of a sum come from different stages."""
    parts = [_origin(graph, o, stage_of)[0] for o in graph.ops[i].inputs]
    return MIXED in parts or (min(parts) >= 0 and stage_of[parts[0]] != stage_of[parts[1]])


def _origin(graph: Graph, value: int, stage_of: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The part whose work a value is, and the ops on the way here that are its own: linear ones, and sums of what comes from one stage."""
    way: list[int] = []
    while (p := graph.producer.get(value)) is not None:
        op = graph.ops[p]
        moving = [o for o in op.inputs if o not in graph.fixed_inside and graph.home(o) != ROOT]
        if any(len(graph.uses[o]) != 1 for o in moving):
            return op.part, tuple(way)
        if op.primitive in _ADDS and len(set(moving)) == 2:
            (a, first), (b, second) = (_origin(graph, o, stage_of) for o in moving)
            if min(a, b) >= 0 and stage_of[a] == stage_of[b]:
                return a, (*way, p, *first, *second)
            return (op.part if min(a, b) < 0 and MIXED not in (a, b) else MIXED), tuple(way)
        if op.primitive not in _LINEAR or len(moving) != 1:
            return op.part, tuple(way)
        way.append(p)
        value = moving[0]
    return -1, tuple(way)


def _rewritten(graph: Graph, begin: int, end: int, chain: Sequence[int], stage_of: Sequence[int]) -> Graph:
    """Two sums in place of one, added after the loop."""
    ops, avals = graph.ops, list(graph.avals)
    adds, total = ops[chain[0]], ops[chain[-1]]
    casts = [ops[i] for i in chain[1:-1]]
    first, second = total.inputs
    whole = ops[end].results[0]

    def new(like: int) -> int:
        avals.append(graph.avals[like])
        return len(avals) - 1

    def term(value: int, carried: int, part: int) -> tuple[list[Op], int]:
        """The ops that add one operand of the sum to what is carried."""
        made: list[Op] = []
        for cast in casts:
            avals.append(graph.avals[cast.results[0]])
            made.append(replace(cast, operands=(value,), results=(len(avals) - 1,), part=part))
            value = len(avals) - 1
        so_far = new(adds.results[0])
        old = ops[begin].results[0]
        operands = tuple(carried if o == old else value for o in adds.operands)
        made.append(replace(adds, operands=operands, results=(so_far,), part=part))
        return made, so_far

    origins = [_origin(graph, o, stage_of) for o in (first, second)]
    parts = [total.part if part == MIXED else part for part, _ in origins]
    place = 1 + max(int(op.param("position")) for op in ops if op.primitive in BOUNDARY and op.param("position") is not None)
    again = new(ops[begin].results[0])
    mine, theirs = term(first, ops[begin].results[0], parts[0]), term(second, again, parts[1])
    sums = new(whole), new(whole)
    params = tuple((name, place if name == "position" else value) for name, value in ops[begin].params)
    instead: dict[int, list[Op]] = {
        begin: [ops[begin], replace(ops[begin], params=params, results=(again,))],
        chain[0]: [*mine[0], *theirs[0]],
        end: [
            replace(ops[end], operands=(mine[1],), results=(sums[0],)),
            replace(ops[end], params=params, operands=(theirs[1],), results=(sums[1],)),
        ],
        **{i: [] for i in chain[1:]},
        **{i: [replace(ops[i], part=part)] for part, way in origins for i in way},
    }
    last = graph.spans[int(ops[end].param("region"))][1]
    together = replace(adds, operands=sums, results=(whole,), region=ops[end].region)
    written: list[Op] = []
    for i, op in enumerate(ops):
        written += instead.get(i, [op])
        if i == last:
            written.append(together)
    return replace(graph, avals=tuple(avals), ops=tuple(written))
