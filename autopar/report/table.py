"""A plan as tables for the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.ir.plan import Plan, WholeOp
from autopar.report.fold import LeafGroup, cluster_name, fold_collectives, fold_leaves, memory_budget, number_of_stages
from autopar.report.stages import COLUMNS, stage_rows, stages_text
from autopar.report.units import axes_text, bytes_text, count_text, percent_text, seconds_text

ROLES = {"state": "State", "batch": "Batch", "constant": "Constants"}
BAR = 30
NUMERIC = ("number", "times", "bytes", "time", "per device", "FLOP", "forward", "backward", "update", "peak per device", "in flight")


def plan_table(plan: Plan) -> Group:
    """What was decided and what it is predicted to cost, as a rich renderable. `render` turns it into text."""
    parts: list[RenderableType] = [header(plan), *stage_table(plan), *_leaf_tables(plan)]
    if plan.collectives:
        parts += ["", _collective_table(plan)]
    if plan.whole:
        parts += ["", _whole_table(plan.whole)]
    if plan.notes:
        parts += ["", Text("Notes", style="bold"), *(Text(f"  {note}") for note in plan.notes)]
    return Group(*parts)


def render(renderable: RenderableType, width: int = 120) -> str:
    """A rich renderable as plain text, without colour or trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def header_rows(plan: Plan) -> list[tuple[str, str]]:
    """The plan in a few lines: (what, text)."""
    rows = [
        ("mesh", f"{plan.mesh} ({plan.mesh.num_devices} devices of {cluster_name(plan)})"),
        ("schedule", schedule_text(plan)),
        ("step time", _step_text(plan)),
        ("memory", _memory_text(plan)),
    ]
    if plan.predicted.flops:
        rows.append(("compute", f"{count_text(plan.predicted.flops, 'FLOP')} per step, {percent_text(plan.predicted.mfu)} of peak"))
    return [*rows, ("solved", _solve_text(plan))]


def schedule_text(plan: Plan) -> str:
    """Stages, microbatches, schedule and rematerialisation in words."""
    stages = number_of_stages(plan)
    parts = ["one stage" if stages == 1 else f"{stages} stages, {plan.schedule}"]
    parts.append("one microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches")
    return ", ".join([*parts, remat_text(plan)])


def remat_text(plan: Plan) -> str:
    """What is made again, and for how long."""
    if plan.remat == "none":
        return "nothing recomputed"
    seconds = dict(plan.cost_split).get("recomputed", 0.0)
    values = len(plan.recomputed) + sum(len(stage.recomputed) for stage in plan.stages)
    return f"{values} values recomputed ({plan.remat}), {seconds_text(seconds)} of the step"


def header(plan: Plan) -> Table:
    """The plan in a few lines."""
    table = Table.grid(padding=(0, 2))
    table.title = Text(f"Plan for {plan.target or 'a function'}", style="bold")
    table.title_justify = "left"
    for what, text in header_rows(plan):
        table.add_row(Text(what, style="bold"), Text(text))
    return table


def _step_text(plan: Plan) -> str:
    p = plan.predicted
    parts = [f"compute {seconds_text(p.compute_s)}", f"exposed communication {seconds_text(p.exposed_communication_s)}"]
    if p.bubble_s:
        parts.append(f"bubble {seconds_text(p.bubble_s)}")
    hidden = p.communication_s - p.exposed_communication_s
    more = f"; {seconds_text(hidden)} of communication hidden" if hidden > 0 else ""
    return f"{seconds_text(p.step_time_s)} predicted: {' + '.join(parts)}{more}"


def _memory_text(plan: Plan) -> str:
    p, budget = plan.predicted, memory_budget(plan)
    split = f" (arguments {bytes_text(p.argument_bytes)}, temporaries {bytes_text(p.temp_bytes)})"
    if budget is None:
        return f"{bytes_text(p.peak_bytes)} per device at the peak{split}"
    share = p.peak_bytes / budget
    return f"{memory_bar(share)} {bytes_text(p.peak_bytes)} of {bytes_text(budget)} per device at the peak, {percent_text(share)}{split}"


def memory_bar(share: float) -> str:
    """A bar of characters for a share of the budget.

    >>> memory_bar(0.5)
    '[###############...............]'
    """
    full = min(BAR, round(BAR * share))
    return f"[{'#' * full}{'.' * (BAR - full)}]"


def _solve_text(plan: Plan) -> str:
    s = plan.solve
    if s.status == "none":
        return "not solved"
    of = "" if s.scope == "program" else f" within the {s.scope}"
    return f"{s.status} by {s.solver}: {seconds_text(s.objective)}, bound {seconds_text(s.bound)}{of}, gap {percent_text(s.gap)}"


def stage_table(plan: Plan) -> list[RenderableType]:
    """The stages of a plan, an empty line before them; nothing where there are none."""
    if not plan.stages:
        return []
    table = titled_table("Stages; forward and backward of one microbatch", *COLUMNS)
    for row in stage_rows(plan):
        table.add_row(*cells(*row))
    return ["", table]


def stage_columns(plan: Plan) -> tuple[str, ...]:
    """The column that says which stage, where there are several."""
    return ("stage",) if plan.stages else ()


def stage_cells(plan: Plan, stage: int | str) -> tuple[str, ...]:
    """What stands in that column."""
    return (str(stage),) if plan.stages else ()


def _leaf_tables(plan: Plan) -> Iterable[RenderableType]:
    groups = fold_leaves(plan.inputs, plan.mesh)
    for role in dict.fromkeys((*ROLES, *(g.role for g in groups))):
        members = [g for g in groups if g.role == role]
        if not members:
            continue
        title = f"{ROLES.get(role, role.capitalize())}, {bytes_text(_most_bytes(members))} per device"
        table = titled_table(title, "leaf", *stage_columns(plan), "number", "type", "sharding", "per device")
        for g in members:
            where = stage_cells(plan, stages_text(g.stages))
            table.add_row(*cells(g.path, *where, g.count, g.type_text, str(g.sharding), bytes_text(g.nbytes)))
        yield from ("", table)


def _most_bytes(groups: Sequence[LeafGroup]) -> int:
    """Bytes on one device, of the stage that has most."""
    found: dict[int, int] = {}
    for g in groups:
        for stage in g.stages:
            found[stage] = found.get(stage, 0) + g.nbytes
    return max(found.values())


def _collective_table(plan: Plan) -> Table:
    groups = fold_collectives(plan.collectives)
    total = sum(g.seconds for g in groups)
    title = f"Collectives, {seconds_text(total)} per step"
    table = titled_table(title, "kind", *stage_columns(plan), "axes", "phase", "purpose", "number", "times", "bytes", "time")
    for g in groups:
        figures = (g.count, g.times, bytes_text(g.nbytes), seconds_text(g.seconds))
        table.add_row(*cells(g.kind, *stage_cells(plan, g.stage), axes_text(g.axes), g.phase, g.purpose, *figures))
    return table


def _whole_table(whole: Sequence[WholeOp]) -> Table:
    table = titled_table("Run whole on every device", "primitive", "source", "number", "FLOP", "time", "why")
    for op in sorted(whole, key=lambda w: (-w.seconds, w.primitive, w.source)):
        why = "nothing better was found" if op.has_rule else "has no sharding rule"
        table.add_row(*cells(op.primitive, op.source, op.count, count_text(op.flops), seconds_text(op.seconds), why))
    return table


def titled_table(title: str, *columns: str, right: Sequence[str] = NUMERIC) -> Table:
    """An empty table; columns named in `right` are numbers."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        is_number = column in right
        table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    return table


def cells(*values: object) -> tuple[Text, ...]:
    """Cells of plain text: a sharding's brackets are no markup."""
    return tuple(Text(str(v)) for v in values)
