"""What was planned beside what was found, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.ir.plan import Plan
from autopar.report.fold import cluster_name
from autopar.report.table import cells, titled_table
from autopar.report.units import bytes_text, seconds_text
from autopar.runtime.trial import Trial
from autopar.runtime.verify import Check, Verification


def trial_tables(plan: Plan, trial: Trial) -> Group:
    """Predicted beside measured, and planned beside compiled collectives, as a rich renderable."""
    return Group(_measured_table(plan, trial), "", _collective_table(plan, trial))


def _measured_table(plan: Plan, trial: Trial) -> RenderableType:
    p, m = plan.predicted, trial.memory
    table = titled_table("Predicted beside measured", "per device", "predicted", "measured", right=("predicted", "measured"))
    table.add_row(*cells("step time", seconds_text(p.step_time_s), seconds_text(trial.step_time_s)))
    table.add_row(*cells("  the plain program on one device", "", seconds_text(trial.reference_step_time_s)))
    table.add_row(*cells("arguments", bytes_text(p.argument_bytes), bytes_text(m["argument"])))
    table.add_row(*cells("temporaries", bytes_text(p.temp_bytes), bytes_text(m["temp"])))
    table.add_row(*cells("memory in all", bytes_text(p.peak_bytes), bytes_text(m["total"])))
    note = f"The prediction is for {cluster_name(plan)}. Time is the median step, without the first, and is not judged."
    return Group(table, Text(note, style="dim"))


def _collective_table(plan: Plan, trial: Trial) -> RenderableType:
    planned = [(c.kind, 1, c.nbytes * c.times) for c in plan.collectives]
    compiled = [(c.kind, max(1, len(c.ids)), c.nbytes * c.times) for c in trial.collectives]
    if not planned and not compiled:
        return Text("No collectives were planned, and none were compiled.")
    columns = ("planned", "bytes planned", "compiled", "bytes compiled")
    table = titled_table("Planned beside compiled collectives, per step", "kind", *columns, right=columns)
    for kind in dict.fromkeys(k for k, _, _ in (*planned, *compiled)):
        table.add_row(*cells(kind, *_sums(planned, kind), *_sums(compiled, kind)))
    return table


def _sums(entries: Iterable[tuple[str, int, int]], kind: str) -> tuple[str, str]:
    same = [(count, nbytes) for k, count, nbytes in entries if k == kind]
    return str(sum(c for c, _ in same)), bytes_text(sum(n for _, n in same))


def check_lines(verification: Verification) -> Text:
    """A line for each check, and one for all of them."""
    lines = [_check_line(c) for c in (verification.numbers, verification.collectives, verification.memory)]
    all_of_them = Text("ok: what was planned is what ran", "bold green") if verification.agree else Text("failed: see above", "bold red")
    return Text("\n").join([*lines, all_of_them])


def _check_line(check: Check) -> Text:
    sign = ("  ok      ", "green") if check.agree else ("  FAILED  ", "bold red")
    detail = f" ({check.detail})" if check.detail else ""
    return Text.assemble(sign, f"{check.name}: expected {check.expected}, found {check.actual}{detail}")
