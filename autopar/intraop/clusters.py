"""Rigid merge: ops that must lie alike become one cluster, so that the programme has one choice for all of them.

Two kinds of cluster hold several ops. A *rigid* one joins ops that keep their operand's size (element-wise ops, transposes,
full reshapes, casts): a conversion between them would gain nothing. A *linear* one joins a tree of additions with the linear
ops on its branches, where partial sums may pass. Ops are never merged through a smaller operand: scalars would glue everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import MATMULS, Graph, Op
from autopar.ir.rule import ShardingRule

_NEVER = MATMULS | {"gather", "scatter-add", "scatter", "sort", "top_k", "optimization_barrier", "pin", "rng_bit_generator"}
_NEVER |= {"loop_test", "branch_join", "loop_read"}
_JOINS = frozenset({"add", "add_any", "sub"})
_BRANCHES = frozenset({"transpose", "reshape", "convert_element_type", "neg", "squeeze", "expand_dims", "mul", "div", "copy"})


@dataclass(frozen=True)
class Cluster:
    """Ops by index in program order, and the graph inputs that lie with them. `linear` clusters can be partial."""

    ops: tuple[int, ...]
    inputs: tuple[int, ...] = ()
    linear: bool = False


def is_elementwise(rule: ShardingRule) -> bool:
    """Every operand dimension is the result's at that position, or of size one, or the operand is a scalar."""
    if not rule.results or any(r != rule.results[0] for r in rule.results) or rule.methods:
        return False
    result = rule.results[0]
    return all(len(o) in (0, len(result)) and all(d in ((), result[i]) for i, d in enumerate(o)) for o in rule.operands)


def factor_set(dims: Sequence[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(f for d in dims for f in d)


def followed(op: Op, rule: ShardingRule) -> tuple[int, ...]:
    """Operand positions that have all of the result's factors: the op lies as they lie."""
    if op.primitive in _NEVER or op.subgraphs or op.effects or len(op.results) != 1 or rule.methods:
        return ()
    result = factor_set(rule.results[0])
    if not result:
        return ()
    return tuple(k for k, o in enumerate(op.operands) if isinstance(o, int) and factor_set(rule.operands[k]) == result)


def find_clusters(
    graph: Graph, rules: Sequence[ShardingRule], carried: Sequence[tuple[int, int]], pinned: frozenset[int] = frozenset()
) -> tuple[Cluster, ...]:
    """The clusters of all ops that depend on inputs, in order of their first op.

    `carried` pairs input and output positions of one piece of state: such an input joins the cluster that updates it, when its
    output comes from that cluster. Inputs in `pinned` lie by themselves, so that their sharding can be given.
    """
    linear = _linear_ops(graph, rules)
    skipped = {i for i, op in enumerate(graph.ops) if op.results and all(r in graph.free for r in op.results)}
    again = {i for i, op in enumerate(graph.ops) if op.again}
    union = _Union(len(graph.ops))
    joined: set[int] = set(pinned)
    for i, op in enumerate(graph.ops):
        if i in skipped:
            continue
        follows = followed(op, rules[i])
        for k in _full(graph, op) if i in linear else follows:
            operand = op.operands[k]
            p = graph.producer.get(operand) if isinstance(operand, int) else None
            if p is None or p in skipped or (p in linear) != (i in linear) or (p in again) != (i in again):
                continue
            if i in linear or _can_lead(graph.ops[p], rules[p]):
                union.join(p, i)
    for i, j in graph.goes_round:
        union.join(i, j)
    members = _inputs_with(graph, rules, carried, union, linear, joined)
    found: dict[int, list[int]] = {}
    for i in range(len(graph.ops)):
        if i not in skipped:
            found.setdefault(union.find(i), []).append(i)
    return tuple(
        Cluster(tuple(ops), tuple(members.get(root, ())), ops[0] in linear) for root, ops in sorted(found.items(), key=lambda x: x[1][0])
    )


def _full(graph: Graph, op: Op) -> tuple[int, ...]:
    """Operand positions of the result's size."""
    size = graph.avals[op.results[0]].size
    return tuple(k for k, o in enumerate(op.operands) if isinstance(o, int) and graph.avals[o].size == size)


def _can_lead(op: Op, rule: ShardingRule) -> bool:
    """Whether consumers of the same size may be merged with this op: it follows its own operand, or only repeats a smaller one."""
    if followed(op, rule):
        return True
    plain = op.primitive not in _NEVER and not op.subgraphs and not op.effects and not rule.methods and len(op.results) == 1
    return plain and (op.primitive == "broadcast_in_dim" or is_elementwise(rule)) and bool(factor_set(rule.results[0]))


def _inputs_with(
    graph: Graph,
    rules: Sequence[ShardingRule],
    carried: Sequence[tuple[int, int]],
    union: _Union,
    linear: frozenset[int],
    joined: set[int],
) -> dict[int, list[int]]:
    """Optimiser moments and the like: state read only by the cluster that makes its next value."""
    members: dict[int, list[int]] = {}
    for i, o in carried:
        value, new = graph.inputs[i], graph.outputs[o]
        p = graph.producer.get(new) if isinstance(new, int) else None
        if p is None or value in joined or p in linear:
            continue
        readers = graph.uses.get(value, ())
        same = [u for u, k in readers if union.find(u) == union.find(p) and k in followed(graph.ops[u], rules[u])]
        if readers and len(same) == len(readers):
            members.setdefault(union.find(p), []).append(value)
            joined.add(value)
    for value in graph.inputs:
        split = split_for_loop(graph, value)
        if split is not None and value not in joined and split not in linear:
            members.setdefault(union.find(split), []).append(value)
            joined.add(value)
    return members


def split_for_loop(graph: Graph, value: int) -> int | None:
    """The reshape that is all that reads an input, and by which a loop reads it part by part: the same bytes under another shape."""
    readers = graph.uses.get(value, ())
    if len(readers) != 1 or value in graph.output_values:
        return None
    i = readers[0][0]
    op = graph.ops[i]
    if op.primitive != "reshape" or op.results[0] in graph.output_values:
        return None
    return i if all(graph.ops[u].primitive == "loop_slice" for u, _ in graph.uses.get(op.results[0], ())) else None


def _linear_ops(graph: Graph, rules: Sequence[ShardingRule]) -> frozenset[int]:
    """Ops of trees of additions whose leaves may be partial sums, with the linear ops on their branches."""
    candidate: dict[int, bool] = {}
    for i, op in enumerate(graph.ops):
        if op.primitive in _JOINS or op.primitive in _BRANCHES:
            values = [o for o in op.inputs if o not in graph.free]
            full = [o for o in values if graph.avals[o].size == graph.avals[op.results[0]].size]
            wanted = full if op.primitive in ("mul", "div") else values
            if wanted and any(p.kind == "sum" and set(p.operands) == _positions(op, wanted) for p in rules[i].passes):
                ready = all(_may_be_partial(graph, rules, o, candidate) for o in wanted)
                if ready and not (op.primitive in ("mul", "div") and len(wanted) > 1):
                    candidate[i] = op.primitive in _JOINS and len(wanted) > 1
    for i, u, j in _sums_carried(graph):
        values = [o for o in graph.ops[u].inputs if o != graph.ops[i].results[0]]
        if all(_may_be_partial(graph, rules, o, candidate) for o in values):
            candidate.update({i: False, u: True, j: False})
    return _with_joins(graph, _without_last_casts(graph, candidate))


def _without_last_casts(graph: Graph, candidate: dict[int, bool]) -> dict[int, bool]:
    """Without casts to a wider dtype that end a tree: its sum is resolved before them, in fewer bytes."""
    kept = dict(candidate)
    for i in sorted(candidate, reverse=True):
        op = graph.ops[i]
        if op.primitive == "convert_element_type" and graph.aval(op.operands[0]).nbytes < graph.avals[op.results[0]].nbytes:
            if not any(u in kept for u, _ in graph.uses.get(op.results[0], ())):
                del kept[i]
    return kept


def _sums_carried(graph: Graph) -> list[tuple[int, int, int]]:
    """Carried values that each iteration only adds to: by which op they come in, are added to, and go round."""
    found = []
    for i, j in graph.goes_round:
        carried, going = graph.ops[i].results[0], graph.ops[j].operands[0]
        readers = graph.uses.get(carried, ())
        if not isinstance(going, int) or graph.ops[j].primitive != "loop_exit" or len(readers) != 1 or len(graph.uses[going]) != 1:
            continue
        u = graph.producer.get(going, -1)
        if readers[0][0] != u:
            continue
        op = graph.ops[u]
        whole = all(graph.avals[o].size == graph.avals[going].size for o in op.inputs)
        if op.primitive in ("add", "add_any") and len(set(op.inputs)) == 2 and whole and isinstance(graph.ops[i].operands[0], int):
            found.append((i, u, j))
    return found


def _positions(op: Op, values: Sequence[int]) -> set[int]:
    return {k for k, o in enumerate(op.operands) if isinstance(o, int) and o in values}


def _may_be_partial(graph: Graph, rules: Sequence[ShardingRule], value: int, candidate: dict[int, bool]) -> bool:
    """A value used once that comes from an op whose cutting leaves sums, or from another linear op."""
    p = graph.producer.get(value)
    if p is None or len(graph.uses.get(value, ())) != 1 or value in graph.output_values:
        return False
    return p in candidate or leaves_sums(rules[p])


def leaves_sums(rule: ShardingRule) -> bool:
    """Whether cutting some factor of the rule leaves a partial sum."""
    return any(f in rule.reduced and f not in rule.in_results and rule.reduction(f) == "sum" for f in rule.factors)


def _with_joins(graph: Graph, candidate: dict[int, bool]) -> frozenset[int]:
    """Only the connected pieces that hold at least one addition of two values."""
    union = _Union(len(graph.ops))
    for i in candidate:
        for o in graph.ops[i].inputs:
            p = graph.producer.get(o)
            if p in candidate:
                union.join(p, i)
    roots = {union.find(i) for i, joins in candidate.items() if joins}
    return frozenset(i for i in candidate if union.find(i) in roots)


class _Union:
    """Union-find over op indices."""

    def __init__(self, n: int):
        self.parent = list(range(n))

    def find(self, i: int) -> int:
        parent = self.parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)
