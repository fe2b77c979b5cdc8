"""`autopar plan`, `explain`, `diff`: nothing here needs a device."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autopar import api
from autopar.api import Plan
from autopar.api.drift import load_measured
from autopar.cli.console import Report, reporting, working, write_text
from autopar.cli.flags import Batch, Debug, Json, Keyword, with_options
from autopar.cli.target import Target, keyword_arguments, load_target
from autopar.compiler import Options
from autopar.report.drift import drift_lines

TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help="A zoo name, package.module:callable or file.py:callable.")]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="C", help="PRESET:NODESxDEVICES, as in h100-sxm:2x8, or a .toml profile.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that was saved.")]


@with_options
def plan(
    target: TargetArgument,
    cluster: ClusterOption,
    options: Callable[[], Options],
    batch: Batch = None,
    keyword: Keyword = None,
    json: Json = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the plan as a page.")] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the plan, for `explain`, `diff` and Python.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the predicted step for Perfetto.")] = None,
    debug: Debug = False,
) -> None:
    """Plan a target for a cluster, which need not be here: prints what was decided and what it is predicted to cost."""
    with reporting(json, debug) as report:
        made = make_plan(load_target(target, batch, keyword_arguments(keyword or ())), cluster, options())
        if save:
            made.save(save)
        if html:
            write_text(str(html), page(made))
        if trace:
            write_text(str(trace), made.perfetto())
        report.document = made.to_dict()
        report.show(made)


def make_plan(target: Target, cluster: str, options: Options) -> Plan:
    """Plan a target, with progress on standard error."""
    with working(f"Planning {target.name} for {cluster}") as progress:
        return api.plan(target.function, target.args, cluster, options=options, target=target.name, progress=progress)


def page(made: Plan) -> str:
    """The plan's HTML fragment as a page of its own."""
    title = escape(f"Plan for {made.target}")
    return f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n{made.html()}\n</html>'


def explain(
    plan: PlanFile,
    tensor: Annotated[str | None, typer.Argument(metavar="TENSOR", help="A leaf's path, a collective's id or a source line.")] = None,
    debug: Debug = False,
) -> None:
    """Explain a saved plan: what its time and memory go to; with TENSOR, what happens to that and why.

    After `autopar run --save PLAN`, also where the prediction was off."""
    with reporting(debug=debug) as report:
        read = Plan.load(plan)
        _lines(report, read.explain(tensor))
        measured = load_measured(plan) if tensor is None else None
        if measured:
            _lines(report, "\n".join(["", "Where the prediction was off", *(f"  {line}" for line in drift_lines(read.data, measured))]))


def diff(
    before: Annotated[Path, typer.Argument(metavar="PLAN")], after: Annotated[Path, typer.Argument(metavar="PLAN")], debug: Debug = False
) -> None:
    """Show what differs between two saved plans."""
    with reporting(debug=debug) as report:
        _lines(report, Plan.load(before).diff(Plan.load(after)))


def _lines(report: Report, text: str) -> None:
    report.show(Text(text.rstrip("\n")))
