"""All strategies of a rule on a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import permutations, product

from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.strategy import Strategy, is_legal

_Choice = tuple[str, str | int]


def enumerate_strategies(rule: ShardingRule, mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """Every legal assignment of the mesh axes to factors, passes or nothing, the whole strategy first.

    Several axes on one factor are listed in each order, since the order decides which block a device holds. Axes of size one do nothing.
    """
    return _enumerate(rule.factors, tuple(rule.sizes), len(rule.passes), _Key(rule), mesh)


class _Key:
    """A rule compared by value once, so that the cache need not hash long tuples twice."""

    def __init__(self, rule: ShardingRule):
        self.rule = rule

    def __hash__(self) -> int:
        return hash((self.rule.operands, self.rule.results))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.rule == other.rule


@lru_cache(maxsize=20_000)
def _enumerate(
    factors: tuple[str, ...], sizes: tuple[tuple[str, int], ...], passes: int, key: _Key, mesh: LogicalMesh
) -> tuple[Strategy, ...]:
    rule, size = key.rule, dict(sizes)
    options: list[list[_Choice | None]] = []
    for axis, n in zip(mesh.names, mesh.sizes, strict=True):
        if n == 1:
            continue
        cuts: list[_Choice | None] = [(axis, f) for f in factors if size[f] % n == 0]
        options.append([None, *cuts, *((axis, i) for i in range(passes))])
    found: dict[Strategy, None] = {}
    for combination in product(*options):
        for strategy in _orders([c for c in combination if c is not None], factors):
            if is_legal(rule, strategy, mesh):
                found[strategy] = None
    return tuple(found)


def _orders(choices: list[_Choice], factors: tuple[str, ...]) -> Iterator[Strategy]:
    """The strategies that differ only in the order of axes within a factor."""
    passes = tuple((a, c) for a, c in choices if isinstance(c, int))
    cut = {f: [a for a, c in choices if c == f] for f in factors}
    named = [(f, axes) for f, axes in cut.items() if axes]
    for orders in product(*(permutations(axes) for _, axes in named)):
        yield Strategy(tuple((f, tuple(o)) for (f, _), o in zip(named, orders, strict=True)), passes)
