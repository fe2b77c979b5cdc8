"""Whole training steps under autopar, leaf by leaf beside one device.

    python -m benchmarks.cases DIR [--mesh 8 --mesh 2x4 ...] [--plan optimum|fast-link|random ...] [--only NAME ...] [--json -]

DIR holds case files: each has `make()`, which returns a function and its arguments, `META`, and may have `check(args, out)`.
Every case runs in a process of its own, on simulated devices, so that one which crashes or hangs costs no other its row.
Exit status 1 where a row does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any

from benchmarks.common import add_json_option, finish

PLANS = ("optimum", "fast-link", "random")
_DEVICES = "--xla_force_host_platform_device_count"
# A collective in which a device never arrives ends the process instead of hanging it.
_STUCK = "--xla_cpu_collective_call_terminate_timeout_seconds=60"


@dataclass(frozen=True)
class Job:
    """One run of one case. `plan` says how the plan is made, `seed` matters to random ones."""

    path: str
    mesh: tuple[int, ...]
    stages: int = 1
    microbatches: int = 1
    plan: str = "optimum"
    seed: int = 0

    @property
    def devices(self) -> int:
        return prod(self.mesh)


@dataclass(frozen=True)
class Row:
    """How one run ended.

    `status` is `agree`, `differ` (a leaf, or the case's own check), `refused` (an error of autopar's that says why) or `error`.
    `worst_leaf` is the path of the leaf farthest from one device's, `worst` its distance in units of the case's tolerance (None
    where all are equal, or where an exact leaf is not). `passed` says whether the row meets the bar.
    """

    case: str
    mesh: str
    stages: int
    microbatches: int
    plan: str
    status: str
    reason: str
    worst_leaf: str | None
    worst: float | None
    seconds: float
    passed: bool


def row_of(job: Job, status: str, reason: str, seconds: float, *, allowed: bool = False, worst: tuple[str, float] | None = None) -> Row:
    """A row; `allowed` says that the case accepts a refusal. Stages and microbatches may be refused for now."""
    passed = status == "agree" or (status == "refused" and (allowed or job.stages > 1 or job.microbatches > 1))
    leaf, distance = worst or (None, None)
    mesh = "x".join(map(str, job.mesh))
    name = Path(job.path).stem
    return Row(name, mesh, job.stages, job.microbatches, job.plan, status, reason, leaf, distance, round(seconds, 2), passed)


def jobs_of(path: str, meta: dict[str, Any], meshes: Sequence[tuple[int, ...]], plans: Sequence[str], seed: int) -> list[Job]:
    """All runs of a case: `meshes`, or else each mesh, stage count and microbatch count of its META that go together."""
    if meshes:
        return [Job(path, mesh, plan=plan, seed=seed) for mesh in meshes for plan in plans]
    stages = (1, *(s for s in meta.get("pipeline_stages", ()) if s > 1))
    microbatches = meta.get("microbatches") or (1,)
    found = []
    for mesh, s, m, plan in product(map(tuple, meta["meshes"]), stages, microbatches, plans):
        split = s > 1 or m > 1
        if s <= prod(mesh) and not (split and plan != plans[0]):
            found.append(Job(path, mesh, s, m, plan, seed))
    return found


def environment(devices: int) -> dict[str, str]:
    """This process's environment with so many simulated devices."""
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_DEVICES)]
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([_STUCK, *kept, f"{_DEVICES}={devices}"])}


def describe(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """META of each case by path; a file that cannot be imported has only `unusable`, which says why."""
    found: dict[str, dict[str, Any]] = {}
    waiting = [str(p) for p in paths]
    while waiting:
        command = [sys.executable, "-m", "benchmarks.case", "describe", *waiting]
        done = subprocess.run(command, env=environment(1), stdout=subprocess.PIPE, text=True)
        found |= {item["path"]: item["meta"] for item in map(json.loads, done.stdout.splitlines())}
        waiting = [p for p in waiting if p not in found]
        if waiting:
            found[waiting.pop(0)] = {"unusable": f"importing it ended the process (status {done.returncode})"}
    return found


def run_jobs(jobs: Sequence[Job], meta: dict[str, Any], limit_s: float) -> Iterator[Row]:
    """A row per job, all jobs of one case. A child process runs them in turn; one that dies is replaced for those that are left."""
    if "unusable" in meta:
        yield from (row_of(job, "error", meta["unusable"], 0.0) for job in jobs)
        return
    waiting = list(jobs)
    while waiting:
        # Written and read through handles of their own: a shared one would have one position for both.
        with tempfile.NamedTemporaryFile() as log, open(log.name, errors="replace") as written:
            for row in _child(waiting, log, limit_s):
                yield _judge(row, meta, written)
                waiting.pop(0)


def _child(jobs: Sequence[Job], log: IO[bytes], limit_s: float) -> Iterator[Row]:
    """Rows as one child process reports them; at its end, one for the job that ended it."""
    command = [sys.executable, "-m", "benchmarks.case", "run"]
    env, pipe = environment(max(j.devices for j in jobs)), subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=log, bufsize=0) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps([asdict(j) for j in jobs]).encode())
            child.stdin.close()
            lines, begin = _Lines(child.stdout), time.monotonic()
            for job in jobs:
                line = lines.next(begin + limit_s - time.monotonic())
                if line is None:
                    yield _ended(job, child, time.monotonic() - begin, limit_s)
                    return
                yield Row(**json.loads(line))
                begin = time.monotonic()
        finally:
            child.kill()


def _ended(job: Job, child: subprocess.Popen, seconds: float, limit_s: float) -> Row:
    """The row of the job during which the child ended, or ran out of time."""
    if seconds >= limit_s:
        return row_of(job, "error", f"no answer within {limit_s:.0f} s", seconds)
    return row_of(job, "error", f"the process ended with status {child.wait()}", seconds)


class _Lines:
    """A stream line by line, with a time limit for each."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.buffer = stream, b""

    def next(self, seconds: float) -> bytes | None:
        """The next line; None when the output ends or the time is up."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            if not select.select([self.stream], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = self.stream.read(65536)
            if not part:
                return None
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line


def _judge(row: Row, meta: dict[str, Any], log: IO[str]) -> Row:
    """The row in the light of what the run wrote to standard error since the last one."""
    text = log.read()
    if row.status == "error" and row.reason.startswith("the process ended"):
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
        return replace(row, reason=f"{row.reason}: {lines[-1][:300]}" if lines else row.reason)
    forbidden = meta.get("forbid_stderr")
    if row.status == "agree" and forbidden and forbidden in text:
        return replace(row, status="differ", reason=f"standard error holds {forbidden!r}", passed=False)
    return row


def table(rows: Sequence[Row]) -> str:
    """The rows as text, those that fail marked, and a summary."""
    head = f"  {'case':32}{'mesh':7}{'stages':>6}{'micro':>6}  {'plan':10}{'status':9}{'worst':>9}{'seconds':>9}  reason"
    lines = [head, *map(_line, rows)]
    counts = ", ".join(f"{sum(r.status == s for r in rows)} {s}" for s in ("agree", "differ", "refused", "error"))
    lines.append(f"{len(rows)} rows: {counts}; {sum(not r.passed for r in rows)} do not pass.")
    allowed = sum(r.passed and r.status == "refused" for r in rows)
    if allowed:
        why = "the case allows it, or the row asks for stages or microbatches, which may be refused for now"
        lines.append(f"{allowed} refusals pass: {why}.")
    lines.append("worst: distance from one device in units of the case's tolerance.")
    return "\n".join(lines)


def _line(row: Row) -> str:
    mark, worst = " " if row.passed else "!", "-" if row.worst is None else f"{row.worst:.2g}"
    reason = row.reason.splitlines()[0][:160] if row.reason else ""
    where = f"{row.worst_leaf}: " if row.status == "differ" and row.worst_leaf else ""
    left = f"{mark} {row.case:32}{row.mesh:7}{row.stages:>6}{row.microbatches:>6}  {row.plan:10}{row.status:9}"
    return f"{left}{worst:>9}{row.seconds:>9.1f}  {where}{reason}".rstrip()


def run_cases(
    directory: Path,
    meshes: Sequence[tuple[int, ...]] = (),
    plans: Sequence[str] = PLANS[:2],
    only: Sequence[str] = (),
    seed: int = 0,
    limit_s: float = 300.0,
    tell: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Every case file in `directory` (of those whose name begins with one of `only`, if given), one after the other."""
    paths = sorted(p for p in directory.glob("*.py") if re.match(r"\d", p.name) and (not only or p.name.startswith(tuple(only))))
    rows = []
    for path, meta in sorted(describe(paths).items()):
        for row in run_jobs(jobs_of(path, {"meshes": [[1]], **meta}, meshes, plans, seed), meta, limit_s):
            tell(row)
            rows.append(row)
    return rows


def _mesh(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"a mesh is a shape such as 8 or 2x4, not {text!r}")
    return tuple(map(int, text.split("x")))


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases of the directory named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cases", description="Whole training steps, beside one device.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--mesh", action="append", type=_mesh, default=[], metavar="SHAPE", help="such as 8 or 2x4; may be repeated")
    parser.add_argument("--plan", action="append", choices=PLANS, help="default: optimum and fast-link, where cutting pays")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="cases whose file name begins so; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of random plans")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help="seconds per row")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    if not given.directory.is_dir():
        parser.error(f"{given.directory} is no directory")
    rows = run_cases(given.directory, given.mesh, given.plan or PLANS[:2], given.only, given.seed, given.time_limit, _tell)
    if not rows:
        parser.error(f"{given.directory} holds no case file that fits")
    return finish(rows, all(row.passed for row in rows), table(rows), given.json)


def _tell(row: Row) -> None:
    print(f"{row.case} {row.mesh} {row.plan}: {row.status} {row.reason[:200]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
