"""Loops and branches opened: their ops stand in the graph, in a region of their own.

What stays one op and runs whole: what has effects, a loop that never runs, a branch that gives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.ir.graph import RegionKind
from autopar.trace import compat


class Builder(Protocol):
    """What opening needs of the graph's builder. Operands are values or literals; `where` is handed through."""

    def boundary(self, kind: str, equation: Any, operands: Sequence[Any], avals: Sequence[Any], where: Any, at: tuple[int, int]) -> Any: ...

    def begin(self, kind: RegionKind, equation: Any, where: Any, times: int) -> tuple[int, Any]: ...

    def body(self, closed: Any, operands: Sequence[Any], where: Any) -> list[Any]: ...


Open = Callable[[Builder, Any, Sequence[Any], Any], list[Any]]


def opener(equation: Any) -> Open | None:
    """How to open a loop or branch; None for one that stays closed, and for every other op."""
    name = equation.primitive.name
    if name not in _OPENERS or equation.effects:
        return None
    if any(compat.has_references(inner) for inner in compat.inner_jaxprs(equation)):
        return None
    params = equation.params
    if name == "scan" and params["length"] == 0:
        return None
    if name == "while" and params["cond_jaxpr"].out_avals[0].shape != ():
        return None
    if name == "cond" and not equation.outvars:
        return None
    return _OPENERS[name]


@dataclass(frozen=True)
class _Border:
    """Between a region and where it stands: values brought in and out, one by one."""

    builder: Builder
    equation: Any
    where: Any
    region: int

    def bring(self, kind: str, values: Sequence[Any], avals: Sequence[Any], first: int = 0) -> list[Any]:
        pairs = enumerate(zip(values, avals, strict=True), first)
        return [self.builder.boundary(kind, self.equation, [x], [a], self.where, (self.region, n)) for n, (x, a) in pairs]


def _scan(builder: Builder, equation: Any, operands: Sequence[Any], where: Any) -> list[Any]:
    if equation.params["length"] == 1:
        return builder.body(compat.run_once(equation), operands, where)
    inner, consts, carries = compat.scan_parts(equation)
    region, inside = builder.begin("scan", equation, where, equation.params["length"])
    border, split = _Border(builder, equation, where, region), consts + carries
    carried = border.bring("loop_carry", operands[consts:split], inner.in_avals[consts:split])
    slices = border.bring("loop_slice", operands[split:], inner.in_avals[split:], carries)
    given = builder.body(inner, [*operands[:consts], *carried, *slices], inside)
    avals = [v.aval for v in equation.outvars]
    exits = border.bring("loop_exit", given[:carries], avals[:carries])
    return [*exits, *border.bring("loop_stack", given[carries:], avals[carries:], carries)]


def _while(builder: Builder, equation: Any, operands: Sequence[Any], where: Any) -> list[Any]:
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    avals = [v.aval for v in equation.outvars]
    region, inside = builder.begin("while", equation, where, 1)
    border = _Border(builder, equation, where, region)
    carried = border.bring("loop_carry", operands[first + second :], avals)
    asked, within = builder.begin("test", equation, inside, 1)
    viewed = _Border(builder, equation, inside, asked).bring("loop_view", carried, avals)
    answer = builder.body(equation.params["cond_jaxpr"], [*operands[:first], *viewed], within)
    builder.boundary("loop_test", equation, answer, [], inside, (asked, 0))
    given = builder.body(equation.params["body_jaxpr"], [*operands[first : first + second], *carried], inside)
    return border.bring("loop_exit", given, avals)


def _cond(builder: Builder, equation: Any, operands: Sequence[Any], where: Any) -> list[Any]:
    group, around = builder.begin("cond", equation, where, 1)
    given = []
    for branch in equation.params["branches"]:
        _, inside = builder.begin("branch", equation, around, 1)
        given.append(builder.body(branch, operands[1:], inside))
    choices = zip(zip(*given, strict=True), equation.outvars, strict=True)
    return [
        builder.boundary("branch_join", equation, [operands[0], *values], [v.aval], where, (group, n))
        for n, (values, v) in enumerate(choices)
    ]


_OPENERS: dict[str, Open] = {"scan": _scan, "while": _while, "cond": _cond}
