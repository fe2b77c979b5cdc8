"""The page of the docs that shows fidelity: `python -m benchmarks.fidelity.page ROWS.json... PAGE.md`, from what `--json` wrote.

Beside the page it writes `PAGE-time.svg` and `PAGE-memory.svg`, predicted over published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

from benchmarks.fidelity.judge import Row, groups, summaries, told

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, after the backend is chosen

HEAD = """# Predictions beside published measurements

Made by `python -m benchmarks.fidelity` and `python -m benchmarks.fidelity.page`; [costs](costs.md) says what is priced how. A row is mapped
to `autopar.manual` on the zoo's models, planned with few layers, and drawn on in a straight line, for layers are alike. Rows in pipeline
stages are put together from such parts, in the order of their schedule. One efficiency for each machine and software is fitted to three
rows at most (`benchmarks/fidelity/calibration.toml`); those rows count nowhere below, save in the order of plans.

This is no blind test: what each software does (`benchmarks/fidelity/case.py`: overlap, sums between slices, decomposed collectives, the
rate of fused attention, fused kernels, what runs again in backward, passes of the optimiser, 16-bit state of Alpa's mixtures of experts),
and which rows to calibrate on, was settled with these errors in view. Rows of other tables are the test.
"""


def rows(files: Sequence[Path]) -> list[Row]:
    """The rows of the files; those of a later file replace earlier ones."""
    found: dict[tuple[str, str, int], Row] = {}
    for file in files:
        for each in json.loads(file.read_text())["rows"]:
            row = Row(**each)
            found[row.file, row.table, row.row] = row
    return list(found.values())


def text(found: Sequence[Row], name: str) -> str:
    """The page."""
    parts = [HEAD, _tables(found), f"\n![predicted over published seconds]({name}-time.svg)\n", _orders(found), _memory(found, name)]
    return "\n".join([*parts, _skipped(found)])


def _tables(found: Sequence[Row]) -> str:
    lines = ["\n## Step times\n", "| table | rows | median error | 90th percentile | bias |", "|---|---|---|---|---|"]
    for s in summaries(found):
        if s.rows:
            lines.append(f"| {s.table} | {s.rows} | {s.median_error:.1%} | {s.p90_error:.1%} | {s.bias:+.1%} |")
    return "\n".join(lines)


def _orders(found: Sequence[Row]) -> str:
    ordered = groups(found)
    lines = ["\n## Which plan is faster\n", "| plans for one model and machine | plans | rank | regret of ours |", "|---|---|---|---|"]
    lines += [f"| {g.group}{'' if g.counts else ' (partly usable)'} | {g.plans} | {g.rank:+.2f} | {g.regret:.1%} |" for g in ordered]
    for name, some in (("mean of usable rows", [g for g in ordered if g.counts]), ("mean of all", ordered)):
        if some:
            lines.append(f"| **{name}** | | {mean(g.rank for g in some):+.2f} | {mean(g.regret for g in some):.1%} |")
    return "\n".join(lines)


def _memory(found: Sequence[Row], name: str) -> str:
    right, of = told(found)
    lines = ["\n## Memory\n", f"Of {of} rows of which it is known whether they fit, {right} are predicted as such.\n"]
    lines += ["| table | rows | median error |", "|---|---|---|"]
    lines += [f"| {s.table} | {s.memory_rows} | {s.memory_median_error:.1%} |" for s in summaries(found) if s.memory_rows]
    return "\n".join([*lines, f"\n![predicted over published GiB]({name}-memory.svg)\n"])


def _skipped(found: Sequence[Row]) -> str:
    counts: dict[tuple[str, str], int] = {}
    for row in found:
        if row.reason:
            key = f"{row.file}: {row.table}", row.reason
            counts[key] = counts.get(key, 0) + 1
    lines = ["## Not predicted\n", "| table | rows | why |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {table} | {count} | {reason} |" for (table, reason), count in counts.items())]) + "\n"


def draw(points: dict[str, list[tuple[float, float]]], unit: str, path: Path) -> None:
    """Predicted over published, both axes logarithmic, a colour for each table."""
    figure, axes = plt.subplots(figsize=(6.5, 5.5))
    for label, pairs in points.items():
        axes.scatter(*zip(*pairs, strict=True), s=14, label=label, alpha=0.8)
    every = [x for pairs in points.values() for pair in pairs for x in pair]
    ends = [min(every), max(every)]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="gray", alpha=0.15)
    axes.set(xscale="log", yscale="log", xlabel=f"published {unit}", ylabel=f"predicted {unit}")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def pairs(found: Sequence[Row], published: str, predicted: str, scale: float = 1.0) -> dict[str, list[tuple[float, float]]]:
    """Points by table of the rows that count."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in found:
        both: tuple[Any, Any] = getattr(row, published), getattr(row, predicted)
        if all(both) and not row.calibration:
            points.setdefault(row.table.split("(")[0].strip()[:40], []).append((both[0] / scale, both[1] / scale))
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path, metavar="ROWS.json")
    parser.add_argument("page", type=Path, metavar="PAGE.md")
    options = parser.parse_args(arguments)
    found, page = rows(options.rows), options.page
    page.write_text(text(found, page.stem))
    draw(pairs(found, "published", "predicted"), "seconds", page.with_name(f"{page.stem}-time.svg"))
    draw(pairs(found, "published_bytes", "predicted_bytes", 2**30), "GiB", page.with_name(f"{page.stem}-memory.svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
