"""The emitted program beside the same plan's shardings under `jax.jit`: time of a step and time to compile.

    python -m benchmarks.emitted [MODEL ...] [--devices N] [--rounds N] [--json -]

Without names, the tiny models of the zoo. Both programs are of one plan, take turns on one machine, and are compiled before the first
step; under `jit` the compiler finds the collectives itself. Exit status 1 where the geometric mean of the ratios of step times is above
1.05, one of them above 1.2, or that of compile times above 1.5.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

import jax
from rich.table import Table

from autopar import api, models
from autopar.ir.plan import Plan
from autopar.models.base import suggestion
from autopar.report.table import render
from autopar.report.units import seconds_text
from autopar.runtime.executable import executable_for
from autopar.runtime.executor import Executable, Owned, make_mesh
from autopar.trace.arguments import split
from autopar.trace.trace import trace
from benchmarks.common import add_json_option, finish
from benchmarks.programs import SMALL, fed_back

EMITTERS = ("shard_map", "jit")
MEAN, WORST, COMPILE = 1.05, 1.2, 1.5
"""The most that ratios may be: the geometric mean over models, any model's, and any model's compile time."""
_WARM = 2


@dataclass(frozen=True)
class Row:
    """One model. Times in seconds, of a step the median; `ratio` is the median over rounds of emitted over `jit`."""

    model: str
    mesh: str
    ops_cut: int
    step_s: float
    jit_step_s: float
    ratio: float
    compile_s: float
    jit_compile_s: float

    @property
    def compile_ratio(self) -> float:
        return self.compile_s / self.jit_compile_s

    @property
    def passed(self) -> bool:
        return self.ratio <= WORST and self.compile_ratio <= COMPILE


@dataclass(frozen=True)
class Summary:
    """The geometric mean of the rows' ratios."""

    mean_ratio: float
    mean_compile_ratio: float


def measure(name: str, cluster: str, rounds: int) -> Row:
    """Plan a model once, and run both programs of the plan in turn."""
    step, (state, batch) = models.build(name, abstract=False)
    plan: Plan = api.plan(step, (state, batch), cluster).data
    traced = trace(step, (state, batch))
    leaves, _ = split((state, batch), {})
    programs = {e: executable_for(plan, traced, make_mesh(plan.sharding.mesh), True, e) for e in EMITTERS}
    compiled = {e: _compile_seconds(p) for e, p in programs.items()}
    times = _in_turn(programs, leaves, rounds)
    ratio = median(a / b for a, b in zip(times["shard_map"], times["jit"], strict=True))
    cut = sum(bool(s.cuts) for s in plan.sharding.strategies)
    middle = [median(times[e]) for e in EMITTERS]
    return Row(name, str(plan.sharding.mesh), cut, *middle, ratio, *(compiled[e] for e in EMITTERS))


def _compile_seconds(program: Executable) -> float:
    """Lowering and compiling, which happens once."""
    begin = time.perf_counter()
    program.compiled  # noqa: B018
    return time.perf_counter() - begin


def _in_turn(programs: dict[str, Executable], leaves: Sequence[Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step after the first ones. Whoever begins a round ends the next, and state is fed back."""
    inputs = dict.fromkeys(programs, list(leaves))
    owned = {e: Owned() for e in programs}
    found: dict[str, list[float]] = {e: [] for e in programs}
    for n in range(rounds + _WARM):
        for e in list(programs)[:: 1 if n % 2 else -1]:
            begin = time.perf_counter()
            outputs = jax.block_until_ready(programs[e](inputs[e], owned[e]))
            if n >= _WARM:
                found[e].append(time.perf_counter() - begin)
            inputs[e] = fed_back(programs[e].traced, inputs[e], outputs)
    return found


def rows(names: Sequence[str], cluster: str, rounds: int) -> Iterator[Row]:
    """A row for each model."""
    for name in names:
        yield measure(name, cluster, rounds)


def summary(found: Sequence[Row]) -> Summary:
    """Geometric means over the rows."""
    return Summary(geometric_mean([r.ratio for r in found]), geometric_mean([r.compile_ratio for r in found]))


def table(found: Sequence[Row], means: Summary) -> str:
    """The rows as text."""
    shown = Table("model", "mesh", "ops cut", "step", "under jit", "ratio", "compile", "under jit", "ratio", "")
    for r in found:
        steps, compiles = map(seconds_text, (r.step_s, r.jit_step_s)), map(seconds_text, (r.compile_s, r.jit_compile_s))
        verdict = "" if r.passed else "too slow"
        shown.add_row(r.model, r.mesh, str(r.ops_cut), *steps, f"{r.ratio:.3f}", *compiles, f"{r.compile_ratio:.2f}", verdict)
    shown.add_row("geometric mean", "", "", "", "", f"{means.mean_ratio:.3f}", "", "", f"{means.mean_compile_ratio:.2f}", "")
    return render(shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emitted", description="The emitted program beside jax.jit.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default {', '.join(SMALL)}")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="simulated devices, by default 8")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="steps of each program that count, by default 20")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    unknown = [name for name in given.models if name not in models.names()]
    if unknown:
        parser.error(f"no model is called {unknown[0]}; {suggestion(unknown[0], models.names())}")
    if min(given.rounds, given.devices) < 1:
        parser.error("--rounds and --devices must be 1 or more")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given.devices)
    found = []
    for row in rows(given.models or list(SMALL), f"host:{given.devices}", given.rounds):
        print(f"{row.model}: {row.ratio:.3f}", file=sys.stderr, flush=True)
        found.append(row)
    means = summary(found)
    passed = means.mean_ratio <= MEAN and all(r.passed for r in found)
    return finish(found, passed, table(found, means), given.json, [means])


if __name__ == "__main__":
    sys.exit(main())
