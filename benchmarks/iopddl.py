"""The solver alone, on instances of the IOPDDL benchmark (ASPLOS / EuroSys 2025 contest on intra-operator parallelism).

    python -m benchmarks.iopddl FILE... [--time-limit S] [--gap G] [--json -]

Costs are the instance's own whole numbers, not seconds. Exit status 1 where an instance ends without a feasible answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from autopar.errors import AutoparError
from autopar.intraop import solvers
from autopar.intraop.evaluate import evaluate
from autopar.ir.problem import Edge, Floats, Problem, Usage

FORBIDDEN = 1e18
"""From this cost on, the format means that the strategy or pair is not allowed."""


@dataclass(frozen=True)
class Row:
    """One instance's result; `cost`, `bound` and `gap` are None where there is none."""

    instance: str
    cost: float | None
    bound: float | None
    gap: float | None
    status: str
    feasible: bool
    seconds: float


def read(path: Path) -> Problem:
    """Reads an instance, compressed or not."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)["problem"]
    nodes = data["nodes"]
    node_costs = tuple(_costs(c) for c in nodes["costs"])
    edges = data.get("edges", {"nodes": [], "costs": []})
    intervals = [interval if len(interval) == 2 else (0, 0) for interval in nodes["intervals"]]
    return Problem(
        node_costs=node_costs,
        edges=tuple(
            Edge(a, b, _costs(c).reshape(len(node_costs[a]), len(node_costs[b])))
            for (a, b), c in zip(edges["nodes"], edges["costs"], strict=True)
        ),
        usages=tuple(
            Usage(i, start, stop, np.array(nbytes, float))
            for i, ((start, stop), nbytes) in enumerate(zip(intervals, nodes["usages"], strict=True))
            if start < stop and any(nbytes)
        ),
        horizon=max((stop for _, stop in intervals), default=0),
        budget=data.get("usage_limit"),
    )


def _costs(values: list[int]) -> Floats:
    costs = np.array(values, float)
    costs[costs >= FORBIDDEN] = np.inf
    return costs


def run(path: Path, time_limit_s: float | None, gap: float, log) -> Row:
    """Reads and solves one instance; `seconds` is the solve, reading left out."""
    name = path.name.removesuffix(".gz").removesuffix(".json")
    problem = read(path)
    begin = time.monotonic()
    try:
        solution = solvers.solve(problem, time_limit_s=time_limit_s, gap=gap, log=log)
    except AutoparError as error:
        log(str(error))
        status = "infeasible" if isinstance(error, solvers.Infeasible) else "time_limit"
        return Row(name, None, None, None, status, False, time.monotonic() - begin)
    feasible = evaluate(problem, solution.choice, solution.side).feasible
    seconds = time.monotonic() - begin
    bound, gap_left = (x if math.isfinite(x) else None for x in (solution.bound, solution.gap))
    return Row(name, solution.objective, bound, gap_left, solution.status, feasible, seconds)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'instance':12}{'cost':>22}{'bound':>22}{'gap':>10}  {'status':12}{'feasible':10}{'seconds':>8}"]
    for row in rows:
        cost, bound = ("-" if x is None else f"{x:,.0f}" for x in (row.cost, row.bound))
        gap = "-" if row.gap is None else f"{row.gap:.1e}"
        lines.append(
            f"{row.instance:12}{cost:>22}{bound:>22}{gap:>10}  {row.status:12}{'yes' if row.feasible else 'no':10}{row.seconds:>8.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the files named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iopddl", description="The solver alone, on IOPDDL instances.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, metavar="S", help="seconds per instance")
    parser.add_argument("--gap", type=float, default=1e-6, help="relative gap at which an answer counts as optimal")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; `-` is standard output")
    parser.add_argument("--verbose", action="store_true", help="log the solver's progress to standard error")
    given = parser.parse_args(arguments)
    log = (lambda line: print(line, file=sys.stderr, flush=True)) if given.verbose else (lambda line: None)
    rows = [run(path, given.time_limit, given.gap, log) for path in given.files]
    passed = all(row.feasible for row in rows)
    if given.json != "-":
        print(table(rows))
    if given.json:
        document = json.dumps({"schema": 1, "rows": [asdict(row) for row in rows], "passed": passed})
        print(document) if given.json == "-" else Path(given.json).write_text(document)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
