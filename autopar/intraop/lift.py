"""From a solver's answer back to a plan: a strategy for every op, a tree of moves for every value."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace

from autopar.intraop.connect import fed_by_state, number
from autopar.intraop.enumerate import Layout
from autopar.intraop.networks import EARLY, LATE, Member, Network, Opening
from autopar.ir.graph import Constant, Graph
from autopar.ir.plan import PlannedMove, ShardingPlan
from autopar.ir.problem import Solution
from autopar.ir.sharding import Move, TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, operand_sharding

_Form = tuple[int, int]


def lift(layout: Layout, solution: Solution) -> ShardingPlan:
    """The plan that a solution means, unfolded."""
    graph, shape = layout.shape.graph, layout.shape
    strategies: list[Strategy] = [WHOLE] * len(graph.ops)
    for i, c in shape.cluster_of.items():
        node = shape.folded.class_of[c]
        strategies[i] = layout.spaces[node].strategy(shape.position[i], solution.choice[node])
    inputs = [_input(layout, solution, v) for v in graph.inputs]
    outputs = [_output(layout, solution, k, o, inputs) for k, o in enumerate(graph.outputs)]
    moves: list[PlannedMove] = []
    made: dict[int, set[tuple[TensorSharding, int]]] = {}
    state_fed = fed_by_state(graph, shape.carried)
    again: set[tuple[int, int, int]] = set()
    for network, openings in zip(layout.networks, layout.openings, strict=True):
        found, late, kept = _trees(network, openings, solution)
        for member in network.members:
            planned = _planned(graph, network, member, found, kept, member.value in state_fed)
            shift = _shift(planned, made.setdefault(member.value, set()))
            base = network.made(solution.choice)
            moves.extend(_shifted(graph, m, shift, member, base) for m in planned)
            made[member.value].update((m.target, m.generation + shift) for m in planned)
            again.update((i, k, 1 + shift) for n in late for i, k in member.uses[n])
            if shift:
                again.update((i, k, shift) for n in _converted(network, solution) if n not in late for i, k in member.uses[n])
    moves.extend(_free_moves(layout, strategies, outputs))
    return ShardingPlan(layout.mesh, tuple(strategies), tuple(inputs), tuple(outputs), number(moves), frozenset(again))


def _input(layout: Layout, solution: Solution, v: int) -> TensorSharding:
    if v in layout.shape.member_input:
        cluster, n = layout.shape.member_input[v]
        node = layout.shape.folded.class_of[cluster]
        return layout.spaces[node].input(n)[solution.choice[node]]
    node = layout.input_node[v]
    return layout.borders[node][solution.choice[node]]


def _output(layout: Layout, solution: Solution, k: int, o: int | Constant, inputs: Sequence[TensorSharding]) -> TensorSharding:
    for i, out in layout.shape.carried:
        if out == k:
            return inputs[i]
    if k in layout.output_node:
        node = layout.output_node[k]
        return layout.borders[node][solution.choice[node]]
    return TensorSharding.replicated(layout.shape.graph.aval(o).ndim)


def _trees(
    network: Network, openings: Sequence[Opening], solution: Solution
) -> tuple[list[tuple[Opening, _Form, _Form]], list[int], set[int]]:
    """The moves taken, as (opening, from form, to form) with forms (generation, state), users that read generation 1, states kept.

    A form made late although the same form was made early is of generation 1; all others are of generation 0.
    """
    start = network.graph.index[network.made(solution.choice)]
    two = network.layers == 2
    goals = {n: (u.layer if two else EARLY, network.graph.index[network.needed(n, solution.choice)]) for n, u in enumerate(network.users)}
    back = _search((EARLY, start), [o for o in openings if solution.side[o.column] > 0.5])
    taken: dict[_Form, Opening] = {}
    for goal in goals.values():
        here = goal
        while here != (EARLY, start) and here not in taken:
            taken[here] = back[here]
            here = _tail(back[here])
    made_early = {s for (layer, s) in taken if layer == EARLY} | {start}
    kept = {node[1] for node, o in taken.items() if o.arc is None}
    return (*_generations(taken, goals, made_early), kept)


def _tail(opening: Opening) -> _Form:
    return (EARLY, opening.head) if opening.arc is None else (opening.layer, opening.arc.tail)


def _search(start: _Form, openings: Sequence[Opening]) -> dict[_Form, Opening]:
    """Breadth first over open arcs: how each form is reached with the fewest moves."""
    leaving: dict[_Form, list[Opening]] = {}
    for o in openings:
        leaving.setdefault(_tail(o), []).append(o)
    back: dict[_Form, Opening] = {}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for o in leaving.get(here, ()):
            there = (LATE if o.arc is None else o.layer, o.head)
            if there not in back and there != start:
                back[there] = o
                queue.append(there)
    return back


def _generations(
    taken: dict[_Form, Opening], goals: dict[int, _Form], made_early: set[int]
) -> tuple[list[tuple[Opening, _Form, _Form]], list[int]]:
    def form(node: _Form) -> _Form:
        """(generation, state) of a form in a layer: what was waited for keeps its own."""
        layer, state = node
        if layer == EARLY:
            return 0, state
        opening = taken.get(node)
        if opening is None or opening.arc is None:
            return 0, state
        return (1 if state in made_early else 0), state

    steps = [(o, form(_tail(o)), form(node)) for node, o in taken.items() if o.arc is not None]
    return steps, [n for n, goal in goals.items() if form(goal)[0] == 1]


def _planned(
    graph: Graph, network: Network, member: Member, steps: Sequence[tuple[Opening, _Form, _Form]], kept: Set[int], early: bool
) -> list[PlannedMove]:
    """The moves of one value. Those that start from the value as it was made wait at a gate where a compiler would do them too soon:
    what is made again, for a value that nothing but state feeds (`early`), what is not kept from forward to backward, and what is made in
    each iteration of a loop although its source does not change.
    """
    states = network.graph.states
    fixed = member.value in graph.fixed_inside
    found = []
    for opening, (source_generation, tail), (generation, head) in steps:
        assert opening.arc is not None
        again = generation == 1 and source_generation == 0
        late = opening.layer == LATE and network.layers == 2
        hasty = opening.arc.move.communicates and generation == 0 and (fixed or (early and (late or head not in kept)))
        gate = _gate(graph, member, late) if again or hasty else -1
        found.append(PlannedMove(member.value, opening.arc.move, states[tail], states[head], "", generation, source_generation, gate))
    return found


def _shift(planned: Sequence[PlannedMove], made: set[tuple[TensorSharding, int]]) -> int:
    """By how many generations these moves must come later than those of the value's other users, which make the same forms."""
    clash = any((m.target, g) in made for m in planned for g in (0, 1))
    return 2 if clash else 0


def _shifted(graph: Graph, m: PlannedMove, shift: int, member: Member, base: TensorSharding) -> PlannedMove:
    if not shift:
        return m
    start = m.source == base and m.source_generation == 0
    return replace(
        m,
        generation=m.generation + shift,
        source_generation=0 if start else m.source_generation + shift,
        gate=_gate(graph, member) if start else m.gate,
    )


def _converted(network: Network, solution: Solution) -> list[int]:
    """Users that read another sharding than the value's own."""
    start = network.made(solution.choice)
    return [n for n in range(len(network.users)) if network.needed(n, solution.choice) != start]


def _gate(graph: Graph, member: Member, late: bool = True) -> int:
    """The first forward or the first later op that reads the value beside another one: what must not be early waits for that operand."""
    readers = sorted(i for uses in member.uses for i, _ in uses if i < len(graph.ops) and (graph.ops[i].phase != "forward") == late)
    for i in readers:
        if any(o != member.value and o not in graph.unmoved and graph.avals[o].size for o in graph.ops[i].inputs):
            return i
    return readers[0] if readers and member.value in graph.fixed_inside else -1


def _free_moves(layout: Layout, strategies: Sequence[Strategy], outputs: Sequence[TensorSharding]) -> list[PlannedMove]:
    """Slices of the values that depend on no input: they are made whole everywhere, and cut where needed at no cost."""
    graph = layout.shape.graph
    found: dict[tuple[int, TensorSharding], list[PlannedMove]] = {}
    for i, op in enumerate(graph.ops):
        for k, o in enumerate(op.operands):
            if isinstance(o, int) and o in graph.free and i in layout.shape.cluster_of:
                target = operand_sharding(layout.shape.rules[i], strategies[i], k)
                if (o, target) not in found:
                    found[o, target] = cuts_to(o, target, graph.avals[o].ndim)
    return [m for ms in _without_repeats(found.values()) for m in ms]


def _without_repeats(groups: object) -> list[list[PlannedMove]]:
    seen: set[tuple[int, TensorSharding]] = set()
    kept = []
    for moves in groups:  # type: ignore[attr-defined]
        fresh = [m for m in moves if (m.value, m.target) not in seen]
        seen.update((m.value, m.target) for m in fresh)
        kept.append(fresh)
    return kept


def cuts_to(value: int, target: TensorSharding, ndim: int) -> list[PlannedMove]:
    """Slices from replicated to `target`, one axis at a time."""
    here, moves = TensorSharding.replicated(ndim), []
    steps = [Move("slice", (a,), d) for d, axes in enumerate(target.dims) for a in axes]
    steps += [Move("to_partial", (a,), reduction=kind) for a, kind in target.partial]
    for move in steps:
        there = move.apply(here)
        moves.append(PlannedMove(value, move, here, there))
        here = there
    return moves
