"""A plan as stable text, one thing to a line: what golden tests compare. It holds no timings of the planner."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.graph import Aval
from autopar.ir.plan import Leaf, Plan, PlannedMove
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
    yield from (_leaf_line("in", leaf) for leaf in plan.inputs)
    yield from (_leaf_line("out", leaf) for leaf in plan.outputs)
    strategies = plan.sharding.strategies
    yield f"ops {len(strategies)}, {sum(s.is_whole for s in strategies)} of them whole"
    yield from (f"op {i} {s}" for i, s in enumerate(strategies) if not s.is_whole)
    yield from map(_move_line, plan.sharding.moves)
    yield from (f"regenerated op {op} operand {k}: {n}" for op, k, n in sorted(plan.sharding.regenerated))
    for c in plan.collectives:
        yield f"collective {c.id} {c.kind} {axes_text(c.axes)} {c.dtype} {c.nbytes} B x{c.times} {c.phase} {c.purpose} {c.source}".rstrip()
    for w in plan.whole:
        yield f"whole {w.primitive} x{w.count} {'rule' if w.has_rule else 'no rule'} {w.source}".rstrip()
    yield from (f"stage {i} {stage}" for i, stage in enumerate(plan.stages))
    yield from (f"note {note}" for note in plan.notes)


def _leaf_line(where: str, leaf: Leaf) -> str:
    return f"{where} {leaf.role} {leaf.path} {Aval(leaf.shape, leaf.dtype)} {leaf.sharding}"


def _move_line(m: PlannedMove) -> str:
    again = f" generation {m.generation} from {m.source_generation}" if m.generation or m.source_generation else ""
    gate = f" after op {m.gate}" if m.gate >= 0 else ""
    return f"move {m.id or '-'} value {m.value} {m.move} {m.source} -> {m.target}{again}{gate}"
