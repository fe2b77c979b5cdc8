"""Which dimensions of a program's values count the layers of a `scan` over layers, and which scans these are.

A scan runs over layers if it reads weights layer by layer; so do others, of the same length, that read what such a scan has stacked, as its
derivative does. From what they read and stack, the dimension is followed through all ops by their sharding rules: to the parameter itself,
its gradient, its moments, its next value.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import RuleError
from autopar.ir.graph import Aval, Constant, Op, Operand
from autopar.ir.rule import Dim, ShardingRule
from autopar.rules import has_user_rule, rule_for
from autopar.trace import compat
from autopar.trace.flatten import Builder
from autopar.trace.normalise import normalise_params

_COUNTS_BLOCKS = frozenset({"conv_general_dilated"})
"""Ops whose parameters say how many blocks there are, which are for equal blocks alone."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The dimension of a value along which `length` layers stand, each a block of equal size."""

    dimension: int
    length: int


@dataclass(frozen=True, eq=False)
class Stacks:
    """The scans over layers of a program, by equation, with their lengths; the values that they make stacks of; and, by equation, why a
    scan that reads weights so is none.
    """

    scans: Mapping[int, int]
    values: Mapping[Any, Stack]
    rules: Mapping[int, ShardingRule]
    refused: Mapping[int, str]


def find_stacks(jaxpr: Any, weights: Collection[int], tied: Sequence[tuple[int, int]]) -> Stacks:
    """The scans over layers of a jaxpr whose calls are opened. `weights` are the inputs that may be parameters, by position; `tied` pairs
    inputs and outputs that hold the same piece of state.
    """
    rules = dict(_rules(jaxpr))
    scans: dict[int, int] = {}
    values: dict[Any, Stack] = {}
    refused: dict[int, str] = {}
    for length in sorted({n for e in jaxpr.eqns for n in _lengths(e)}, reverse=True):
        search = _Search(jaxpr, length, rules, [jaxpr.invars[k] for k in weights])
        search.tie([(jaxpr.invars[i], jaxpr.outvars[o]) for i, o in tied])
        search.run()
        if search.hidden:
            refused |= search.hidden
            continue
        scans |= dict.fromkeys(search.found, length)
        for v, d in search.dimensions():
            values.setdefault(v, Stack(d, length))
    return Stacks(scans, values, rules, refused)


def major(dims: Dim, rule: ShardingRule) -> str | None:
    """The factor by which a dimension is cut into blocks."""
    return next((f for f in dims if rule.size[f] > 1), None)


def places(rule: ShardingRule, tensors: Sequence[Any], of: Sequence[tuple[Dim, ...]], factor: str) -> Iterator[tuple[Any, int]]:
    """The values, with their dimensions, that a factor cuts into blocks."""
    for tensor, dims in zip(tensors, of, strict=True):
        for d, names in enumerate(dims):
            if not compat.is_literal(tensor) and major(names, rule) == factor:
                yield tensor, d


def _rules(jaxpr: Any) -> Iterator[tuple[int, ShardingRule]]:
    """The rule of each equation that has one of autopar's own, and no inner program."""
    builder = Builder()
    for i, e in enumerate(jaxpr.eqns):
        if compat.inner_jaxprs(e) or e.effects or not e.invars or e.primitive.name in _COUNTS_BLOCKS:
            continue
        avals = [builder.aval(v.aval) for v in (*e.invars, *e.outvars)]
        if has_user_rule(e.primitive.name, avals[: len(e.invars)], avals[len(e.invars) :]):
            continue
        operands: list[Operand] = [builder.literal(v).constant if compat.is_literal(v) else n for n, v in enumerate(e.invars)]
        params = normalise_params(e.params) + compat.derived_params(e)
        op = Op(e.primitive.name, params, tuple(operands), tuple(range(len(e.invars), len(avals))))

        def aval(o: Operand, avals: Sequence[Aval] = avals) -> Aval:
            return o.aval if isinstance(o, Constant) else avals[o]

        try:
            yield i, rule_for(op, aval)
        except RuleError:
            continue


def _lengths(e: Any) -> Iterator[int]:
    """The lengths of the scans in an equation."""
    if e.primitive.name == "scan":
        yield int(e.params["length"])
    for inner in compat.inner_jaxprs(e):
        for other in inner.jaxpr.eqns:
            yield from _lengths(other)


@dataclass
class _Search:
    """One length of scans. `parent` joins dimensions of values that count the same layers."""

    jaxpr: Any
    length: int
    rules: Mapping[int, ShardingRule]
    weights: Sequence[Any]
    parent: dict[tuple[Any, int], tuple[Any, int]] = field(default_factory=dict)
    marked: set[Hashable] = field(default_factory=set)
    found: list[int] = field(default_factory=list)
    hidden: dict[int, str] = field(default_factory=dict)

    def root(self, node: tuple[Any, int]) -> tuple[Any, int]:
        found = node
        while (above := self.parent.get(found, found)) != found:
            found = above
        while node != found:
            self.parent[node], node = found, self.parent.get(node, found)
        return found

    def join(self, nodes: Sequence[tuple[Any, int]]) -> None:
        for node in nodes:
            self.parent.setdefault(node, node)
        for node in nodes[1:]:
            self.parent[self.root(node)] = self.root(nodes[0])

    def tie(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        for a, b in pairs:
            for d in range(0 if compat.is_literal(b) else a.aval.ndim):
                self.join([(a, d), (b, d)])

    def run(self) -> None:
        """Find the scans over layers."""
        for i, rule in self.rules.items():
            e = self.jaxpr.eqns[i]
            for f in (f for f in rule.factors if rule.method[f] == "plain" and rule.size[f] % self.length == 0):
                self.join([*places(rule, e.invars, rule.operands, f), *places(rule, e.outvars, rule.results, f)])
        parameters = {self.root((w, d)) for w in self.weights for d, n in enumerate(w.aval.shape) if n == self.length}
        scans = [i for i, e in enumerate(self.jaxpr.eqns) if e.primitive.name == "scan" and e.params["length"] == self.length > 1]
        waiting = [i for i in scans if not self.jaxpr.eqns[i].effects]
        while begun := [i for i in waiting if self._runs_over_layers(i, parameters)]:
            self.found += begun
            waiting = [i for i in waiting if i not in begun]
            nodes = [n for i in self.found for n in (*self.stacked(i), *self.stacks(i))]
            for n in nodes:
                self.join([n])
            self.marked = set(map(self.root, nodes))
        self.hidden = dict(self._hidden(parameters))

    def _runs_over_layers(self, i: int, parameters: Collection[Hashable]) -> bool:
        """Whether a scan reads weights layer by layer, and of these no less than of others, as one over time may do; or what is known."""
        if any(self.root(n) in self.marked for n in self.stacked(i)):
            return True
        e = self.jaxpr.eqns[i]
        own = sum(v.aval.size for v, d in self.stacked(i) if self.root((v, d)) in parameters)
        every = {self.root((w, d)) for w in self.weights for d in range(w.aval.ndim)}
        outer = [v for v in e.invars[: compat.scan_parts(e)[1]] if not compat.is_literal(v)]
        common = sum(v.aval.size for v in outer if any(self.root((v, d)) in every for d in range(v.aval.ndim)))
        return own > 0 and own >= common

    def stacked(self, i: int) -> Iterator[tuple[Any, int]]:
        """What a scan reads layer by layer."""
        e = self.jaxpr.eqns[i]
        _, consts, carries = compat.scan_parts(e)
        return ((v, 0) for v in e.invars[consts + carries :] if not compat.is_literal(v))

    def stacks(self, i: int) -> Iterator[tuple[Any, int]]:
        """What a scan gives layer by layer."""
        e = self.jaxpr.eqns[i]
        return ((v, 0) for v in e.outvars[compat.scan_parts(e)[2] :])

    def _hidden(self, parameters: Collection[Hashable]) -> Iterator[tuple[int, str]]:
        """Scans that read weights layer by layer and cannot be cut."""
        for i, e in enumerate(self.jaxpr.eqns):
            inside = e.primitive.name != "scan" and self.length in set(_lengths(e))
            known = self.marked.intersection(parameters) if self.marked else parameters
            reads = any(self.root((v, d)) in known for v in e.invars if not compat.is_literal(v) for d in range(v.aval.ndim))
            if inside and reads:
                yield i, f"stands inside of a `{e.primitive.name}`"
            elif e.primitive.name == "scan" and e.params["length"] == self.length and e.effects:
                if any(self.root(n) in known for n in self.stacked(i)):
                    yield i, "has effects"

    def dimensions(self) -> Iterator[tuple[Any, int]]:
        """All values that count these layers, with the dimension that does."""
        seen: set[Any] = set()
        for v, d in sorted(self.parent, key=lambda node: node[1]):
            if v not in seen and self.root((v, d)) in self.marked:
                seen.add(v)
                yield v, d
