"""The command `python -m benchmarks.fidelity FILE...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import benchmarks.fidelity as package
from benchmarks.common import add_json_option, finish
from benchmarks.fidelity.judge import Row, fits, fitted, groups, judge, passed, summaries, told
from benchmarks.fidelity.read import read


def table(rows: Sequence[Row]) -> str:
    """Errors by table, groups of plans, memory, and what is not predicted."""
    lines = ["rows  median    p90    bias  memory rows  median  table"]
    for s in summaries(rows):
        numbers = f"{s.rows:4}  {_percent(s.median_error)} {_percent(s.p90_error)} {_percent(s.bias, '+')}"
        lines.append(f"{numbers}  {s.memory_rows:11}  {_percent(s.memory_median_error)}  {s.table}")
    lines += ["", *_orders(rows)]
    right, of = told(rows)
    lines += [f"fits or not: {right} of {of} as published"] if of else []
    skipped: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.reason:
            key = f"{row.file}: {row.table}", row.reason
            skipped[key] = skipped.get(key, 0) + 1
    lines += [f"not predicted: {count} of {name}: {reason}" for (name, reason), count in skipped.items()]
    return "\n".join(lines)


def _line(row: Row) -> str:
    memory = f"{(row.published_bytes or 0) / 2**30:6.2f} {(row.predicted_bytes or 0) / 2**30:6.2f}"
    seconds = f"{row.published:9.4g}" if row.published else f"{'did not fit' if row.fits is False else '':>9}"
    notes = " (calibration)" if row.calibration else "" if row.usable == "Y" else f" ({row.usable})"
    return f"{seconds}  {row.predicted:9.4g}  {_percent(row.error, '+')}  {memory}  {row.table} {row.row}{notes}"


def _orders(rows: Sequence[Row]) -> list[str]:
    found = groups(rows)
    lines = [f"rank {g.rank:+.2f}, regret {g.regret:.1%} among {g.plans} plans: {g.group}" for g in found]
    for name, some in (("of usable rows", [g for g in found if g.counts]), ("of all", found)):
        if some:
            lines.append(f"rank {mean(g.rank for g in some):+.2f}, regret {mean(g.regret for g in some):.1%} on average {name}")
    return lines


def _percent(number: float | None, sign: str = "") -> str:
    return f"{'':>6}" if number is None else f"{number:{sign}6.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies to the calibration rows and print them")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.fit:
        for fit in fitted(read(options.files), fits()):
            print(f"{fit.machine} {fit.software}: {fit.efficiency:.3f}")
        return 0
    rows = []
    for row in judge(read(options.files), fits()):
        rows.append(row)
        if row.predicted is not None:
            print(_line(row), file=sys.stderr, flush=True)
    return finish(rows, passed(rows), table(rows), options.json, summary=[*summaries(rows), *groups(rows)])


if __name__ == "__main__":
    raise SystemExit(main())
