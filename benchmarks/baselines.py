"""The plan beside what people do by hand: priced on the same cost models, and measured on simulated devices.

    python -m benchmarks.baselines
    python -m benchmarks.baselines gpt-350m@h100-sxm:8@64@layers=4 --json -
    python -m benchmarks.baselines --measure --markdown docs/baselines.md

Each case is MODEL@CLUSTER@BATCH, or MODEL@CLUSTER@BATCH@FIELD=VALUE,... with fields of the model's config. No baseline may be faster than
the plan. With `--measure` six tiny models run on eight simulated devices, under the plan and under each hand-written sharding of
`benchmarks.hand`, in turn; what that shows is reported, since times of simulated devices that share their cores are no bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rich.table import Table

import cost_models
from autopar import api, models
from autopar.cli.target import keyword_arguments
from autopar.errors import AutoparError
from autopar.report.table import render
from autopar.runtime import devices
from benchmarks.common import add_json_option, finish

CASES = (
    "gpt-350m@h100-sxm:8@64@layers=2",
    "gpt-2.6b@a100-80:8@32@layers=1",
    "llama3-8b@h100-sxm:8@16@layers=1,seq=4096",
    "moe-1.3b@a100-40:8@64@layers=2",
    "vit-l16@v5e:8@256@layers=2",
    "t5-base@v100-p3:8@64@layers=1",
    "wresnet-250m@h100-sxm:8@128@stages=(1,1)",
    "mlp-small@h100-sxm:8@4096",
    "mlp-wide@h100-sxm:8@64",
    "gpt-2.6b@h100-sxm:8x8@256@layers=1",
    "mlp-small@v5e:8x8@4096",
    "mlp-wide@h100-sxm:8x8@64",
)
MEASURED = ("mlp-tiny", "gpt-tiny", "llama-tiny", "moe-tiny", "vit-tiny", "wresnet-tiny")
DEVICES = 8


@dataclass(frozen=True)
class Row:
    """A way to run a case: seconds per step, priced or measured, and its time over the plan's. None where it does not fit."""

    model: str
    cluster: str
    batch: int | None
    fields: str
    name: str
    setting: str
    kind: str
    step_time_s: float | None
    peak_bytes: int
    ratio: float | None
    status: str


def priced(case: str) -> list[Row]:
    """The plan's row, and one for each baseline."""
    model, cluster, batch, *rest = case.split("@")
    fields = rest[0] if rest else ""
    step, args = models.build(model, batch=int(batch), **keyword_arguments(_split(fields)))
    found = api.baselines(step, args, cost_models.load_cluster(cluster), target=model)
    return [
        Row(model, cluster, int(batch), fields, name, how, "priced", _finite(seconds), nbytes, _finite(ratio), status)
        for name, how, seconds, nbytes, ratio, status in found.rows
    ]


def _split(fields: str) -> list[str]:
    """`a=1,b=(2,3)` as its parts: commas inside brackets part nothing."""
    parts, depth = [""], 0
    for letter in fields:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None


def beaten(rows: Sequence[Row], gap: float = api.Options().gap) -> list[Row]:
    """The priced baselines that are faster than their plan, beyond the gap that its solve was allowed."""
    return [r for r in rows if r.kind == "priced" and r.ratio is not None and r.ratio < 1.0 - gap - 1e-6]


def measured(names: Sequence[str], rounds: int) -> list[Row]:
    """Tiny models under the plan and under hand-written shardings, on simulated devices, in turn."""
    from benchmarks import hand

    found = []
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        times = hand.step_seconds(name, DEVICES, rounds)
        for way, seconds in times.items():
            ratio = seconds / times["autopar"]
            found.append(Row(name, f"host:{DEVICES}", None, "", way, "", "measured", seconds, 0, ratio, "ran"))
    return found


def table(rows: Sequence[Row]) -> str:
    """A line per case: the plan, the best baseline, and how much longer each takes."""
    shown = Table(*_HEADER)
    for cells in _lines(rows):
        shown.add_row(*cells)
    return render(shown)


def markdown(rows: Sequence[Row], command: str) -> str:
    """The same as a page for the docs."""
    lines = [" | ".join(cells) for cells in (_HEADER, ["---"] * len(_HEADER), *_lines(rows))]
    return PAGE.format(command=command, table="\n".join(f"| {line} |" for line in lines))


_HEADER = ("model", "cluster", "batch", "kind", "plan ms", "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "grid", "best")
PAGE = """# The plan beside what people do by hand

Made by `{command}`.

Each number is a baseline's step time over the plan's: 1.10 means that the plan is faster by a tenth, below 1 that the baseline is. *Priced*
rows are priced on the same cost models; `-` does not fit the memory. FSDP is ZeRO-3 that makes every block's activations again. The grid
is the best of all data x tensor shapes, with and without sequence parallelism, ZeRO levels, and what is made again. Models have their
published widths and fewer layers.

*Measured* rows ran on eight simulated devices that share one machine's cores, plan and hand-written `jit` shardings in turn (median
step). They say what a step costs there, not on accelerators, and swing with what else the machine does. There ZeRO-2 and FSDP are not run,
`grid` is 2 x 4 by column and row, and `best` counts the step with everything on every device too.

{table}
"""


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    cases: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        cases.setdefault((r.model + (f" {r.fields}" if r.fields else ""), r.cluster, str(r.batch or ""), r.kind), []).append(r)
    return [[*case, *_numbers(found)] for case, found in cases.items()]


def _numbers(rows: Sequence[Row]) -> list[str]:
    mine = next(r for r in rows if r.name == "autopar")
    ratio = {r.name: r.ratio for r in rows if r.name != "autopar"}
    best = min((x for x in ratio.values() if x is not None), default=None)
    shown = [ratio.get(name) for name in _HEADER[5:-1]]
    return [f"{1e3 * (mine.step_time_s or 0):.4g}", *("-" if x is None else f"{x:.3f}" for x in (*shown, best))]


def _command(options: argparse.Namespace) -> str:
    """What makes a page like this one."""
    cases = [] if options.cases == CASES else list(options.cases)
    words = [*cases, *["--measure"] * options.measure, "--markdown", options.markdown]
    return " ".join(["python -m benchmarks.baselines", *words])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL@CLUSTER@BATCH[@FIELD=VALUE,...]")
    parser.add_argument("--measure", action="store_true", help="also run tiny models on simulated devices")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each that are measured")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as a page")
    add_json_option(parser)
    options = parser.parse_args(argv)
    if options.measure:
        devices.simulate(DEVICES, only_cpu=True)
    rows: list[Row] = []
    failed = 0
    for case in options.cases:
        print(f"pricing {case}", file=sys.stderr)
        try:
            rows += priced(case)
        except AutoparError as error:
            failed += 1
            print(f"{case}: {error}", file=sys.stderr)
    rows += measured(MEASURED, options.rounds) if options.measure else []
    if options.markdown:
        Path(options.markdown).write_text(markdown(rows, _command(options)))
    for r in beaten(rows):
        print(f"faster than the plan: {r.model} on {r.cluster}: {r.name} ({r.setting}), {r.ratio:.5f} of its time", file=sys.stderr)
    return finish(rows, not failed and not beaten(rows), table(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
