"""What changed between two plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Leaf, Plan, Stage
from autopar.report.fold import CollectiveGroup, fold_collectives, fold_paths, number_of_stages, without_numbers
from autopar.report.stages import range_text
from autopar.report.units import axes_text, bytes_text, percent_text, seconds_text

SAME = "The plans are the same.\n"


def diff(a: Plan, b: Plan) -> str:
    """Changes of program, mesh, schedule, leaves, collectives and predictions from plan `a` to plan `b`, a line each."""
    sections = {
        "Program": _program(a, b),
        "Layout": _layout(a, b),
        "Inputs": _leaves(a.inputs, b.inputs, a.mesh, b.mesh),
        "Outputs": _leaves(a.outputs, b.outputs, a.mesh, b.mesh),
        "Collectives per step": _collectives(a, b),
        "Predicted": _predicted(a, b),
    }
    lines = [line for title, found in sections.items() for line in _section(title, list(found))]
    return "\n".join(lines) + "\n" if lines else SAME


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []


def _program(a: Plan, b: Plan) -> Iterator[str]:
    if a.fingerprint != b.fingerprint:
        yield f"these are plans of different programs: {_program_text(a)}, {_program_text(b)}"
    yield from _changed("cluster", str(a.cluster.get("name", "")), str(b.cluster.get("name", "")))
    for name in sorted(a.options.keys() | b.options.keys()):
        yield from _changed(f"option {name}", str(a.options.get(name)), str(b.options.get(name)))


def _program_text(plan: Plan) -> str:
    return f"{plan.target or 'unnamed'} ({plan.fingerprint[:8]})"


def _layout(a: Plan, b: Plan) -> Iterator[str]:
    yield from _changed("mesh", str(a.mesh), str(b.mesh))
    yield from _changed("stages", str(number_of_stages(a)), str(number_of_stages(b)))
    for n in range(max(len(a.stages), len(b.stages))):
        yield from _changed(f"stage {n}", *("" if n >= len(p.stages) else _stage_text(p.stages[n]) for p in (a, b)))
    yield from _changed("microbatches", str(a.microbatches), str(b.microbatches))
    yield from _changed("schedule", a.schedule, b.schedule)
    yield from _changed("remat", a.remat, b.remat)
    yield from _changed("values recomputed", str(len(a.recomputed)), str(len(b.recomputed)))


def _stage_text(stage: Stage) -> str:
    return f"layers {range_text(*stage.layers)} on devices {range_text(stage.devices[0], sum(stage.devices))} ({stage.sharding.mesh})"


def _changed(what: str, before: str, after: str) -> Iterator[str]:
    if before != after:
        yield f"{what}: {before or 'none'} -> {after or 'none'}"


def _leaves(before: Sequence[Leaf], after: Sequence[Leaf], mesh_a: LogicalMesh, mesh_b: LogicalMesh) -> Iterator[str]:
    """Leaves by path; those that change alike are folded to one line."""
    old = {leaf.path: leaf for leaf in before}
    new = {leaf.path: leaf for leaf in after}
    alike: dict[tuple[str, str], list[str]] = {}
    for path in dict.fromkeys((*old, *new)):
        change = _leaf_text(old.get(path), mesh_a), _leaf_text(new.get(path), mesh_b)
        if change[0] != change[1]:
            alike.setdefault(change, []).append(path)
    for (was, now), paths in alike.items():
        by_pattern: dict[str, list[str]] = {}
        for path in paths:
            by_pattern.setdefault(without_numbers(path), []).append(path)
        for members in by_pattern.values():
            for pattern, count in fold_paths(members):
                yield f"{pattern}{f' ({count} leaves)' if count > 1 else ''}: {was} -> {now}"


def _leaf_text(leaf: Leaf | None, mesh: LogicalMesh) -> str:
    if leaf is None:
        return "absent"
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}] {leaf.sharding} in {leaf.sharding.shards(mesh)}"


def _collectives(a: Plan, b: Plan) -> Iterator[str]:
    old, new = _by_what(a), _by_what(b)
    for key in dict.fromkeys((*old, *new)):
        was, now = _group_text(old.get(key)), _group_text(new.get(key))
        if was != now:
            kind, axes, phase, purpose = key
            yield f"{kind} over {axes_text(axes)}, {phase}: {purpose}: {was} -> {now}"


def _by_what(plan: Plan) -> dict[tuple[str, tuple[str, ...], str, str], CollectiveGroup]:
    where = {n: f" in stage {n}" if plan.stages else "" for n in range(number_of_stages(plan))}
    return {(g.kind, g.axes, g.phase, f"{g.purpose}{where[g.stage]}"): g for g in fold_collectives(plan.collectives)}


def _group_text(g: CollectiveGroup | None) -> str:
    return "none" if g is None else f"{g.times} times, {bytes_text(g.nbytes)}, {seconds_text(g.seconds)}"


def _predicted(a: Plan, b: Plan) -> Iterator[str]:
    rows: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("step time", "step_time_s", seconds_text),
        ("compute", "compute_s", seconds_text),
        ("communication", "communication_s", seconds_text),
        ("exposed communication", "exposed_communication_s", seconds_text),
        ("bubble", "bubble_s", seconds_text),
        ("peak memory per device", "peak_bytes", bytes_text),
        ("temporaries per device", "temp_bytes", bytes_text),
    )
    for what, name, write in rows:
        before, after = getattr(a.predicted, name), getattr(b.predicted, name)
        if before != after:
            share = f" ({'+' if after > before else '-'}{percent_text(abs(after - before) / before)})" if before else ""
            yield f"{what}: {write(before)} -> {write(after)}{share}"
