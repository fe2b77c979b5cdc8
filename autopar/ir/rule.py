"""The sharding rule of an op: its dimensions named by factor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal as OneOf

from autopar.ir.sharding import Reduction

Factor = str
Dim = tuple[Factor, ...]
Method = OneOf["plain", "whole", "offset", "masked_sum", "scatter", "halo", "prefix", "arg_pair", "bits", "manual"]
RESOLVED: frozenset[Method] = frozenset({"arg_pair", "manual"})
"""Methods whose results are never partial: what they reduce, they reduce themselves."""


@dataclass(frozen=True, slots=True)
class Pass:
    """If exactly these operands are partial over an axis, all of them with `kind`, then so is every result.

    The other operands must not use that axis at all.
    """

    operands: tuple[int, ...]
    kind: Reduction = "sum"


@dataclass(frozen=True)
class ShardingRule:
    """An op's dimensions named by factor, as in `(i k), (k j) -> (i j)`.

    `operands[n][d]` are the factors of dimension d of operand n, major to minor: `()` for a dimension of size 1 (or one
    that a size-1 operand broadcasts), several where a dimension merges factors. A factor found in an operand but in no result
    is *reduced*: cutting it leaves partial results of its `reductions` kind. A factor found only in results is new there (a
    broadcast); cutting it needs no communication. `methods` names the factors that are not plain: `whole` ones are never cut,
    `manual` ones, which are named as mesh axes, all together and each by its own axis.
    `passes` lists the ways in which partial operands go through.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[tuple[Factor, int], ...]
    methods: tuple[tuple[Factor, Method], ...] = ()
    reductions: tuple[tuple[Factor, Reduction], ...] = ()
    passes: tuple[Pass, ...] = ()

    @cached_property
    def size(self) -> dict[Factor, int]:
        return dict(self.sizes)

    @cached_property
    def method(self) -> dict[Factor, Method]:
        """Factor -> method, `plain` where nothing special is said."""
        found: dict[Factor, Method] = dict.fromkeys(self.size, "plain")
        return found | dict(self.methods)

    @cached_property
    def in_operands(self) -> frozenset[Factor]:
        return frozenset(f for t in self.operands for d in t for f in d)

    @cached_property
    def in_results(self) -> frozenset[Factor]:
        return frozenset(f for t in self.results for d in t for f in d)

    @cached_property
    def factors(self) -> tuple[Factor, ...]:
        """The factors that may be cut, in order of first appearance."""
        return tuple(f for f, n in self.sizes if n > 1 and self.method[f] != "whole")

    @cached_property
    def manual(self) -> frozenset[Factor]:
        """The factors that stand for mesh axes of the user's own."""
        return frozenset(f for f in self.factors if self.method[f] == "manual")

    @cached_property
    def reduced(self) -> frozenset[Factor]:
        """The factors that leave partial results when they are cut, those that lack the factor."""
        lacking = (self.in_operands - self.in_results) | {f for f, _ in self.reductions}
        return frozenset(f for f in lacking if self.method[f] not in RESOLVED)

    def reduction(self, factor: Factor) -> Reduction:
        """Kind of the partial result that cutting a reduced factor leaves."""
        return dict(self.reductions).get(factor, "sum")

    def __str__(self) -> str:
        def tensor(t: tuple[Dim, ...]) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in t)

        return f"{', '.join(map(tensor, self.operands))} -> {', '.join(map(tensor, self.results))}"
