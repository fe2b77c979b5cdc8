"""A plan as stable text, one thing to a line: what golden tests compare. It holds no timings of the planner."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Aval
from autopar.ir.plan import Leaf, Plan, PlannedMove, ShardingPlan, Stage
from autopar.report.stages import range_text, stages_text
from autopar.report.table import schedule_text
from autopar.report.units import axes_text


def plan_text(plan: Plan) -> str:
    """Every decision of a plan on a line of its own, in the plan's order; numbers to four digits."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    p = plan.predicted
    yield f"plan {plan.target}"
    yield f"mesh {plan.mesh}"
    yield f"schedule {schedule_text(plan)}"
    yield f"solved {plan.solve.status} objective {plan.solve.objective:.4g} s"
    yield f"step {p.step_time_s:.4g} s compute {p.compute_s:.4g} communication {p.communication_s:.4g} bubble {p.bubble_s:.4g}"
    yield f"memory peak {p.peak_bytes} arguments {p.argument_bytes} temporaries {p.temp_bytes}"
    where = [f" stage {stages_text(leaf.stages)}" if plan.stages else "" for leaf in (*plan.inputs, *plan.outputs)]
    yield from (f"{_leaf_line('in', leaf)}{w}" for leaf, w in zip(plan.inputs, where, strict=False))
    yield from (f"{_leaf_line('out', leaf)}{w}" for leaf, w in zip(plan.outputs, where[len(plan.inputs) :], strict=True))
    if not plan.stages:
        yield from _sharding_lines(plan.sharding)
    for c in plan.collectives:
        of = f"stage {c.stage} " if plan.stages else ""
        how = f"{axes_text(c.axes)} {c.dtype} {c.nbytes} B x{c.times} {c.phase} {c.purpose} {c.source}"
        yield f"{of}collective {c.id} {c.kind} {how}".rstrip()
    for w in plan.whole:
        yield f"whole {w.primitive} x{w.count} {'rule' if w.has_rule else 'no rule'} {w.source}".rstrip()
    for n, stage in enumerate(plan.stages):
        yield from _stage_lines(n, stage)
    yield from (f"note {note}" for note in plan.notes)


def _sharding_lines(plan: ShardingPlan) -> Iterator[str]:
    strategies = plan.strategies
    yield f"ops {len(strategies)}, {sum(s.is_whole for s in strategies)} of them whole"
    yield from (f"op {i} {s}" for i, s in enumerate(strategies) if not s.is_whole)
    yield from map(_move_line, plan.moves)
    yield from (f"regenerated op {op} operand {k}: {n}" for op, k, n in sorted(plan.regenerated))


def _stage_lines(n: int, s: Stage) -> Iterator[str]:
    yield f"stage {n} layers {range_text(*s.layers)} devices {range_text(s.devices[0], sum(s.devices))} mesh {s.sharding.mesh}"
    times = (("before", s.before_s), ("forward", s.forward_s), ("input", s.input_s), ("weight", s.weight_s), ("after", s.after_s))
    yield f"stage {n} {' '.join(f'{what} {seconds:.4g}' for what, seconds in times)} s"
    yield f"stage {n} arguments {s.argument_bytes} peak {s.peak_bytes} residual {s.residual_bytes} in flight {s.in_flight}"
    if s.recomputed:
        yield f"stage {n} recomputes {' '.join(map(str, s.recomputed))}"
    yield from (f"stage {n} sends {x.values} values {x.nbytes} B to {x.target} {x.when} {x.seconds:.4g} s" for x in s.sends)
    yield from (f"stage {n} {line}" for line in _sharding_lines(s.sharding))


def _leaf_line(where: str, leaf: Leaf) -> str:
    return f"{where} {leaf.role} {leaf.path} {Aval(leaf.shape, leaf.dtype)} {leaf.sharding}"


def _move_line(m: PlannedMove) -> str:
    again = f" generation {m.generation} from {m.source_generation}" if m.generation or m.source_generation else ""
    gate = f" after op {m.gate}" if m.gate >= 0 else ""
    return f"move {m.id or '-'} value {m.value} {m.move} {m.source} -> {m.target}{again}{gate}"
