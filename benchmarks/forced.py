"""Forced plans on small models beside one device: numbers, collectives, and which parts of the rules ran.

    python -m benchmarks.forced [--model gpt-tiny ...] [--mesh 8 --mesh 2x4 ...] [--seeds N] [--seed S] [--json -]
        [--kind random|optimum|slow-link|fast-link|tight-memory|remat|microbatch ...] [--dtype float64|float32|bfloat16]

A random plan takes any legal strategy for every op, with at least half of the FLOPs cut; `remat` is one of the step that makes all it
can again, `microbatch` of the step as two or four microbatches (models that cannot run so are left out). The other kinds are optima: for
the machine at hand, for synthetic links, and for barely enough memory. Exit status 1 where a row does not pass.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

import cost_models
from autopar import models
from autopar.compiler import Compilation, Options, compile_plan
from autopar.costs import Pricer
from autopar.emit.compare import CollectiveCheck, compare_collectives
from autopar.emit.hlo import read_collectives
from autopar.emit.manual import Emission
from autopar.errors import InfeasibleError, MicrobatchError, SolverError
from autopar.intraop.choose import Chosen
from autopar.intraop.forced import cut_share, random_plan
from autopar.intraop.price import collectives
from autopar.ir.check import check_plan
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ShardingPlan
from autopar.models.base import suggestion
from autopar.runtime.executor import Executable, Owned, make_mesh
from benchmarks import coverage
from benchmarks.common import add_json_option, finish
from benchmarks.programs import BARS, QUICK, SMALL, Program, divided, fed_back, repeated, zoo

KINDS = ("random", "optimum", "slow-link", "fast-link", "tight-memory", "remat", "microbatch")
RANDOM = ("random", "remat", "microbatch")
MESHES = ((8,), (2, 4), (3,), (1,))
AXES = ("x", "y", "z")
HALF = 0.5
_TRIES = 20
_SHARES = (0.6, 0.8, 0.95)
_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Row:
    """One plan. `worst` is the worst leaf's error in the measure that `bar` bounds; `seconds` includes compiling.

    `planned` counts collectives. `status` is `agree`, `numbers` or `collectives` where those differ, or `error`.
    """

    model: str
    mesh: str
    kind: str
    seed: int
    dtype: str
    ops: int
    cut_share: float
    passes: int
    planned: int
    collectives_agree: bool
    worst: float
    worst_leaf: str
    bar: float
    seconds: float
    status: str
    detail: str = ""


def logical(sizes: Sequence[int]) -> LogicalMesh:
    """A mesh of these sizes, its axes called x, y, z."""
    return LogicalMesh(AXES[: len(sizes)], tuple(sizes))


def plan_for(program: Program, mesh: LogicalMesh, kind: str, seed: int) -> tuple[ShardingPlan, Pricer]:
    """A plan of this kind, and the prices it was made with."""
    if kind in RANDOM:
        pricer = Pricer(cost_models.load_cluster(f"fast-link:{mesh.num_devices}"), mesh)
        return _random(program, pricer, seed), pricer
    cluster = cost_models.load_cluster(f"{'host' if kind == 'optimum' else kind}:{mesh.num_devices}", measure=False)
    free = _optimum(program, cluster, mesh, Options(remat="none", microbatches=1))
    chosen = _tight(program, cluster, mesh, free) if kind == "tight-memory" else free
    return chosen.plan, chosen.pricer


def _random(program: Program, pricer: Pricer, seed: int) -> ShardingPlan:
    """The first of the seed's plans that cuts half of the FLOPs; the last one tried where the mesh does not divide that much."""
    graph, mesh = program.traced.graph, pricer.mesh
    for attempt in range(_TRIES):
        plan = random_plan(graph, program.rules, mesh, program.traced.roles.carried, pricer.move, seed + 1_000_003 * attempt)
        if mesh.num_devices == 1 or cut_share(graph, plan) >= HALF:
            break
    return plan


def _optimum(program: Program, cluster: Any, mesh: LogicalMesh, options: Options) -> Chosen:
    chosen = compile_plan(Compilation(program.traced, cluster, (mesh,), options)).chosen
    assert chosen is not None
    return chosen


def _tight(program: Program, cluster: Any, mesh: LogicalMesh, free: Chosen) -> Chosen:
    """The plan for the smallest share of the free plan's peak for which one is found in time; where none is, the free plan.

    No budget at or just above the free plan's peak is tried: that solve may find no answer in time either. It is another programme,
    since what is small enough to be left out of the memory rows depends on the budget, and the free plan need not have been proven.
    """
    for share in _SHARES:
        options = Options(memory_bytes=int(free.peak_bytes * share), time_limit_s=_PATIENCE_S, remat="none", microbatches=1)
        try:
            return _optimum(program, cluster, mesh, options)
        except (InfeasibleError, SolverError):
            continue
    return free


def executable(program: Program, plan: ShardingPlan, compiler_options: Mapping[str, Any] = QUICK) -> Executable:
    """The plan for the first devices here."""
    emission = Emission(program.traced.graph, program.traced.program, program.rules, plan)
    return Executable(program.traced, emission, make_mesh(plan.mesh), True, compiler_options=compiler_options)


def check(program: Program, plan: ShardingPlan, pricer: Pricer) -> tuple[tuple[float, str], CollectiveCheck]:
    """The worst leaf over all steps, and planned against compiled collectives."""
    graph = program.traced.graph
    check_plan(graph, program.rules, plan)
    run = executable(program, plan)
    owned, leaves, worst = Owned(), list(program.leaves), (0.0, "")
    for step in range(len(program.expected)):
        outputs = run(leaves, owned)
        worst = max(worst, program.error(step, outputs))
        leaves = fed_back(program.traced, leaves, outputs)
    platform = run.mesh.devices.flat[0].platform
    compiled = read_collectives(run.compiled.as_text())
    return worst, compare_collectives(collectives(graph, program.rules, plan, pricer), compiled, platform, plan.mesh)


def variant(program: Program, kind: str, seed: int) -> Program | None:
    """The program of which plans of this kind are; None where there is none."""
    try:
        with program.mode:
            return repeated(program) if kind == "remat" else divided(program, 2 + 2 * (seed % 2)) if kind == "microbatch" else program
    except MicrobatchError:
        return None


def row(program: Program, sizes: Sequence[int], kind: str, seed: int, seen: coverage.Ran) -> Row:
    """Plan, run and compare; whatever is raised becomes the row's detail. What ran is added to `seen`."""
    program = variant(program, kind, seed) or program
    begin, mesh, graph = time.monotonic(), logical(sizes), program.traced.graph
    share, passes, planned, worst, found, status, detail = 0.0, 0, 0, (float("inf"), ""), None, "error", ""
    try:
        with program.mode:
            plan, pricer = plan_for(program, mesh, kind, seed)
            share, passes = cut_share(graph, plan), sum(bool(s.passes) for s in plan.strategies)
            planned = len(collectives(graph, program.rules, plan, pricer))
            worst, found = check(program, plan, pricer)
        seen.update(coverage.ran(graph, program.rules, plan))
        status = "numbers" if not worst[0] <= program.bar else "agree" if found.agree else "collectives"
        detail = "" if found.agree else str(found)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
    agree = found is not None and found.agree
    name = "x".join(map(str, sizes))
    seconds = time.monotonic() - begin
    return Row(
        program.name,
        name,
        kind,
        seed,
        program.dtype,
        len(graph.ops),
        share,
        passes,
        planned,
        agree,
        *worst,
        program.bar,
        seconds,
        status,
        detail,
    )


def rows(
    programs: Iterator[Program], meshes: Sequence[Sequence[int]], kinds: Sequence[str], seeds: Sequence[int], seen: coverage.Ran
) -> Iterator[Row]:
    """Every kind on every mesh; random plans once for each seed."""
    for program in programs:
        for sizes in meshes:
            for kind in kinds:
                for seed in seeds if kind in RANDOM else seeds[:1]:
                    if variant(program, kind, seed) is not None:
                        yield row(program, sizes, kind, seed, seen)


def table(found: Sequence[Row]) -> str:
    """The rows as text."""
    columns = f"{'model':14}{'mesh':6}{'kind':13}{'seed':>6} {'dtype':9}{'ops':>6}{'cut':>6}{'passes':>7}"
    lines = [f"{columns}{'collectives':>12}{'worst':>9}{'seconds':>9}  status"]
    for r in found:
        agree = f"{r.planned} {'=' if r.collectives_agree else '!'}"
        lines.append(
            f"{r.model:14}{r.mesh:6}{r.kind:13}{r.seed:>6} {r.dtype:9}{r.ops:>6}{r.cut_share:>6.2f}{r.passes:>7}"
            f"{agree:>12}{r.worst:>9.1e}{r.seconds:>9.1f}  {r.status}"
        )
        lines += [f"    {line}" for line in r.detail.splitlines()[:12]]
    return "\n".join(lines)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def _devices(count: int) -> None:
    """Simulated devices, unless the environment has chosen some."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Force the plans that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forced", description="Forced plans on small models beside one device.")
    parser.add_argument("--model", action="append", metavar="NAME", help=f"a model of the zoo; by default {', '.join(SMALL)}")
    parser.add_argument("--mesh", action="append", type=_sizes, metavar="2x4", help="by default 8, 2x4, 3 and 1")
    parser.add_argument("--kind", action="append", choices=KINDS, help="by default random")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="random plans for each model and mesh")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first seed")
    parser.add_argument("--dtype", choices=tuple(BARS), default="float64")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    meshes = given.mesh or MESHES
    unknown = [name for name in given.model or () if name not in models.names()]
    if unknown:
        parser.error(f"no model is called {unknown[0]}; {suggestion(unknown[0], models.names())}")
    _devices(max(map(prod, meshes)))
    seen: coverage.Ran = Counter()
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    found = []
    programs = (zoo(name, given.dtype) for name in given.model or SMALL)
    for r in rows(programs, meshes, given.kind or ["random"], range(given.seed, given.seed + given.seeds), seen):
        log(table([r]).split("\n", 1)[1])
        found.append(r)
    passed = all(r.status == "agree" for r in found)
    return finish(found, passed, f"{coverage.table(seen)}\n\n{table(found)}", given.json)


if __name__ == "__main__":
    sys.exit(main())
