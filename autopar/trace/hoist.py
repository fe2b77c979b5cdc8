"""What a loop would make again and again the same is made once before it, as every compiler does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.ir.graph import BOUNDARY, ENTERING, GATE, ROOT, Aval, Constant, Graph, Op, Operand

_LOOPS = ("scan", "while")
Spread = Callable[[Aval, tuple[int, ...], tuple[int, ...], int], int]


def hoist(graph: Graph, spread: Spread) -> Graph:
    """The graph with values that no iteration changes made before their loops.

    Carried values that stay what they were are read from outside, slices of a broadcast along the loop are the broadcast without it,
    and ops on nothing but outer values move out. Ops that no input feeds stay: they cost less than keeping them.
    `spread(aval, shape, dimensions, like)` adds an equation that broadcasts, with the literals of another, and returns its number.
    """
    if not graph.regions:
        return graph
    graph = _without_constant_carries(_without_idle_branches(graph))
    graph = _without_equal_slices(graph, spread)
    return _counted(_moved_out(graph))


def _counted(graph: Graph) -> Graph:
    """`while` loops that count from one literal to another know how often they run, as compilers find out."""
    found = {}
    for op in graph.ops:
        if op.primitive == "loop_test" and (times := _trips(graph, op)) is not None:
            found[graph.regions[op.param("region")].parent] = times
    regions = tuple(replace(r, times=found.get(n, r.times)) for n, r in enumerate(graph.regions))
    return replace(graph, regions=regions) if found else graph


def _trips(graph: Graph, test: Op) -> int | None:
    """How often a loop runs whose test is `n < limit` or `n <= limit` and whose body adds a literal to n; at least once."""
    compares = graph.ops[graph.producer[test.inputs[0]]] if test.inputs and test.inputs[0] in graph.producer else None
    if compares is None or compares.primitive not in ("lt", "le") or not isinstance(compares.operands[0], int):
        return None
    view = graph.ops[graph.producer.get(compares.operands[0], -1)]
    begins = {graph.ops[i].results[0]: (graph.ops[i], graph.ops[j]) for i, j in graph.goes_round if graph.ops[j].primitive == "loop_exit"}
    if view.primitive != "loop_view" or view.operands[0] not in begins:
        return None
    enters, leaves = begins[view.operands[0]]
    step = graph.ops[graph.producer[leaves.inputs[0]]] if leaves.inputs and leaves.inputs[0] in graph.producer else None
    if step is None or step.primitive != "add" or step.operands[0] != enters.results[0]:
        return None
    start, by, limit = (_integer(o) for o in (enters.operands[0], step.operands[1], compares.operands[1]))
    if start is None or by is None or limit is None or by <= 0:
        return None
    limit += compares.primitive == "le"
    return max(1, -(-(limit - start) // by))


def _integer(operand: Operand) -> int | None:
    """The whole number that a literal is."""
    text = operand.text if isinstance(operand, Constant) and operand.aval.dtype.startswith(("int", "uint")) else ""
    return int(text) if text.lstrip("-").isdigit() else None


def _without_idle_branches(graph: Graph) -> Graph:
    """Branches whose joins are gone, since it is known which is taken, stand in the region around them; what is not taken is dead."""
    joined = {op.param("region") for op in graph.ops if op.primitive == "branch_join"}
    outer = {r: graph.regions[b.parent].parent for r, b in enumerate(graph.regions) if b.kind == "branch" and b.parent not in joined}
    if not outer:
        return graph

    def now(region: int) -> int:
        while region in outer:
            region = outer[region]
        return region

    regions = tuple(replace(r, parent=now(r.parent)) for r in graph.regions)
    return replace(graph, ops=tuple(replace(op, region=now(op.region)) for op in graph.ops), regions=regions)


def _without_constant_carries(graph: Graph) -> Graph:
    same: dict[int, Operand] = {}
    gone: set[int] = set()

    def now(o: Operand) -> Operand:
        while isinstance(o, int) and o in same:
            o = same[o]
        return o

    for i, j in graph.goes_round:
        enters, leaves = graph.ops[i], graph.ops[j]
        if leaves.primitive == "loop_exit" and leaves.operands[0] == enters.results[0] and isinstance(enters.operands[0], int):
            if graph.avals[enters.operands[0]] == graph.avals[enters.results[0]] == graph.avals[leaves.results[0]]:
                same[enters.results[0]] = same[leaves.results[0]] = enters.operands[0]
                gone |= {i, j}
    if not gone:
        return graph
    for j, op in enumerate(graph.ops):
        if op.primitive == "loop_view" and op.operands[0] in same:
            same[op.results[0]] = op.operands[0]
            gone.add(j)
    kept = (replace(op, operands=tuple(map(now, op.operands))) for i, op in enumerate(graph.ops) if i not in gone)
    return replace(graph, ops=tuple(kept), outputs=tuple(map(now, graph.outputs)))


def _without_equal_slices(graph: Graph, spread: Spread) -> Graph:
    ops: list[Op] = []
    changed = False
    for op in graph.ops:
        p = graph.producer.get(op.operands[0]) if op.primitive == "loop_slice" and isinstance(op.operands[0], int) else None
        wide = graph.ops[p] if p is not None else None
        if wide is None or wide.primitive != "broadcast_in_dim":
            ops.append(op)
            continue
        dims = tuple(wide.param("broadcast_dimensions"))
        if 0 in dims:
            ops.append(op)
            continue
        changed = True
        shape, narrower = graph.avals[op.results[0]].shape, tuple(d - 1 for d in dims)
        before = graph.aval(wide.operands[0])
        equation = spread(before, shape, narrower, wide.equation)
        spreads = before.shape != shape
        params = (("broadcast_dimensions", narrower), ("shape", shape), ("sharding", None)) if spreads else ()
        name = "broadcast_in_dim" if spreads else "copy"
        ops.append(replace(wide, primitive=name, params=params, results=op.results, equation=equation, region=op.region, phase=op.phase))
    return grouped(replace(graph, ops=tuple(ops))) if changed else graph


def _moved_out(graph: Graph) -> Graph:
    """Ops whose operands all stand outside of their loop, with what they need, placed in its parent."""
    region = {i: op.region for i, op in enumerate(graph.ops)}
    home = {v: graph.home(v) for v in range(len(graph.avals))}
    fed = {r for op in graph.ops if not any(r in graph.free for r in op.results) for r in op.results}

    def leave(i: int, r: int) -> None:
        parent = graph.regions[r].parent
        region[i] = parent
        home.update((v, parent) for v in graph.ops[i].results)
        for o in graph.ops[i].inputs:
            if home[o] == r:
                leave(graph.producer[o], r)

    for i, op in enumerate(graph.ops):
        while region[i] != ROOT and op.primitive not in BOUNDARY and op.primitive != GATE and not op.effects:
            r = region[i]
            values = [o for o in op.inputs if home[o] == r]
            fixed = op.inputs and any(o in fed or o in graph.inputs for o in op.inputs) and all(o in graph.free for o in values)
            if graph.regions[r].kind not in _LOOPS or not fixed:
                break
            leave(i, r)
    if all(region[i] == op.region for i, op in enumerate(graph.ops)):
        return graph
    return grouped(replace(graph, ops=tuple(replace(op, region=region[i]) for i, op in enumerate(graph.ops))))


def grouped(graph: Graph) -> Graph:
    """Ops of a region together again: what stands outside of it, though written within, comes before it."""
    order: list[Op] = []
    _place(graph, ROOT, graph.ops, order)
    return replace(graph, ops=tuple(order))


def _place(graph: Graph, region: int, ops: Sequence[Op], order: list[Op]) -> None:
    """Append ops that all stand in `region` or further inside."""
    depth = len(graph.path(region))
    inner: dict[int, list[Op]] = {}
    last: dict[int, int] = {}
    within = []
    for n, op in enumerate(ops):
        path = graph.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region)
        r = path[depth] if len(path) > depth else ROOT
        within.append(r)
        if r != ROOT:
            inner.setdefault(r, []).append(op)
            last[r] = n
    for n, op in enumerate(ops):
        r = within[n]
        if r == ROOT:
            order.append(op)
        elif last[r] == n:
            _inside(graph, r, inner[r], order)


def _inside(graph: Graph, region: int, ops: Sequence[Op], order: list[Op]) -> None:
    """Append a region: what enters, what stands in it, what leaves."""
    ports = [op.primitive in BOUNDARY and op.param("region") == region for op in ops]
    enters = [op for op, port in zip(ops, ports, strict=True) if port and op.primitive in ENTERING]
    leaves = [op for op, port in zip(ops, ports, strict=True) if port and op.primitive not in ENTERING]
    order.extend(enters)
    _place(graph, region, [op for op, port in zip(ops, ports, strict=True) if not port], order)
    order.extend(leaves)
