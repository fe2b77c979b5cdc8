"""The sharding rule of an op: its dimensions named by factor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal as OneOf

from autopar.ir.sharding import Reduction

Factor = str
Dim = tuple[Factor, ...]
Method = OneOf["plain", "whole", "offset", "masked_sum", "scatter", "halo", "prefix", "arg_pair", "bits"]


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
    broadcast); cutting it needs no communication. `methods` names the factors that are not plain: `whole` ones are never cut.
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

    def reduction(self, factor: Factor) -> Reduction:
        """Kind of the partial result that cutting a reduced factor leaves."""
        return dict(self.reductions).get(factor, "sum")

    def __str__(self) -> str:
        def tensor(t: tuple[Dim, ...]) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in t)

        return f"{', '.join(map(tensor, self.operands))} -> {', '.join(map(tensor, self.results))}"
