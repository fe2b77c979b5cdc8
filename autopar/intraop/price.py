"""What a plan costs, counted op by op and move by move on the unfolded graph: a second opinion on every solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar import costs
from autopar.costs import Charges, Pricer
from autopar.intraop.connect import made
from autopar.ir.graph import MATMULS, Constant, Graph, Op
from autopar.ir.plan import Collective, Leaf, PlannedMove, ShardingPlan, WholeOp
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.rules.inside import numbered


@dataclass(frozen=True)
class Price:
    """Seconds per step: of ops, of collectives, of local copies between shardings, and of launching kernels.

    `transfer_s` is what comes to a pipeline stage from others and goes to them: other stages' devices count it as well.
    """

    compute_s: float
    communication_s: float
    copies_s: float
    launch_s: float
    by_kind: tuple[tuple[str, float], ...]
    transfer_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s + self.copies_s + self.launch_s + self.transfer_s


def op_seconds(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, pricer: Pricer, charges: Charges, i: int) -> float:
    """Seconds of op i as planned; ops that depend on no input are free."""
    op = graph.ops[i]
    if op.results and all(r in graph.free for r in op.results):
        return 0.0
    operands = [graph.aval(o) for o in op.operands]
    results = [graph.avals[r] for r in op.results]
    once = pricer.op(op, rules[i], plan.strategies[i], operands, results, charges.reads[i], charges.writes[i])
    return graph.times[i] * once


def price_plan(
    graph: Graph,
    rules: Sequence[ShardingRule],
    plan: ShardingPlan,
    pricer: Pricer,
    charges: Charges,
    streamed: Mapping[int, float] | None = None,
) -> Price:
    """The price of a whole plan. `streamed` are the values that go from stage to stage, with the seconds per byte of one device."""
    kinds: dict[str, float] = {}
    for i, op in enumerate(graph.ops):
        kinds[_kind(op)] = kinds.get(_kind(op), 0.0) + op_seconds(graph, rules, plan, pricer, charges, i)
    compute = sum(kinds.values())
    copies = communication = 0.0
    for i, own in numbered(graph, rules, plan, pricer.as_written).items():
        for c in own:  # a border that two ops share is paid for by both: each choice stands by itself
            seconds = graph.times[i] * pricer.within(c.inside)
            kinds[_kind(graph.ops[i])] -= seconds
            compute, communication = compute - seconds, communication + seconds
            kinds[c.inside.kind] = kinds.get(c.inside.kind, 0.0) + seconds
    for m in plan.moves:
        if m.value in graph.free:
            continue
        seconds = graph.value_times(m.value) * pricer.move(m.move, m.source, graph.avals[m.value])
        if m.move.communicates:
            communication += seconds
            kinds[m.move.kind] = kinds.get(m.move.kind, 0.0) + seconds
        else:
            copies += seconds
    launch = pricer.cluster.launch_seconds * charges.launches
    kinds |= {"local copies": copies, "launch": launch}
    split = tuple(sorted(((k, s) for k, s in kinds.items() if s), key=lambda ks: -ks[1]))
    return Price(compute, communication, copies, launch, split, sum(_transfers(graph, plan, streamed or {})))


def _transfers(graph: Graph, plan: ShardingPlan, streamed: Mapping[int, float]) -> Iterator[float]:
    """Seconds of each value that goes from stage to stage, as often as it does."""
    for v, s in (*zip(graph.inputs, plan.inputs, strict=True), *zip(graph.outputs, plan.outputs, strict=True)):
        if isinstance(v, int) and v in streamed:
            yield streamed[v] * s.local_bytes(graph.avals[v], plan.mesh)


def _kind(op: Op) -> str:
    return "recomputed" if op.again else "matmul" if costs.is_matmul(op) else "memory-bound"


def collectives(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, pricer: Pricer) -> tuple[Collective, ...]:
    """The planned collectives, in the order of their ids."""
    carried_from = {v: n for v, n in zip(graph.inputs, graph.input_names, strict=False)}
    found = []
    for m in plan.moves:
        if not m.move.communicates:
            continue
        aval = graph.avals[m.value]
        dtype = m.source.local_dtype(aval.dtype, pricer.as_written)
        moved = {"bool": "uint8"}.get(dtype, dtype)
        purpose, phase, source = _why(graph, m, carried_from)
        times = graph.value_times(m.value)
        found.append(
            Collective(
                m.id,
                m.move.kind,
                m.move.axes,
                plan.mesh.size(m.move.axes),
                pricer.move_bytes(m.source, aval),
                moved,
                times,
                times * pricer.move(m.move, m.source, aval),
                purpose,
                phase,
                source,
            )
        )
    return (*found, *_own(graph, rules, plan, pricer))


def _own(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, pricer: Pricer) -> Iterator[Collective]:
    """The collectives that ops themselves contain."""
    for i, own in numbered(graph, rules, plan, pricer.as_written).items():
        op, times = graph.ops[i], graph.times[i]
        where = f"in {op.primitive}" + (f" in {op.scope}" if op.scope else "")
        for name, c in ((n.id, n.inside) for n in own if not n.shared):
            moved = {"bool": "uint8"}.get(c.dtype, c.dtype)
            size, seconds = plan.mesh.size(c.axes), times * pricer.within(c)
            purpose = f"{_VERBS[c.kind]} {where}"
            yield Collective(name, c.kind, c.axes, size, c.nbytes, moved, times * c.times, seconds, purpose, op.phase, op.source)


_VERBS = {"all_gather": "gather", "all_reduce": "sum", "reduce_scatter": "sum and scatter", "all_to_all": "exchange", "permute": "shift"}


def _why(graph: Graph, m: PlannedMove, names: dict[int, str]) -> tuple[str, str, str]:
    """Purpose in words, phase and source line of a move."""
    verb = _VERBS[m.move.kind] if m.move.kind != "all_reduce" or m.move.reduction == "sum" else m.move.reduction
    readers = [i for i, _ in graph.uses.get(m.value, ())]
    if m.value in names:
        first = graph.ops[m.gate if m.gate >= 0 else readers[0]] if readers else None
        again = " again" if m.generation else ""
        return f"{verb} {names[m.value]}{again}", first.phase if first else "update", first.source if first else ""
    op = graph.ops[graph.producer[m.value]]
    where = f" in {op.scope}" if op.scope else ""
    return f"{verb} {op.primitive}{where}", op.phase, op.source


def leaves(graph: Graph, plan: ShardingPlan, roles: Sequence[str]) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Inputs and outputs with their shardings; `roles` has one word per input."""
    inputs = tuple(
        Leaf(name, graph.avals[v].shape, graph.avals[v].dtype, role, s)
        for v, name, role, s in zip(graph.inputs, graph.input_names, roles, plan.inputs, strict=True)
    )
    outputs = tuple(
        Leaf(name, graph.aval(o).shape, graph.aval(o).dtype, "output", s)
        for o, name, s in zip(graph.outputs, graph.output_names, plan.outputs, strict=True)
    )
    return inputs, outputs


def whole_ops(
    graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan, pricer: Pricer, charges: Charges, ruled: Sequence[bool]
) -> tuple[WholeOp, ...]:
    """Ops that matter and are not cut though the mesh has more than one device, by source line, dearest first."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    if plan.mesh.num_devices == 1:
        return ()
    for i, op in enumerate(graph.ops):
        if plan.strategies[i].cuts or (ruled[i] and op.primitive not in MATMULS):
            continue
        work = graph.times[i] * costs.flops(op, [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results])
        seconds = op_seconds(graph, rules, plan, pricer, charges, i)
        entry = found.setdefault((op.primitive, op.source, ruled[i]), [0, 0.0, 0.0])
        found[op.primitive, op.source, ruled[i]] = [entry[0] + 1, entry[1] + work, entry[2] + seconds]
    ordered = sorted(found.items(), key=lambda kv: -kv[1][2])
    return tuple(WholeOp(p, s, int(n), work, seconds, rule) for (p, s, rule), (n, work, seconds) in ordered)


def argument_bytes(graph: Graph, plan: ShardingPlan) -> int:
    """Bytes of the inputs on one device."""
    return sum(s.local_bytes(graph.avals[v], plan.mesh) for v, s in zip(graph.inputs, plan.inputs, strict=True))


def value_shardings(graph: Graph, rules: Sequence[ShardingRule], plan: ShardingPlan) -> dict[int, TensorSharding]:
    """Value -> the sharding in which it is made."""
    return made(graph, rules, plan.strategies, plan.inputs)


def literal_outputs(graph: Graph) -> tuple[int, ...]:
    """Positions of outputs that are literals."""
    return tuple(k for k, o in enumerate(graph.outputs) if isinstance(o, Constant))
