"""Planned memory and collectives beside the real compiler of hardware that is not here: `python -m benchmarks.memory --compiler tpu|cuda`.

Zoo models at real widths with few layers, under forced plans. The compilers come with `autopar[tpu-aot]` and `autopar[cuda-aot]`. Bars:
temporaries within 10 % in the median and 25 % for nine of ten, the sum within 3 % in the median and never 10 % below; collectives equal
after the compiler's known rewrites.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import jax

import autopar
from autopar import models
from autopar.runtime.foreign import COMPILERS, SURROUNDINGS, Foreign, compile_for
from benchmarks.common import add_json_option, finish

CLUSTERS = {"tpu": {8: "v5e:2x4", 16: "v5e:4x4", 64: "v5e:8x8"}, "cuda": {8: "h100-sxm:1x8", 16: "h100-sxm:2x8", 64: "h100-sxm:8x8"}}
GPT = {"layers": 2, "hidden": 1024, "heads": 8, "seq": 1024, "vocab": 8192, "batch": 32}
WIDE = {"layers": 2, "batch": 16, "seq": 1024, "vocab": 8192}
# A model, what differs from its published size, and the named parallelism that is forced.
CASES: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("gpt-2.6b", GPT, {"data": 8}),
    ("gpt-2.6b", GPT, {"data": 8, "zero": 3}),
    ("gpt-2.6b", GPT, {"tensor": 8}),
    ("gpt-2.6b", GPT, {"data": 8, "microbatches": 2}),
    ("gpt-2.6b", {**GPT, "layers": 4}, {"data": 8, "zero": 3, "remat": "full"}),
    ("gpt-2.6b", {**GPT, "layers": 4}, {"data": 2, "tensor": 4, "remat": "full"}),
    ("gpt-6.7b", {**WIDE, "batch": 32}, {"data": 16, "zero": 1}),
    ("gpt-6.7b", WIDE, {"data": 8, "tensor": 8}),
    ("llama3-8b", WIDE, {"data": 8, "zero": 3}),
    ("moe-2.4b", {"layers": 2, "batch": 64}, {"expert": 8}),
)
MEDIAN_BAR, TENTH_BAR, TOTAL_BAR, BELOW_BAR = 0.10, 0.25, 0.03, -0.10


@dataclass(frozen=True)
class Row:
    """One plan: bytes of temporaries and in all on one device, planned and compiled, and whether collectives agree."""

    model: str
    plan: str
    devices: int
    planned_temp: int
    compiled_temp: int
    temp_error: float
    planned_total: int
    compiled_total: int
    total_error: float
    collectives: bool
    rewrites: tuple[str, ...]
    seconds: float


def rows(compiler: str, cases: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[Row]:
    """The cases, one after the other."""
    for name, changes, layout in cases:
        plan = planned(name, changes, layout, compiler)
        begin = time.perf_counter()
        found = compile_for(plan.data, plan._traced, compiler)  # type: ignore[arg-type]
        yield judged(name, layout, plan, found, time.perf_counter() - begin)


def planned(name: str, changes: Mapping[str, Any], layout: Mapping[str, Any], compiler: str) -> Any:
    """The forced plan of a case, whatever memory there is."""
    step, args = models.build(name, **changes)
    devices = 1
    for axis in ("data", "tensor", "expert", "context", "replica"):
        devices *= layout.get(axis, 1)
    return autopar.manual(step, args, CLUSTERS[compiler][devices], options=autopar.Options(memory_bytes=10**15), **layout)


def judged(name: str, layout: Mapping[str, Any], plan: Any, found: Foreign, seconds: float) -> Row:
    """A plan beside what its compiler made of it."""
    p = plan.data.predicted
    words = " ".join(f"{key}={value}" for key, value in layout.items())
    total = p.argument_bytes + found.expected_bytes
    off, whole = found.expected_bytes / found.temp_bytes - 1, total / found.total_bytes - 1
    check = found.collectives
    sizes = (found.expected_bytes, found.temp_bytes, off, total, found.total_bytes, whole)
    return Row(name, words, plan.mesh.num_devices, *sizes, check.agree, check.rewrites, seconds)


def passed(found: Sequence[Row]) -> bool:
    """Whether the bars are met."""
    temps, totals = sorted(abs(row.temp_error) for row in found), [row.total_error for row in found]
    tenth = quantiles(temps, n=10, method="inclusive")[-1] if len(temps) > 1 else temps[0]
    within = median(temps) <= MEDIAN_BAR and tenth <= TENTH_BAR
    return within and median(map(abs, totals)) <= TOTAL_BAR and min(totals) >= BELOW_BAR and all(row.collectives for row in found)


def line(row: Row) -> str:
    """A row as text."""
    sizes = f"{row.planned_temp / 2**20:8.0f} {row.compiled_temp / 2**20:8.0f} {row.temp_error:+7.1%} {row.total_error:+7.1%}"
    return f"{sizes}  {'equal ' if row.collectives else 'DIFFER'}  {row.seconds:4.0f} s  {row.model} on {row.devices}: {row.plan}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", choices=COMPILERS, required=True)
    parser.add_argument("--cases", type=int, nargs="*", metavar="N", help="only these of the cases, from 0 on")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    for name, value in SURROUNDINGS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    chosen = CASES if options.cases is None else [CASES[n] for n in options.cases]
    found = []
    for row in rows(options.compiler, chosen):
        found.append(row)
        print(line(row), file=sys.stderr, flush=True)
    head = "MiB planned, compiled; error of temporaries, of all; collectives; time to compile"
    return finish(found, bool(found) and passed(found), "\n".join([head, *map(line, found)]), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
