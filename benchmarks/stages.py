"""What the dynamic programme over layers and submeshes costs in CPU seconds, and how near its closed form is to the simulator.

    python -m benchmarks.stages
    python -m benchmarks.stages 96:128x8:128:1f1b:0.5 --every-count

Each case is LAYERS:NODESxDEVICES:MICROBATCHES:SCHEDULE[:MEMORY], MEMORY being the share of what one stage would need without remat.
Layers are made up: an embedding, equal blocks, a head, with four tensor-parallel widths, kept or made again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.table import Table

from autopar.errors import InfeasibleError
from autopar.interop.slice import plan_stages
from autopar.interop.stages import Chain, Choice, Grid, Link, StagePlan
from autopar.interop.submesh import Submesh, submeshes
from autopar.report.table import render
from autopar.schedule.formulas import Formula
from benchmarks.common import add_json_option, finish

DEFAULT = (
    *("96:128x8:128:1f1b", "96:128x8:128:1f1b:0.3", "96:128x8:8:1f1b", "96:128x8:128:gpipe", "96:128x8:128:zero_bubble"),
    *("96:128x8:128:zero_bubble:0.3", "96:128x8:128:interleaved", "48:8x8:64:1f1b:0.3"),
)
BAR_S = 2.0
"""CPU seconds for 1F1B without a memory limit."""


@dataclass(frozen=True)
class Row:
    """One search. `seconds` is the plan's closed form, `simulated` its makespan; `stages` 0 where nothing fits."""

    case: str
    oracle_calls: int
    oracle_s: float
    search_s: float
    stages: int
    submeshes: str
    seconds: float
    simulated: float


class Model:
    """Made-up layers, as an oracle that keeps account of its own time."""

    def __init__(self, layers: int):
        self.work = [0.5, *[1.0] * (layers - 2), 1.7]
        self.chain = Chain(("embed", *["block"] * (layers - 2), "head"), *[(0.0, *[1e9] * (layers - 1), 0.0)] * 2)
        self.calls, self.seconds = 0, 0.0

    def oracle(self, start: int, stop: int, submesh: Submesh, microbatches: int) -> list[Choice]:
        begin = time.process_time()
        found = list(self._choices(sum(self.work[start:stop]), stop - start, submesh.size, microbatches))
        self.calls, self.seconds = self.calls + 1, self.seconds + time.process_time() - begin
        return found

    def _choices(self, work: float, layers: int, size: int, microbatches: int) -> Iterator[Choice]:
        for width in (1, 2, 4, 8):
            if width > size:
                continue
            slower = (1 + 0.02 * math.log2(size)) / (0.9 - 0.05 * math.log2(width))
            forward = 20 * work / microbatches / size * slower
            update = 0.005 * layers / width * math.log2(size / width + 1)
            fixed = layers * 2e9 / width / max(1.0, size / width) ** 0.5
            for again, kept in ((0, 6e12), (1, 6e11)):
                residual = layers * kept / microbatches / size
                yield Choice(forward, (2 + again) * forward, forward, update, fixed, residual, (width, again))


def link(a: Submesh, b: Submesh) -> Link:
    """Each device sends over its own share of the network."""
    return Link(4e-11 / min(a.size, b.size), 1e-5)


def measure(case: str, every_count: bool) -> Row:
    """One case."""
    layers, cluster, microbatches, schedule, *memory = case.split(":")
    nodes, devices = map(int, cluster.split("x"))
    model = Model(int(layers))
    grid = Grid(nodes, devices, submeshes(nodes, devices, every_count), link)
    if memory:
        whole = max(c.fixed_bytes + c.residual_bytes for c in model.oracle(0, int(layers), grid.submeshes[-1], int(microbatches)))
        grid = replace(grid, memory_bytes=float(memory[0]) * whole)
    model.calls, model.seconds = 0, 0.0
    formula = Formula(schedule, int(microbatches), 2 if schedule == "interleaved" else 1)
    begin = time.process_time()
    plan: StagePlan | None
    try:
        plan = plan_stages(model.chain, grid, model.oracle, [formula])
    except InfeasibleError:
        plan = None
    spent = time.process_time() - begin - model.seconds
    if plan is None:
        return Row(case, model.calls, model.seconds, spent, 0, "", math.inf, math.inf)
    shown = " ".join(str(stage.submesh) for stage in plan.stages)
    return Row(case, model.calls, model.seconds, spent, len(plan.stages), shown, plan.seconds, plan.simulation.makespan_s)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    shown = Table("case", "oracle calls", "oracle s", "search s", "stages", "on", "closed form s", "simulated s")
    for r in rows:
        numbers = (str(r.oracle_calls), f"{r.oracle_s:.2f}", f"{r.search_s:.2f}", str(r.stages))
        shown.add_row(r.case, *numbers, r.submeshes, f"{r.seconds:.4g}", f"{r.simulated:.4g}")
    return render(shown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=DEFAULT, help="LAYERS:NODESxDEVICES:MICROBATCHES:SCHEDULE[:MEMORY]")
    parser.add_argument("--every-count", action="store_true", help="any number of whole nodes, not only powers of two")
    add_json_option(parser)
    options = parser.parse_args(argv)
    rows = []
    for case in options.cases:
        print(f"planning {case}", file=sys.stderr)
        rows.append(measure(case, options.every_count))
    timed = [r for r in rows if r.case.split(":")[3:] == ["1f1b"]]
    return finish(rows, all(r.search_s <= BAR_S for r in timed), table(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
