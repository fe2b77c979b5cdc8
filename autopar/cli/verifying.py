"""`autopar verify`: a plan against one device here, or against the compiler of hardware that is not here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from autopar.api import Plan
from autopar.cli.console import FAILED_CHECK, Report, reporting, working
from autopar.cli.flags import Batch, Debug, Json, Keyword, with_options
from autopar.cli.planning import make_plan
from autopar.cli.running import check_concrete, simulate, try_out
from autopar.cli.target import Target, keyword_arguments, load_target
from autopar.compiler import Options
from autopar.errors import UsageError
from autopar.report.brief import brief_table
from autopar.report.trial import check_lines
from autopar.runtime import devices
from autopar.runtime.foreign import COMPILERS, SURROUNDINGS
from autopar.runtime.verify import Verification

STEPS = 3


@with_options
def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET|PLAN", help="A target, or the .json file of a plan for one.")],
    options: Callable[[], Options],
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="C", help="What to plan for; a plan file knows.")] = None,
    compiler: Annotated[str | None, typer.Option("--compiler", metavar="NAME", help="tpu or cuda: compile for hardware not here.")] = None,
    batch: Batch = None,
    keyword: Keyword = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Check a plan: numbers, collectives, memory and time on devices here; with --compiler, collectives and memory by that compiler."""
    with reporting(json, debug) as report:
        if compiler is not None and compiler not in COMPILERS:
            raise UsageError(f"there is no compiler {compiler!r} to verify with; there are {' and '.join(COMPILERS)}.")
        saved = Plan.load(target) if target.endswith(".json") else None
        name, where = (saved.data.target, str(saved.data.cluster["name"])) if saved else (target, cluster or "host:8")
        if compiler is not None:
            _surround()
        else:
            simulate(cluster or where)
        loaded = load_target(name, batch, keyword_arguments(keyword or ()), abstract=compiler is not None)
        plan = saved or make_plan(loaded, where, options())
        report.show(brief_table(plan.data), "")
        _finish(report, plan, _verified(plan, loaded, compiler, saved is not None, options()))


def _verified(plan: Plan, target: Target, compiler: str | None, saved: bool, options: Options) -> Verification:
    if compiler is not None:
        with working(f"Compiling for {plan.mesh.num_devices} devices with the {compiler} compiler"):
            return plan.verify(target.function, target.args, compiler)
    check_concrete(target)
    if saved:
        return plan.verify(target.function, target.args, steps=STEPS)
    return try_out(plan, target, options, STEPS).verification


def _finish(report: Report, plan: Plan, found: Verification) -> None:
    """Show what was found, and set the command's document and status."""
    report.show(check_lines(found))
    report.document = plan.to_dict() | {"verification": asdict(found), "agree": found.agree}
    report.status = 0 if found.agree else FAILED_CHECK


def _surround() -> None:
    """Settle what the compilers' plugins look for, before JAX first asks for a device."""
    for name, value in SURROUNDINGS.items():
        os.environ.setdefault(name, value)
    devices.use_cpu_alone()
