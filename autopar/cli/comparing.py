"""`autopar baselines`: the plan beside what people do by hand, on the same cost models."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from autopar import api
from autopar.cli.console import FAILED_CHECK, SCHEMA, reporting, working
from autopar.cli.flags import Batch, Debug, Json, Keyword, with_options
from autopar.cli.planning import ClusterOption, TargetArgument
from autopar.cli.target import keyword_arguments, load_target
from autopar.compiler import Options
from autopar.report.compare import comparison_rows, comparison_table


@with_options
def baselines(
    target: TargetArgument,
    cluster: ClusterOption,
    options: Callable[[], Options],
    batch: Batch = None,
    keyword: Keyword = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Price the plan beside data parallelism, ZeRO-1/2/3, FSDP and the best of the data x tensor grid. Nothing runs."""
    with reporting(json, debug) as report:
        loaded, asked = load_target(target, batch, keyword_arguments(keyword or ())), options()
        with working(f"Planning {target} for {cluster} in many ways") as progress:
            found = api.baselines(loaded.function, loaded.args, cluster, options=asked, target=target, progress=progress)
        report.show(comparison_table(found.rows), "", Text(_verdict(found)))
        report.document = {"schema": SCHEMA, "rows": comparison_rows(found.rows), "tried": found.tried, "passed": found.passed}
        report.status = 0 if found.passed else FAILED_CHECK


def _verdict(found: api.Comparison) -> str:
    """One sentence on how the plan compares."""
    best = found.best
    if best.status != "planned":
        return f"None of the {found.tried} baselines fits the memory."
    if found.passed:
        return f"The best of {found.tried} baselines, {best.setting.name}, takes {best.ratio:.3f} times as long as the plan."
    return f"The plan is slower than {best.setting.name} ({best.setting}), {best.ratio:.4f} of its time: the search missed it."
