"""What planning costs: seconds of CPU from the start of Python to the plan, what they are spent on, memory, and the proof that came out.

    python -m benchmarks.planning [CASE...] [--json -]

A case is one of the named ones, which have bars, or MODEL:MESH:BATCH, as in `gpt-350m:2x8:32`, with `*` for all logical meshes. Each
runs in a process of its own, so imports and peak memory are its own. `jaxprs` is the whole in multiples of `jax.make_jaxpr` alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
from rich.table import Table

import cost_models
from autopar import models
from autopar.compiler import Compilation, Options, compile_plan
from autopar.compiler.compilation import logical_meshes
from autopar.errors import InfeasibleError
from autopar.ir.mesh import LogicalMesh
from autopar.report.table import render
from autopar.trace.trace import trace
from benchmarks.common import add_json_option, finish


@dataclass(frozen=True)
class Case:
    """What is planned: a zoo model with other `fields`, a global batch, a cluster, and one logical mesh (None: all of them).

    `bar_s` is in CPU seconds, `bar_jaxprs` in multiples of the trace alone.
    """

    name: str
    model: str
    batch: int
    cluster: str
    mesh: tuple[int, ...] | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    bar_s: float | None = None
    bar_jaxprs: float | None = None


CASES = (
    Case("llama3-8b on (8)", "llama3-8b", 16, "h100-sxm:1x8", (8,), {}, 6.0, 2.0),
    Case("llama3-8b on (8,8)", "llama3-8b", 16, "h100-sxm:8x8", (8, 8), {}, 8.0, 3.0),
    Case("llama3-8b on (2,4,8)", "llama3-8b", 16, "h100-sxm:8x8", (2, 4, 8), {}, 20.0),
    Case("gpt-175b on (128,8)", "gpt-175b", 1536, "a100-80:128x8", (128, 8), {}, 30.0),
    Case("gpt-175b, all meshes", "gpt-175b", 1536, "a100-80:128x8", None, {}, 90.0),
    Case("gpt-175b, scanned, on (128,8)", "gpt-175b", 1536, "a100-80:128x8", (128, 8), {"scanned": True}, 10.0),
    Case("gpt-175b of 24 layers on (128,8)", "gpt-175b", 1536, "a100-80:128x8", (128, 8), {"layers": 24}),
)

MOST_BYTES = 2 * 2**30
"""Peak memory that planning may take."""

MOST_GAP = 0.01

MOST_TRACES = 2.0
"""Multiples of `jax.make_jaxpr` that it and the conversion to a graph may take."""


@dataclass(frozen=True)
class Row:
    """CPU seconds of one planning run, `total_s` from the start of the process to the plan, imports included.

    `jaxpr_s` is `jax.make_jaxpr` alone, `trace_s` that and its conversion to a graph, `search_s` all after it. `meshes` were looked at, of
    which `passed_over` were left out by bound.
    """

    case: str
    ops: int
    jaxpr_s: float
    trace_s: float
    search_s: float
    total_s: float
    jaxprs: float
    peak_rss_bytes: int
    status: str
    gap: float
    microbatches: int
    recomputed: int
    meshes: int
    passed_over: int
    bar_s: float | None
    passed: bool


def measure(case: Case, time_limit_s: float | None) -> Row:
    """Plan one case in this process."""
    step, args = models.build(case.model, batch=case.batch, **case.fields)
    begin = time.process_time()
    traced = trace(step, args)
    searched = time.process_time()
    cluster, names = cost_models.load_cluster(case.cluster), ("x", "y", "z")
    meshes = logical_meshes(cluster, names) if case.mesh is None else (LogicalMesh(names[: len(case.mesh)], case.mesh),)
    compilation = Compilation(traced, cluster, meshes, Options(time_limit_s=time_limit_s), case.model)
    compilation = replace(compilation, progress=lambda text: print(f"  {time.process_time():6.1f} {text}", file=sys.stderr))
    try:
        plan = compile_plan(compilation).plan
        assert plan is not None
        found = plan.solve.status, plan.solve.gap, plan.microbatches, len(plan.recomputed)
        tried = [name for name, _ in plan.candidates]
    except InfeasibleError:
        found, tried = ("infeasible", float("nan"), 0, 0), []
    total = time.process_time()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    jaxpr_s = _jaxpr_seconds(step, args)
    within = case.bar_s is None or (total <= case.bar_s and (case.bar_jaxprs is None or total <= case.bar_jaxprs * jaxpr_s))
    proven = found[0] == "optimal" or found[1] <= MOST_GAP
    return Row(
        case.name,
        len(traced.graph.ops),
        jaxpr_s,
        searched - begin,
        total - searched,
        total,
        total / jaxpr_s,
        rss,
        *found,
        len(meshes),
        sum("at least" in name for name in tried),
        case.bar_s,
        within and proven and rss <= MOST_BYTES and searched - begin <= MOST_TRACES * jaxpr_s,
    )


def _jaxpr_seconds(step: Any, args: Any) -> float:
    """CPU seconds of tracing the step to a jaxpr, with nothing of it traced before."""
    jax.clear_caches()
    begin = time.process_time()
    jax.make_jaxpr(step)(*args)
    return time.process_time() - begin


def parse(text: str, preset: str) -> Case:
    """A named case, or MODEL:MESH:BATCH on a preset."""
    known = {case.name: case for case in CASES}
    if text in known:
        return known[text]
    model, mesh_text, batch = text.split(":")
    if mesh_text.startswith("*"):
        return Case(text, model, int(batch), f"{preset}:{mesh_text[1:]}")
    sizes = tuple(int(n) for n in mesh_text.split("x"))
    shape = mesh_text if len(sizes) == 2 else f"1x{mesh_text}" if len(sizes) == 1 else f"{sizes[0] * sizes[1]}x{sizes[2]}"
    return Case(text, model, int(batch), f"{preset}:{shape}", sizes)


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    shown = Table("case", "ops", "jaxpr", "trace", "search", "total CPU s", "jaxprs", "bar", "GiB", "meshes", "status", "gap", "")
    for r in rows:
        seconds = [f"{s:.1f}" for s in (r.jaxpr_s, r.trace_s, r.search_s, r.total_s)]
        bar, meshes = "" if r.bar_s is None else f"{r.bar_s:g}", f"{r.meshes}, {r.passed_over} passed over" if r.meshes > 1 else "1"
        size = f"{r.peak_rss_bytes / 2**30:.1f}"
        proof = r.status, f"{r.gap:.2g}", "ok" if r.passed else "no"
        shown.add_row(r.case, str(r.ops), *seconds, f"{r.jaxprs:.1f}", bar, size, meshes, *proof)
    return render(shown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", help="a name, or MODEL:MESH:BATCH, e.g. gpt-350m:2x8:32; without any, all named cases")
    parser.add_argument("--preset", default="h100-sxm")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args(argv)
    cases = [parse(text, options.preset) for text in options.cases] or list(CASES)
    if options.here:
        print(json.dumps(asdict(measure(cases[0], options.time_limit))))
        return 0
    rows = []
    for case in cases:
        print(f"planning {case.name}", file=sys.stderr)
        own = [case.name, "--here", "--preset", options.preset, "--time-limit", str(options.time_limit)]
        child = subprocess.run([sys.executable, "-m", "benchmarks.planning", *own], stdout=subprocess.PIPE, text=True, check=True)
        rows.append(Row(**json.loads(child.stdout.splitlines()[-1])))
    return finish(rows, all(r.passed for r in rows), table(rows), options.json)


if __name__ == "__main__":
    sys.exit(main())
