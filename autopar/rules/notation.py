"""Rules in text and rules from dimension names: `b m k, b k n -> b m n`.

A tensor is a list of dimensions, tensors are separated by commas. `(h d)` is a dimension that merges factors, major to
minor; `[n]` a factor that must stay whole; `1` a dimension of size one; `...` any number of dimensions, the same
everywhere; `_` a scalar where the text would otherwise be empty. Text left of `->` may be empty: no operands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.errors import RuleError
from autopar.ir.graph import Aval
from autopar.ir.rule import Dim, Factor, Method, Pass, ShardingRule
from autopar.ir.sharding import Reduction

Name = str | Dim
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z][A-Za-z0-9_]*|[()\[\]1_])")
_ELLIPSIS = ("...",)


@dataclass(frozen=True)
class Notation:
    """A parsed rule text: dimensions by factor, and the factors written in brackets."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    whole: frozenset[Factor]


def parse(text: str) -> Notation:
    """The notation of a whole rule. Raises `RuleError` on malformed text."""
    if not isinstance(text, str):
        raise RuleError(f"a rule is text such as `b m k, b k n -> b m n`, not {text!r}.")
    if text.count("->") != 1:
        raise RuleError(f"rule text `{text}` needs one `->` between operands and results.")
    whole: set[Factor] = set()
    left, right = text.split("->")
    operands = tuple(_tensor(t, whole) for t in left.split(",")) if left.strip() else ()
    results = tuple(_tensor(t, whole) for t in right.split(","))
    return Notation(operands, results, frozenset(whole))


def instantiate(notation: Notation, operands: Sequence[Aval], results: Sequence[Aval]) -> ShardingRule:
    """The rule that `notation` gives for these avals. A factor missing from a result is a partial sum there."""
    if (len(notation.operands), len(notation.results)) != (len(operands), len(results)):
        raise RuleError(f"the rule names {len(notation.operands)} operands and {len(notation.results)} results.")
    ins = [_expand(t, a) for t, a in zip(notation.operands, operands, strict=True)]
    outs = [_expand(t, a) for t, a in zip(notation.results, results, strict=True)]
    used = {f for t in ins for d in t for f in d}
    dropped: dict[Factor, Reduction] = {f: "sum" for t in outs for f in used - {g for d in t for g in d} if f not in notation.whole}
    return build(ins, outs, operands, results, methods=stays(notation.whole), reductions=dropped)


def build(
    operand_dims: Sequence[Sequence[Name]],
    result_dims: Sequence[Sequence[Name]],
    operands: Sequence[Aval],
    results: Sequence[Aval],
    *,
    sizes: Mapping[Factor, int] | None = None,
    methods: Mapping[Factor, Method] | None = None,
    reductions: Mapping[Factor, Reduction] | None = None,
    passes: Sequence[Pass | None] = (),
    broadcast: bool = False,
) -> ShardingRule:
    """A rule from names per dimension: sizes are read off the avals, factors of size one fall away.

    `sizes` gives those that only merged dimensions show. `broadcast` lets a dimension of size one stand for a larger factor.
    """
    named = [[_as_dim(d) for d in t] for t in (*operand_dims, *result_dims)]
    avals = (*operands, *results)
    if len(named) != len(avals) or any(len(t) != a.ndim for t, a in zip(named, avals, strict=True)):
        raise RuleError("the rule does not have a name for each dimension.")
    found = _sizes(named, avals, dict(sizes or {}))
    tensors = tuple(
        tuple(_checked(d, n, found, broadcast) for d, n in zip(t, a.shape, strict=True)) for t, a in zip(named, avals, strict=True)
    )
    _check_unique(tensors)
    order = tuple(dict.fromkeys(f for t in tensors for d in t for f in d))
    return ShardingRule(
        operands=tensors[: len(operands)],
        results=tensors[len(operands) :],
        sizes=tuple((f, found[f]) for f in order),
        methods=tuple((f, m) for f, m in (methods or {}).items() if f in order and m != "plain"),
        reductions=tuple((f, k) for f, k in (reductions or {}).items() if f in order),
        passes=tuple(dict.fromkeys(p for p in passes if p is not None and p.operands)),
    )


def stays(factors: Iterable[Factor]) -> dict[Factor, Method]:
    """Methods that keep these factors whole."""
    return dict.fromkeys(factors, "whole")


def whole_rule(operands: Sequence[Aval], results: Sequence[Aval]) -> ShardingRule:
    """The rule of an op that nothing is known about: each dimension a factor of its own that stays whole."""
    ins = [[f"p{n}_{d}" for d in range(a.ndim)] for n, a in enumerate(operands)]
    outs = [[f"r{n}_{d}" for d in range(a.ndim)] for n, a in enumerate(results)]
    names = [f for t in (*ins, *outs) for f in t]
    return build(ins, outs, operands, results, methods=stays(names))


def _tensor(text: str, whole: set[Factor]) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    merged: list[Factor] | None = None
    bracket = False
    for token in _tokens(text):
        if token == "(" and merged is None:
            merged = []
        elif token == ")" and merged is not None:
            dims.append(tuple(merged))
            merged = None
        elif token in "[]" and bracket == (token == "]"):
            bracket = token == "["
        elif token[0].isalpha():
            whole |= {token} if bracket else set()
            dims.append((token,)) if merged is None else merged.append(token)
        elif token in ("1", "...") and merged is None and not bracket:
            dims.append(() if token == "1" else _ELLIPSIS)
        elif token != "_" or text.strip() != "_":
            raise RuleError(f"`{token}` is out of place in rule text `{text.strip()}`.")
    if merged is not None or bracket or dims.count(_ELLIPSIS) > 1:
        raise RuleError(f"rule text `{text.strip()}` leaves a bracket open, or has more than one `...`.")
    return tuple(dims)


def _tokens(text: str) -> list[str]:
    tokens, at, text = [], 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise RuleError(f"rule text `{text.strip()}` cannot be read from `{text[at:]}` on.")
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def _expand(dims: tuple[Dim, ...], aval: Aval) -> tuple[Dim, ...]:
    if _ELLIPSIS not in dims:
        return dims
    at, missing = dims.index(_ELLIPSIS), aval.ndim - len(dims) + 1
    return (*dims[:at], *((f"dots{i}",) for i in range(missing)), *dims[at + 1 :])


def _as_dim(name: Name) -> Dim:
    return (name,) if isinstance(name, str) else tuple(name)


def _sizes(named: Sequence[Sequence[Dim]], avals: Sequence[Aval], found: dict[Factor, int]) -> dict[Factor, int]:
    """Sizes from dimensions that are one factor, then from merged ones with a single unknown."""
    pairs = [(d, n) for t, a in zip(named, avals, strict=True) for d, n in zip(t, a.shape, strict=True)]
    for dim, n in pairs:
        if len(dim) == 1 and found.get(dim[0], 1) == 1:
            found[dim[0]] = n
    for dim, n in pairs:
        unknown = [f for f in dim if f not in found]
        known = prod(found[f] for f in dim if f in found)
        if len(unknown) > 1 or (unknown and (known == 0 or n % known)):
            raise RuleError(f"the sizes in dimension ({' '.join(dim)}) of size {n} are not determined.")
        found |= {f: n // known for f in unknown}
    return found


def _checked(dim: Dim, n: int, sizes: Mapping[Factor, int], broadcast: bool) -> Dim:
    kept = tuple(f for f in dim if sizes[f] != 1)
    if prod(sizes[f] for f in kept) == n:
        return kept
    if broadcast and n == 1 and len(kept) == 1:
        return ()
    raise RuleError(f"dimension ({' '.join(dim)}) has size {n}, its factors have sizes {[sizes[f] for f in dim]}.")


def _check_unique(tensors: Sequence[Sequence[Dim]]) -> None:
    for tensor in tensors:
        names = [f for d in tensor for f in d]
        if len(set(names)) != len(names):
            raise RuleError(f"a factor occurs twice in one tensor: {names}.")
