"""A plan as one fragment of HTML for notebooks and files: no scripts, nothing fetched, all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan
from autopar.report.fold import fold_collectives, fold_leaves, memory_budget
from autopar.report.stages import COLUMNS, WORDS, stage_rows, stage_timeline, stages_text
from autopar.report.table import NUMERIC, header_rows, stage_cells, stage_columns
from autopar.report.units import axes_text, bytes_text, percent_text, seconds_text

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")  # Paul Tol's bright scheme
OVER_BUDGET = "#cc3311"
WIDTH = 640
CELL = 26
MOST_CELLS = 16
LABEL, SCHEDULE, ROW = 190, 850, 22
MOST_TASKS = 1_000
KINDS = {**WORDS, "b": "before", "u": "update"}
TASKS = dict(zip("FBIWub", COLOURS, strict=False))
STYLE = (
    ".autopar{font:14px/1.5 system-ui,sans-serif;max-width:1100px}"
    ".autopar table{border-collapse:collapse;margin:4px 0 16px}"
    ".autopar th,.autopar td{text-align:left;padding:2px 12px 2px 0;border-bottom:1px solid #8884;vertical-align:top}"
    ".autopar .n{text-align:right;font-variant-numeric:tabular-nums}"
    ".autopar code{font:13px ui-monospace,monospace}"
    ".autopar h4{margin:14px 0 2px}"
    ".autopar svg text{font:12px system-ui,sans-serif;fill:currentColor}"
)


def plan_html(plan: Plan) -> str:
    """The plan's header, mesh, where time and memory go, leaves and collectives, as a self-contained fragment."""
    parts = [
        f"<style>{STYLE}</style>",
        f"<h3>Plan for {escape(plan.target or 'a function')}</h3>",
        _table((), [(f"<b>{escape(what)}</b>", escape(text)) for what, text in header_rows(plan)]),
        _titled("Mesh", mesh_svg(plan.mesh)),
        _titled("Time of one step", bars_svg(plan.cost_split)),
        _titled("Memory per device at the peak", memory_svg(plan)),
        _titled("Stages; forward and backward of one microbatch", _stage_table(plan)),
        _titled("Schedule", schedule_svg(plan)),
        _titled("Leaves", _leaf_table(plan)),
        _titled("Collectives", _collective_table(plan)),
        _titled("Notes", "".join(f"<div>{escape(note)}</div>" for note in plan.notes)),
    ]
    return f'<div class="autopar">{"".join(parts)}</div>'


def _titled(title: str, body: str) -> str:
    return f"<h4>{escape(title)}</h4>{body}" if body else ""


def mesh_svg(mesh: LogicalMesh) -> str:
    """The mesh as a grid of device numbers, its minor axis from left to right; large ones are cut short."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = mesh.num_devices // columns
    shown_rows, shown_columns = min(rows, MOST_CELLS), min(columns, MOST_CELLS)
    cells = [_cell(r, c, r * columns + c) for r in range(shown_rows) for c in range(shown_columns)]
    down = ", ".join(f"{n}={s}" for n, s in zip(mesh.names[:-1], mesh.sizes[:-1], strict=True))
    across = f"{mesh.names[-1]}={mesh.sizes[-1]}" if mesh.names else "one device"
    cut = "" if (shown_rows, shown_columns) == (rows, columns) else f" (the first {shown_rows} x {shown_columns} shown)"
    words = f"{across} across{f'; {down} down' if down else ''}{cut}"
    height = shown_rows * CELL + 22
    label = f'<text x="0" y="{height - 5}">{escape(words)}</text>'
    return _svg(max(shown_columns * CELL + 2, WIDTH), height, "".join(cells) + label, f"mesh {mesh}")


def _cell(row: int, column: int, device: int) -> str:
    x, y = column * CELL + 1, row * CELL + 1
    box = f'<rect x="{x}" y="{y}" width="{CELL - 4}" height="{CELL - 4}" rx="3" fill="{COLOURS[0]}" fill-opacity="0.25"/>'
    return f'{box}<text x="{x + (CELL - 4) / 2:g}" y="{y + 15}" text-anchor="middle">{device}</text>'


def bars_svg(entries: Sequence[tuple[str, float]]) -> str:
    """A bar for each entry, the longest first, with its share of their sum."""
    shown = sorted((e for e in entries if e[1] > 0), key=lambda e: -e[1])
    if not shown:
        return ""
    total, most, body = sum(v for _, v in shown), shown[0][1], []
    for i, (what, value) in enumerate(shown):
        y, width = i * 22, 260 * value / most
        words = f"{seconds_text(value)}, {percent_text(value / total)}"
        body.append(f'<text x="0" y="{y + 15}">{escape(what)}</text>')
        body.append(f'<rect x="180" y="{y + 3}" width="{width:.1f}" height="15" fill="{COLOURS[i % len(COLOURS)]}"/>')
        body.append(f'<text x="{188 + width:.1f}" y="{y + 15}">{escape(words)}</text>')
    return _svg(WIDTH, 22 * len(shown), "".join(body), "predicted seconds by kind")


def memory_svg(plan: Plan) -> str:
    """What is live at the peak as one stacked bar, against the budget."""
    peak, budget = plan.predicted.peak_bytes, memory_budget(plan)
    scale = max(peak, budget or 0)
    if not scale:
        return ""
    parts = sorted((e for e in plan.live if e[1] > 0), key=lambda e: -e[1]) or [("peak", peak)]
    body, x, lines = [], 0.0, []
    for i, (what, nbytes) in enumerate(parts):
        colour = COLOURS[i % len(COLOURS)]
        width = WIDTH * nbytes / scale
        body.append(f'<rect x="{x:.1f}" y="2" width="{width:.1f}" height="20" fill="{colour}"><title>{escape(what)}</title></rect>')
        x += width
        if i < len(COLOURS):
            y = 44 + 18 * i
            lines.append(f'<rect x="0" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
            lines.append(f'<text x="16" y="{y}">{escape(f"{bytes_text(nbytes)}  {what}")}</text>')
    if budget:
        at = WIDTH * budget / scale
        body.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="24" stroke="{OVER_BUDGET}" stroke-width="2"/>')
        lines.append(f'<text x="{WIDTH}" y="38" text-anchor="end">{escape(f"{bytes_text(peak)} of {bytes_text(budget)}")}</text>')
    return _svg(WIDTH + 2, 40 + 18 * min(len(parts), len(COLOURS)), "".join(body + lines), "memory at the peak")


def schedule_svg(plan: Plan) -> str:
    """What each group of devices does when, a row for each; the first tasks of a long schedule."""
    if not plan.stages:
        return ""
    found = stage_timeline(plan)
    spans = sorted((s for s in found.spans if s.track in found.devices), key=lambda s: s.start_s)
    shown = spans[:MOST_TASKS]
    end = found.seconds if len(shown) == len(spans) else max(s.start_s + s.seconds for s in shown)
    body = [f'<text x="0" y="{ROW * d + 12}">{escape(name)}</text>' for d, name in enumerate(found.devices)]
    for s in shown:
        x, width = LABEL + SCHEDULE * s.start_s / end, SCHEDULE * s.seconds / end
        place = f'x="{x:.2f}" y="{ROW * found.devices.index(s.track)}" width="{width:.2f}" height="{ROW - 4}"'
        what = f"{s.name}: {seconds_text(s.seconds)}"
        body.append(f'<rect {place} fill="{TASKS[s.name[0]]}" stroke="#fff" stroke-width="0.5"><title>{escape(what)}</title></rect>')
    cut = "" if len(shown) == len(spans) else f", the first {MOST_TASKS} of {len(spans)} tasks"
    kinds = dict.fromkeys(s.name[0] for s in shown)
    y = ROW * len(found.devices) + 16
    words = " ".join(f'<tspan fill="{TASKS[k]}">&#9632;</tspan> {KINDS[k]}' for k in kinds)
    body.append(f'<text x="0" y="{y}">{words}; {escape(seconds_text(end))}{cut}</text>')
    return _svg(LABEL + SCHEDULE, y + 6, "".join(body), "schedule")


def _svg(width: float, height: float, body: str, label: str) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{body}</svg>'


def _stage_table(plan: Plan) -> str:
    return _table(COLUMNS, [tuple(map(escape, row)) for row in stage_rows(plan)])


def _leaf_table(plan: Plan) -> str:
    rows = [
        (_code(g.path), *stage_cells(plan, stages_text(g.stages)), str(g.count), escape(g.role))
        + (_code(g.type_text), _code(str(g.sharding)), bytes_text(g.nbytes))
        for g in fold_leaves(plan.inputs, plan.mesh)
    ]
    return _table(("leaf", *stage_columns(plan), "number", "role", "type", "sharding", "per device"), rows)


def _collective_table(plan: Plan) -> str:
    rows = [
        (
            *(escape(text) for text in (g.kind, *stage_cells(plan, g.stage), axes_text(g.axes), g.phase, g.purpose)),
            *(str(g.count), str(g.times), bytes_text(g.nbytes), seconds_text(g.seconds)),
        )
        for g in fold_collectives(plan.collectives)
    ]
    return _table(("kind", *stage_columns(plan), "axes", "phase", "purpose", "number", "times", "bytes", "time"), rows)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; empty where there are no rows."""
    numeric = {i: ' class="n"' for i, c in enumerate(columns) if c in NUMERIC}

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{numeric.get(i, '')}>{c}</{tag}>" for i, c in enumerate(cells)) + "</tr>"

    body = "".join(row(r, "td") for r in rows)
    return f"<table>{row(columns, 'th') if columns else ''}{body}</table>" if body else ""
