"""Why a plan costs what it costs, in sentences."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from autopar.errors import UsageError
from autopar.ir.graph import Aval
from autopar.ir.plan import Collective, Leaf, Plan, WholeOp
from autopar.report.fold import fold_collectives, leaf_bytes, memory_budget, step_bytes, step_seconds
from autopar.report.stages import stage_rows, stages_text
from autopar.report.table import header_rows
from autopar.report.units import axes_text, bytes_text, percent_text, seconds_text

MOST = 8


def explain(plan: Plan, target: str | None = None) -> str:
    """What fills the memory and takes the time; with `target`, all that the plan says of it.

    `target` is a leaf's path or a part of it, a collective's id, or a part of a source line, a primitive or a purpose. Raises
    `UsageError` where nothing matches, with the paths that come closest.
    """
    return "\n".join(_overview(plan) if target is None else _about(plan, target)) + "\n"


def _overview(plan: Plan) -> Iterator[str]:
    for what, text in header_rows(plan):
        yield f"{what}: {text}"
    yield from _section("Stages", _stage_lines(plan))
    yield from _section("What fills the memory at its peak", _memory_lines(plan))
    yield from _section("Where the time goes", _shares(plan.cost_split, sum(s for _, s in plan.cost_split)))
    yield from _section("Dearest collectives", _group_lines(plan))
    dearest = sorted(plan.whole, key=lambda w: -w.seconds)[:MOST]
    yield from _section("Dearest ops that every device runs whole", map(_whole_line, dearest))
    yield from _section("Meshes tried", (f"{mesh}: {seconds_text(s)}" for mesh, s in sorted(plan.candidates, key=lambda c: c[1])))
    yield from _section("Notes", plan.notes)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    lines = list(lines)
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _stage_lines(plan: Plan) -> Iterator[str]:
    for row in stage_rows(plan):
        stage, layers, devices, mesh, forward, backward, update, peak, flight, sends = row
        held = f"{peak} per device at the peak, microbatches in flight: {flight}"
        yield f"stage {stage}: layers {layers} on devices {devices} ({mesh}), {held}"
        yield f"  forward {forward} and backward {backward} a microbatch, update {update}; sends {sends}"


def _memory_lines(plan: Plan) -> Iterator[str]:
    peak = plan.predicted.peak_bytes
    listed = sorted(plan.live, key=lambda entry: -entry[1])
    for what, nbytes in listed[:MOST]:
        yield f"{bytes_text(nbytes):>9}  {percent_text(nbytes / peak if peak else 0.0):>7}  {what}"
    rest = sum(n for _, n in listed[MOST:])
    if rest:
        yield f"{bytes_text(rest):>9}  {percent_text(rest / peak if peak else 0.0):>7}  {len(listed) - MOST} more"
    budget = memory_budget(plan)
    if listed and budget is not None:
        yield f"{bytes_text(budget - peak)} of the budget are left"


def _shares(entries: Iterable[tuple[str, float]], total: float) -> Iterator[str]:
    for what, seconds in sorted(entries, key=lambda entry: -entry[1]):
        yield f"{seconds_text(seconds):>9}  {percent_text(seconds / total if total else 0.0):>7}  {what}"


def _group_lines(plan: Plan) -> Iterator[str]:
    for g in fold_collectives(plan.collectives)[:MOST]:
        where = f" in stage {g.stage}" if plan.stages else ""
        what = f"{g.count} {g.kind} over {axes_text(g.axes)}, {g.phase}{where}: {g.purpose}"
        yield f"{seconds_text(g.seconds):>9}  {bytes_text(g.nbytes):>9}  {what}"


def _about(plan: Plan, target: str) -> Iterator[str]:
    leaves = _matching_leaves(plan, target)
    collectives = _matching_collectives(plan, target, leaves)
    whole = [w for w in plan.whole if target in w.primitive or target in w.source]
    if not (leaves or collectives or whole):
        raise UsageError(f"nothing in the plan is called `{target}`. {_closest(plan, target)}")
    for where, leaf in leaves:
        yield _leaf_line(where, leaf, plan)
    yield from _section("Its collectives" if leaves else "Collectives", (_collective_line(c, plan) for c in collectives))
    if leaves and not collectives and not plan.stages:  # a plan in stages does not say which values its leaves are
        yield "It takes part in no collective."
    yield from _section("Run whole on every device", map(_whole_line, whole))


def _matching_leaves(plan: Plan, target: str) -> list[tuple[str, Leaf]]:
    """The leaf of that path, else those with `target` in theirs; a state leaf that leaves as it came is listed once."""
    both = [("in", leaf) for leaf in plan.inputs] + [("out", leaf) for leaf in plan.outputs if leaf not in plan.inputs]
    return [(w, leaf) for w, leaf in both if leaf.path == target] or [(w, leaf) for w, leaf in both if target in leaf.path]


def _matching_collectives(plan: Plan, target: str, leaves: list[tuple[str, Leaf]]) -> list[Collective]:
    """Those called `target`; else those whose kind, purpose or source names it, and those on the inputs that match."""
    exact = [c for c in plan.collectives if c.id == target]
    if exact:
        return exact
    paths = {leaf.path for _, leaf in leaves}
    values = {i for i, leaf in enumerate(plan.inputs) if leaf.path in paths}  # a graph's inputs are its first values
    moved = {(0, m.id) for m in plan.sharding.moves if m.value in values and m.id}
    named = [c for c in plan.collectives if (c.stage, c.id) in moved or any(target in text for text in (c.kind, c.purpose, c.source))]
    return sorted(named, key=lambda c: -step_seconds(c))


def _closest(plan: Plan, target: str) -> str:
    paths = list(dict.fromkeys(leaf.path for leaf in (*plan.inputs, *plan.outputs)))
    close = difflib.get_close_matches(target, paths, n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(f'`{p}`' for p in close)}?" if close else "Give a leaf's path, a collective's id or a source line."


def _leaf_line(where: str, leaf: Leaf, plan: Plan) -> str:
    cut = [f"dimension {d} over {axes_text(axes)}" for d, axes in enumerate(leaf.sharding.dims) if axes]
    how = f"cut in {leaf.sharding.shards(plan.mesh)}: {', '.join(cut)}" if cut else "whole on every device"
    nbytes = f"{bytes_text(leaf_bytes(leaf, plan.mesh))} per device{_where(stages_text(leaf.stages), plan)}"
    return f"{leaf.path} ({leaf.role}, {where}): {Aval(leaf.shape, leaf.dtype)} {leaf.sharding}, {how}; {nbytes}"


def _where(stage: int | str, plan: Plan) -> str:
    return f", stage {stage}" if plan.stages else ""


def _collective_line(c: Collective, plan: Plan) -> str:
    each = f"{bytes_text(c.nbytes)} {c.dtype}, {c.times} times a step" if c.times != 1 else f"{bytes_text(c.nbytes)} {c.dtype}"
    total = f"{bytes_text(step_bytes(c))} and {seconds_text(step_seconds(c))} per step"
    what = f"{c.phase}{_where(c.stage, plan)}: {c.purpose}{f' ({c.source})' if c.source else ''}"
    return f"{c.id} {c.kind} over {axes_text(c.axes)} ({c.group_size} devices), {what}; {each}; {total}"


def _whole_line(w: WholeOp) -> str:
    why = "" if w.has_rule else ", has no sharding rule"
    return f"{seconds_text(w.seconds):>9}  {w.count} {w.primitive} {w.source}{why}"
