"""How much of a program runs whole: ops whose rule has nothing to cut, by FLOPs and by bytes, loops counted as often as they run.

    python -m benchmarks.whole [MODEL ...] [--cases DIR] [--json -]
    python -m benchmarks.whole --primitives        the primitives with and without a rule, as docs/primitives.md shows them

Without names, the tiny models of the zoo. Exit status 1 where more than a thousandth of the FLOPs of all programs together run whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from autopar import costs, models, rules
from autopar.ir.graph import BOUNDARY, Graph, Op
from autopar.report.table import render
from autopar.rules import OPAQUE, why_whole
from autopar.trace.trace import trace
from benchmarks.case import load
from benchmarks.common import add_json_option, finish
from benchmarks.programs import SMALL

BAR = 1e-3


@dataclass(frozen=True)
class Row:
    """One program. Shares are in [0, 1]; `primitives` names what runs whole, most FLOPs first."""

    program: str
    ops: int
    flops: float
    whole_flops: float
    flops_share: float
    bytes_share: float
    primitives: str


def runs_whole(graph: Graph, op: Op) -> bool:
    """Whether the op has work that no strategy divides. An op on single elements has none to divide."""
    if op.primitive in BOUNDARY or all(graph.aval(o).size <= 1 for o in (*op.operands, *op.results)):
        return False
    rule = rules.rule_for(op, graph.aval)
    return not any(rule.method[f] != "whole" and n > 1 for f, n in rule.sizes)


def measure(name: str, graph: Graph) -> Row:
    """The shares of one program."""
    work: dict[str, float] = {}
    flops = nbytes = whole_bytes = 0.0
    for op, times in zip(graph.ops, graph.times, strict=True):
        avals_in, avals_out = [graph.aval(o) for o in op.operands], [graph.avals[r] for r in op.results]
        done, moved = times * costs.flops(op, avals_in, avals_out), times * sum(a.nbytes for a in (*avals_in, *avals_out))
        flops, nbytes = flops + done, nbytes + moved
        if runs_whole(graph, op):
            work[op.primitive] = work.get(op.primitive, 0.0) + done
            whole_bytes += moved
    total = sum(work.values())
    named = " ".join(sorted(work, key=lambda p: -work[p]))
    return Row(name, len(graph.ops), flops, total, total / flops if flops else 0.0, whole_bytes / nbytes if nbytes else 0.0, named)


def rows(names: Sequence[str], cases: str | None) -> Iterator[Row]:
    """A row for each model, and for each case file."""
    for name in names:
        step, args = models.build(name, abstract=True)
        yield measure(name, trace(step, args).graph)
    if cases:
        for path in sorted(Path(cases).glob("[0-9]*.py")):
            step, args = load(str(path)).make()
            yield measure(path.stem, trace(step, args).graph)


def table(found: Sequence[Row]) -> str:
    """The rows as text."""
    shown = Table("program", "ops", "FLOPs", "whole, of FLOPs", "whole, of bytes", "what runs whole")
    for r in found:
        shown.add_row(r.program, str(r.ops), f"{r.flops:.3g}", f"{r.flops_share:.3%}", f"{r.bytes_share:.3%}", r.primitives)
    return render(shown)


def primitives() -> str:
    """The primitives with a rule, and those that run whole on purpose with the reason, as Markdown."""
    reasons: dict[str, list[str]] = {}
    for name in OPAQUE:
        reasons.setdefault(why_whole(name), []).append(name)
    lines = ["# Primitives", "", "Made by `python -m benchmarks.whole --primitives`.", "", "With a sharding rule:", ""]
    lines += [", ".join(f"`{p}`" for p in rules.primitives()) + ".", "", "Without one, on purpose; they run whole:", ""]
    lines += [f"- {', '.join(f'`{p}`' for p in sorted(names))}: {reason}" for reason, names in reasons.items()]
    lines += ["", "`scan`, `while` and `cond` are opened; they run whole only where they stay closed: with effects, or if they never run."]
    return "\n".join([*lines, "Every other primitive runs whole, and the plan says so with its source line.", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole", description="How much of a program runs whole.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default {', '.join(SMALL)}")
    parser.add_argument("--cases", metavar="DIR", help="case files, too")
    parser.add_argument("--primitives", action="store_true", help="the primitives with and without a rule instead")
    add_json_option(parser)
    given = parser.parse_args(arguments)
    if given.primitives:
        print(primitives(), end="")
        return 0
    found = list(rows(given.models or list(SMALL), given.cases))
    whole, total = sum(r.whole_flops for r in found), sum(r.flops for r in found)
    return finish(found, whole <= BAR * total, table(found), given.json)


if __name__ == "__main__":
    sys.exit(main())
