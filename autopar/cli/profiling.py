"""`autopar profile`: measure the devices at hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from autopar.api.profile import profile as measure
from autopar.cli.console import SCHEMA, error_console, reporting, say
from autopar.cli.flags import Debug, Json
from autopar.errors import UsageError
from autopar.runtime import devices as at_hand

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def profile(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The profile, a .toml file. What it holds already is kept.")],
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="How long to measure, as in 60s or 5m.")] = "60s",
    devices: Annotated[int, typer.Option(min=1, metavar="N", help="CPU devices to simulate where there are no others.")] = 8,
    links: Annotated[
        str | None, typer.Option("--links", metavar="PRESET", help="Take the links of a preset, for devices not here.")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure the devices at hand: matmuls, memory, every collective over every mesh axis. Plans use the profile as --cluster FILE."""
    with reporting(json, debug) as report:
        limit = seconds(budget)
        at_hand.simulate(devices, only_cpu=False)
        with counting() as progress:
            found = measure(out, budget_s=limit, links=links, progress=progress)
        report.document = {
            "schema": SCHEMA,
            "file": str(out),
            "cluster": found.cluster.to_dict(),
            "curves": [asdict(each) for each in found.accuracy],
            **{name: getattr(found, name) for name in ("points", "added", "missing")},
            "failed": list(found.failed),
        }
        report.show(table(found), "", *(Text(line) for line in notes(found, out)))


def seconds(text: str) -> float:
    """A length of time.

    >>> seconds("60s"), seconds("1.5m"), seconds("90")
    (60.0, 90.0, 90.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if not found:
        raise UsageError(f"{text!r} is no length of time; write 60s, 5m or 1h.")
    return float(found[1]) * _UNITS[found[2]]


def table(found: Any) -> Table:
    """Each curve and how far prices are from its points."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column("curve", overflow="fold")
    for column in ("points", "median error", "worst", "spread of repeats"):
        shown.add_column(column, justify="right")
    for each in found.accuracy:
        shown.add_row(each.curve, str(each.points), *(f"{x:.1%}" for x in (each.median_error, each.worst_error, each.spread)))
    return shown


def notes(found: Any, out: Path) -> Iterator[str]:
    """What to know and to do next."""
    yield f"{found.points} points, {found.added} of them new, in {out}. Errors are those of the prices that plans would see."
    if found.missing:
        yield f"{found.missing} points are missing; run the same command again to measure them."
    for each in found.failed:
        yield f"could not be measured: {each}"
    yield f"Plan with it: --cluster {out}, or another shape of the same, --cluster {out}:NODESxDEVICES."


@contextmanager
def counting() -> Iterator[Callable[[int, int, str], None]]:
    """A bar of points on standard error, ten lines or so where that is no terminal."""
    console = error_console()
    what = "Measuring"
    if not console.is_terminal:
        say(what)
        shown = [-1]

        def tell(done: int, total: int, curve: str) -> None:
            tenth = done * 10 // max(total, 1)
            if tenth > shown[0]:
                shown[0] = tenth
                say(f"  {done} of {total} points")

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[curve]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None, curve="")
        yield lambda done, total, curve: bar.update(task, completed=done, total=total, curve=curve)
