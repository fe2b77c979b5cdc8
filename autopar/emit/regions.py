"""Loops and branches of a plan as JAX's own: bodies run the region's ops on what one runner has made so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from autopar.ir.graph import BOUNDARY, ENTERING, ROOT, Graph, Op
from autopar.trace import compat


class Runner(Protocol):
    """Runs ops one by one: by op index, reads operands in the form that the op needs, and takes results as the op gives them."""

    @property
    def emission(self) -> Any: ...

    def op(self, i: int) -> None: ...

    def operand(self, i: int, k: int) -> Any: ...

    def give(self, i: int, x: Any) -> None: ...

    def inner(self) -> Runner: ...


def run(runner: Runner, first: int, stop: int, region: int = ROOT) -> None:
    """Run the ops `first` to `stop` that stand in `region`, and the regions inside it as they come."""
    graph, i = runner.emission.graph, first
    while i < stop:
        inside = _entered(graph, graph.ops[i], region)
        if inside == ROOT:
            runner.op(i)
            i += 1
            continue
        begin, end = graph.spans[inside]
        _prepare(runner, begin, end + 1, inside)
        _RUN[graph.regions[inside].kind](runner, inside, begin, end + 1)
        i = end + 1


def _entered(graph: Graph, op: Op, region: int) -> int:
    """The region directly inside `region` to which an op belongs, itself or as what enters or leaves it."""
    path = graph.path(int(op.param("region")) if op.primitive in BOUNDARY else op.region)
    outer = len(graph.path(region))
    return path[outer] if len(path) > outer else ROOT


def _prepare(runner: Runner, first: int, stop: int, region: int) -> None:
    """Bring values from outside into the forms that a region needs, before it begins."""
    graph: Graph = runner.emission.graph
    around = set(graph.path(region)[:-1]) | {ROOT}
    for i in range(first, stop):
        op = graph.ops[i]
        for k, o in enumerate(op.operands):
            if isinstance(o, int) and graph.home(o) in around and op.primitive != "loop_carry":
                runner.operand(i, k)


def _ports(graph: Graph, first: int, stop: int, region: int, primitive: str) -> list[int]:
    """The ops of one kind that enter or leave a region."""
    ops = graph.ops
    return [i for i in range(first, stop) if ops[i].primitive == primitive and ops[i].param("region") == region]


def _inside(graph: Graph, first: int, stop: int, region: int) -> tuple[int, int]:
    """From the first to past the last op between what enters and what leaves a region."""
    ports = {i for i in range(first, stop) if graph.ops[i].primitive in BOUNDARY and graph.ops[i].param("region") == region}
    while first in ports and graph.ops[first].primitive in ENTERING:
        first += 1
    while stop - 1 in ports and stop > first:
        stop -= 1
    return first, stop


def _scan(runner: Runner, region: int, first: int, stop: int) -> None:
    graph: Graph = runner.emission.graph
    carries, slices, reads, exits, stacks = (
        _ports(graph, first, stop, region, kind) for kind in ("loop_carry", "loop_slice", "loop_read", "loop_exit", "loop_stack")
    )
    params = runner.emission.program.equations[graph.regions[region].equation].equation.params
    start, end = _inside(graph, first, stop, region)

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        inner = runner.inner()
        for i, x in zip((*carries, *slices), (*carry, *xs), strict=True):
            inner.give(i, x)
        for i in reads:
            inner.give(i, inner.operand(i, 0))
        run(inner, start, end, region)
        return tuple(_typed(inner.operand(i, 0), graph, i) for i in exits), tuple(_typed(inner.operand(i, 0), graph, i) for i in stacks)

    begin = tuple(_typed(runner.operand(i, 0), graph, i) for i in carries)
    stacked = tuple(runner.operand(i, 0) for i in slices)
    length, reverse = params["length"], params["reverse"]
    last, ys = lax.scan(body, begin, stacked, length=length, reverse=reverse, unroll=params.get("unroll", 1))
    for i, x in zip((*exits, *stacks), (*last, *ys), strict=True):
        runner.give(i, x)


def _while(runner: Runner, region: int, first: int, stop: int) -> None:
    graph: Graph = runner.emission.graph
    carries, exits = (_ports(graph, first, stop, region, kind) for kind in ("loop_carry", "loop_exit"))
    test = next(r for r, inner in enumerate(graph.regions) if inner.parent == region and inner.kind == "test")
    asks = graph.spans[test]
    views = _ports(graph, *asks, test, "loop_view")
    _, end = _inside(graph, first, stop, region)

    def given(carry: Iterable[Any]) -> Runner:
        inner = runner.inner()
        for i, x in zip(carries, carry, strict=True):
            inner.give(i, x)
        return inner

    def goes_on(carry: Iterable[Any]) -> Any:
        inner = given(carry)
        for i in views:
            inner.give(i, inner.operand(i, 0))
        run(inner, *_inside(graph, asks[0], asks[1] + 1, test), test)
        return inner.operand(asks[1], 0)

    def body(carry: Iterable[Any]) -> tuple[Any, ...]:
        inner = given(carry)
        run(inner, asks[1] + 1, end, region)
        return tuple(_typed(inner.operand(i, 0), graph, i) for i in exits)

    begin = tuple(_typed(runner.operand(i, 0), graph, i) for i in carries)
    for i, x in zip(exits, lax.while_loop(goes_on, body, begin), strict=True):
        runner.give(i, x)


def _cond(runner: Runner, region: int, first: int, stop: int) -> None:
    graph: Graph = runner.emission.graph
    joins = _ports(graph, first, stop, region, "branch_join")
    branches = [r for r, inner in enumerate(graph.regions) if inner.parent == region]

    def branch(n: int, r: int) -> Callable[[], tuple[Any, ...]]:
        def chosen() -> tuple[Any, ...]:
            inner = runner.inner()
            begin, end = graph.spans.get(r, (0, -1))
            run(inner, begin, end + 1, r)
            return tuple(_typed(inner.operand(i, 1 + n), graph, i) for i in joins)

        return chosen

    results = lax.switch(runner.operand(joins[0], 0), [branch(n, r) for n, r in enumerate(branches)])
    for i, x in zip(joins, results, strict=True):
        runner.give(i, x)


def _typed(x: Any, graph: Graph, i: int) -> Any:
    """An array with the weak type of what op i gives, as loops insist on it."""
    aval = graph.avals[graph.ops[i].results[0]]
    x = x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
    return compat.with_type_strength(x, aval.weak_type)


_RUN: dict[str, Callable[[Runner, int, int, int], None]] = {"scan": _scan, "while": _while, "cond": _cond}
