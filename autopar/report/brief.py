"""A plan on one screen: its largest leaves, its collectives by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.plan import Collective, Plan
from autopar.report.fold import LeafGroup, fold_leaves, step_bytes, step_seconds
from autopar.report.stages import stages_text
from autopar.report.table import cells, header, stage_cells, stage_columns, stage_table, titled_table
from autopar.report.units import axes_text, bytes_text, seconds_text

MOST_LEAVES = 6


def brief_table(plan: Plan) -> Group:
    """The plan's header, its stages, how its largest leaves lie, and its collectives by kind and phase, as a rich renderable."""
    parts: list[RenderableType] = [header(plan), *stage_table(plan), "", _leaf_table(plan)]
    if plan.collectives:
        parts += ["", _collective_table(plan)]
    return Group(*parts)


def _leaf_table(plan: Plan) -> RenderableType:
    folded = fold_leaves(plan.inputs, plan.mesh)
    groups = sorted(together(folded), key=lambda g: -g.nbytes)
    columns = ("leaf", *stage_columns(plan), "number", "type", "sharding", "per device")
    table = titled_table(f"The largest of {len(plan.inputs)} leaves", *columns)
    for g in groups[:MOST_LEAVES]:
        where = stage_cells(plan, stages_text(g.stages))
        table.add_row(*cells(g.path, *where, g.count, g.type_text, str(g.sharding), bytes_text(g.nbytes)))
    rest = groups[MOST_LEAVES:]
    if rest:
        figures = (sum(g.count for g in rest), "", "", bytes_text(sum(g.nbytes for g in rest)))
        table.add_row(*cells("the others", *stage_cells(plan, ""), *figures))
    merged = "Leaves of the optimiser that lie like their parameter are counted with it."
    return Group(table, Text(merged, style="dim")) if len(groups) < len(folded) else table


def together(groups: Sequence[LeafGroup]) -> list[LeafGroup]:
    """Groups whose paths end alike and that lie alike, as one: a parameter and its optimiser state."""
    alike: dict[tuple[object, ...], list[LeafGroup]] = {}
    for g in groups:
        alike.setdefault((_tail(g.path), g.role, g.shape, g.dtype, g.sharding, g.stages), []).append(g)
    return [
        replace(m[0], count=sum(g.count for g in m), nbytes=sum(g.nbytes for g in m))
        for m in alike.values()
    ]


def _tail(path: str) -> str:
    """A path from its first text key on: `state.params['w']['b']` and `state.mu['w']['b']` end alike."""
    start = path.find("['")
    return path[start:] if start >= 0 else path


def _collective_table(plan: Plan) -> RenderableType:
    alike: dict[tuple[str, tuple[str, ...], str], list[Collective]] = {}
    for c in plan.collectives:
        alike.setdefault((c.kind, c.axes, c.phase), []).append(c)
    total = sum(map(step_seconds, plan.collectives))
    table = titled_table(f"Collectives, {seconds_text(total)} per step", "kind", "axes", "phase", "number", "times", "bytes", "time")
    for (kind, axes, phase), members in sorted(alike.items(), key=lambda entry: -sum(map(step_seconds, entry[1]))):
        figures = (len(members), sum(c.times for c in members), bytes_text(sum(map(step_bytes, members))))
        table.add_row(*cells(kind, axes_text(axes), phase, *figures, seconds_text(sum(map(step_seconds, members)))))
    return table
