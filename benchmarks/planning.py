"""What planning costs: seconds of CPU for tracing, conversion, enumeration and solving, and the proof that came out.

    python -m benchmarks.planning gpt-350m:8:32 gpt-350m:2x8:32

Each case is MODEL:MESH:BATCH. Conversion to a graph is to take no longer than the trace itself (`convert_s <= trace_s`).
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass

import jax
from rich.table import Table

import cost_models
from autopar import models
from autopar.compiler import Compilation, Options, compile_plan
from autopar.errors import InfeasibleError
from autopar.ir.mesh import LogicalMesh
from autopar.report.table import render
from autopar.trace import arguments, compat
from autopar.trace.flatten import flatten
from autopar.trace.trace import trace
from benchmarks.common import add_json_option, finish

DEFAULT = ("gpt-350m:8:32", "gpt-350m:2x8:32")


@dataclass(frozen=True)
class Row:
    """CPU seconds of one planning run. `trace_s` is JAX's own trace, `convert_s` the way from jaxpr to graph."""

    model: str
    mesh: str
    devices: int
    ops: int
    trace_s: float
    convert_s: float
    enumerate_s: float
    solve_s: float
    stages_s: float
    total_cpu_s: float
    peak_rss_bytes: int
    status: str
    gap: float


def measure(case: str, preset: str, options: Options) -> Row:
    """Plan one case on one logical mesh."""
    model, mesh_text, batch = case.split(":")
    sizes = tuple(int(n) for n in mesh_text.split("x"))
    mesh = LogicalMesh(("x", "y", "z")[: len(sizes)], sizes)
    shape = mesh_text if len(sizes) > 1 else f"1x{mesh_text}"
    step, args = models.build(model, batch=int(batch))
    begin = time.process_time()
    trace_s, convert_s = _trace_seconds(step, args)
    traced = trace(step, args)
    started = time.process_time()
    compilation = Compilation(traced, cost_models.load_cluster(f"{preset}:{shape}"), (mesh,), options, model)
    try:
        plan = compile_plan(compilation).plan
        assert plan is not None
        status, gap, timings = plan.solve.status, plan.solve.gap, plan.timings
        enumerate_s, solve_s = timings.enumerate_s, timings.solve_s
    except InfeasibleError:
        status, gap, enumerate_s, solve_s = "infeasible", float("nan"), 0.0, time.process_time() - started
    total = time.process_time() - begin - trace_s - convert_s
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Row(
        model, str(mesh), mesh.num_devices, len(traced.graph.ops), trace_s, convert_s, enumerate_s, solve_s, 0.0, total, rss, status, gap
    )


def _trace_seconds(step: object, args: object) -> tuple[float, float]:
    """CPU seconds of `jax.make_jaxpr` alone, and of turning its result into a graph."""
    leaves, signature = arguments.split(tuple(args), {})  # type: ignore[arg-type]

    def flat(*traced: object) -> list[object]:
        positional, keyword = signature.rebuild(traced)
        return jax.tree.leaves(step(*positional, **keyword))  # type: ignore[operator]

    begin = time.process_time()
    closed = compat.make_jaxpr(flat, [compat.abstract(x) for x in leaves])
    middle = time.process_time()
    flatten(closed)
    return middle - begin, time.process_time() - middle


def table(rows: list[Row]) -> str:
    """The rows as text."""
    shown = Table("model", "mesh", "ops", "trace", "convert", "enumerate", "solve", "total CPU s", "status", "gap")
    for r in rows:
        seconds = [f"{s:.2f}" for s in (r.trace_s, r.convert_s, r.enumerate_s, r.solve_s, r.total_cpu_s)]
        shown.add_row(r.model, r.mesh, str(r.ops), *seconds, r.status, f"{r.gap:.2g}")
    return render(shown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=DEFAULT, help="MODEL:MESH:BATCH, e.g. gpt-350m:2x8:32")
    parser.add_argument("--preset", default="h100-sxm")
    parser.add_argument("--time-limit", type=float, default=None)
    add_json_option(parser)
    options = parser.parse_args(argv)
    rows = []
    for case in options.cases:
        print(f"planning {case}", file=sys.stderr)
        rows.append(measure(case, options.preset, Options(time_limit_s=options.time_limit)))
    passed = all(r.convert_s <= r.trace_s for r in rows)
    return finish(rows, passed, table(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
