"""A step whose scans over layers run in pieces, one after the other, each on its own slice of the stacked weights.

What counts the layers (`trace/stacks.py`) stands in parts: a part of each parameter, moment and gradient goes through its ops by itself, by
the same rules that cut it over devices. What an op reduces over the layers (a global norm) is reduced part by part, and then joined. So a
stage that runs a piece needs no part but its own. What no rule cuts reads the parts joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.ir.dtypes import accumulation_dtype
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import Reduction
from autopar.ir.strategy import Strategy
from autopar.rules import has_user_rule
from autopar.trace import compat
from autopar.trace.flatten import Builder, flatten
from autopar.trace.parts import Borders, Parts, Pieces, part_name
from autopar.trace.stacks import Stack, Stacks, find_stacks, major, places
from autopar.trace.trace import Traced

Localise = Callable[..., dict[str, Any]]
"""Parameters of a primitive for a part: `(primitive, params, rule, strategy, mesh, operand shapes, result shapes)`."""

AXIS = "layers"
_JOINS: dict[Reduction, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
_REDUCING = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "dot_general"})


def unstack(traced: Traced, cut: Callable[[int], Borders], weights: Collection[int], localise: Localise) -> Traced:
    """The step with its scans over layers cut at `cut(length)`, the borders of a scan of that length. Its `pieces` say which leaves are
    in parts then.

    `weights` are the inputs that may be parameters, by position. What cannot be cut stays as it is, with a note.
    """
    carried = traced.roles.carried
    if traced.closed is None or not _has_scan(traced.closed.jaxpr):
        return traced
    closed = compat.inlined(traced.closed, _stays)
    found = find_stacks(closed.jaxpr, weights, carried)
    notes = tuple(dict.fromkeys(_note(closed.jaxpr.eqns[i], why) for i, why in found.refused.items()))
    lengths = {length: cut(length) for length in sorted(set(found.scans.values()))}
    if all(len(borders) == 2 for borders in lengths.values()):
        return replace(traced, pieces=Pieces(notes=notes))
    constant = {i for i, o in carried if compat.is_literal(closed.jaxpr.outvars[o])}
    return _Unstacker(closed, found, lengths, localise).unstacked(traced, frozenset(weights) - constant, notes)


def _has_scan(jaxpr: Any) -> bool:
    return any(e.primitive.name == "scan" or any(_has_scan(inner.jaxpr) for inner in compat.inner_jaxprs(e)) for e in jaxpr.eqns)


def _stays(equation: Any) -> bool:
    """Whether a user's rule stands for a call, which then is one op."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    builder = Builder()
    operands, results = ([builder.aval(v.aval) for v in some] for some in (equation.invars, equation.outvars))
    return has_user_rule(f"jit:{compat.call_name(equation)}", operands, results)


def _note(equation: Any, why: str) -> str:
    line = next(_lines(equation), "an unknown line")
    if equation.primitive.name in compat.CHECKPOINTS:
        why = "stands inside of a `jax.checkpoint`. Checkpoint the layer inside of the scan instead"
    return f"the scan over layers at {line} runs on one stage: it {why}"


def _lines(equation: Any) -> Iterator[str]:
    """The user's lines of the scans in an equation, and of itself."""
    for inner in compat.inner_jaxprs(equation):
        for e in inner.jaxpr.eqns:
            if e.primitive.name == "scan" and compat.source_line(e):
                yield compat.source_line(e)
    if compat.source_line(equation):
        yield compat.source_line(equation)


@dataclass
class _Held:
    """A value as it is there: whole, or in parts, or both."""

    whole: Any = None
    stack: Stack | None = None
    parts: tuple[Any, ...] = ()
    slices: dict[tuple[Stack, int], Any] = field(default_factory=dict)


class _Unstacker:
    """Writes the program in pieces."""

    def __init__(self, closed: Any, found: Stacks, borders: Mapping[int, Borders], localise: Localise):
        self.closed, self.found, self.borders, self.localise = closed, found, borders, localise
        self.writer = compat.Writer()
        self.held: dict[Any, _Held] = {}
        self.in_parts: set[int] = set()
        """Equations that make parts, by number."""

    def unstacked(self, traced: Traced, weights: Collection[int], notes: tuple[str, ...]) -> Traced:
        jaxpr = self.closed.jaxpr
        for v in jaxpr.constvars:
            self.held[v] = _Held(v)
        invars, inputs = self._inputs(weights)
        for i, e in enumerate(jaxpr.eqns):
            self._equation(i, e)
        pairs = {o: inputs.get(i) for i, o in traced.roles.carried}
        outvars, outputs = self._outputs(pairs)
        self.writer.equations = _late(self.writer.equations, self.in_parts, {*invars, *jaxpr.constvars})
        closed = self.writer.program(invars, outvars, self.closed)
        names = traced.graph.input_names[: len(traced.graph.inputs) - traced.graph.num_constants], traced.graph.output_names
        flat = flatten(closed, _names(names[0], inputs), _names(names[1], outputs))
        carried = [
            pair
            for i, o in traced.roles.carried
            for pair in (zip(inputs[i].positions, outputs[o].positions, strict=True) if i in inputs else [(i, o)])
        ]
        roles = replace(traced.roles, carried=tuple(sorted(carried)))
        pieces = Pieces(inputs, outputs, tuple(self.borders.values()), notes)
        return replace(traced, graph=flat.graph, program=flat.program, roles=roles, closed=closed, pieces=pieces)

    # Inputs and outputs

    def _inputs(self, weights: Collection[int]) -> tuple[list[Any], dict[int, Parts]]:
        """The inputs of the program: weights that count layers come in parts."""
        first: list[Any] = []
        more: list[Any] = []
        found: dict[int, Parts] = {}
        count = len(self.closed.jaxpr.invars)
        for k, v in enumerate(self.closed.jaxpr.invars):
            stack = self.found.values.get(v) if k in weights else None
            if stack is None:
                first.append(v)
                self.held[v] = _Held(v)
                continue
            parts = [compat.variable_like(v, shape) for shape in self._shapes(v, stack)]
            self.held[v] = _Held(None, stack, tuple(parts))
            positions = (k, *range(count + len(more), count + len(more) + len(parts) - 1))
            found[k] = Parts(stack.dimension, self._borders(v, stack), positions)
            first.append(parts[0])
            more += parts[1:]
        return [*first, *more], found

    def _outputs(self, pairs: Mapping[int, Parts | None]) -> tuple[list[Any], dict[int, Parts]]:
        """The outputs of the program. State comes out as it comes in; other values as they are made."""
        jaxpr = self.closed.jaxpr
        first: list[Any] = []
        more: list[Any] = []
        found: dict[int, Parts] = {}
        for k, v in enumerate(jaxpr.outvars):
            held = None if compat.is_literal(v) else self.held[v]
            known = pairs.get(k)
            stack = None
            if held is not None and known is not None:
                stack = self.found.values[v]
            elif held is not None and k not in pairs and held.parts:
                stack = held.stack
            if stack is None:
                first.append(self._whole(v, jaxpr.eqns[-1]))
                continue
            parts = [self._part(v, stack, n, jaxpr.eqns[-1]) for n in range(len(self.borders[stack.length]) - 1)]
            positions = (k, *range(len(jaxpr.outvars) + len(more), len(jaxpr.outvars) + len(more) + len(parts) - 1))
            found[k] = Parts(stack.dimension, self._borders(v, stack), positions)
            first.append(parts[0])
            more += parts[1:]
        return [*first, *more], found

    def _borders(self, v: Any, stack: Stack) -> Borders:
        """The borders of a value's parts along its dimension."""
        each = v.aval.shape[stack.dimension] // stack.length
        return tuple(b * each for b in self.borders[stack.length])

    def _shapes(self, v: Any, stack: Stack) -> list[tuple[int, ...]]:
        shape, d = v.aval.shape, stack.dimension
        return [(*shape[:d], end - begin, *shape[d + 1 :]) for begin, end in pairwise(self._borders(v, stack))]

    # Values

    def _whole(self, atom: Any, reader: Any) -> Any:
        if compat.is_literal(atom):
            return atom
        held = self.held[atom]
        if held.whole is None:
            assert held.stack is not None
            d = held.stack.dimension
            (held.whole,) = self.writer.call(lambda *xs: [lax.concatenate(xs, d)], held.parts, reader)
        return held.whole

    def _part(self, atom: Any, stack: Stack, n: int, reader: Any) -> Any:
        """Part n of a value along a dimension."""
        held = _Held(atom) if compat.is_literal(atom) else self.held[atom]
        if held.stack == stack:
            return held.parts[n]
        if (stack, n) not in held.slices:
            first = len(self.writer.equations)
            begin, end = self._borders(atom, stack)[n : n + 2]
            (found,) = self.writer.call(
                lambda x: [lax.slice_in_dim(x, begin, end, axis=stack.dimension)], [self._whole(atom, reader)], reader
            )
            held.slices[stack, n] = found
            self.in_parts.update(range(first, len(self.writer.equations)))
        return held.slices[stack, n]

    # Equations

    def _equation(self, i: int, e: Any) -> None:
        if i in self.found.scans:
            self._scan(e, self.found.scans[i])
            return
        rule = self.found.rules.get(i)
        factor = self._factor(e, rule) if rule is not None else None
        if rule is not None and factor is not None:
            self._in_parts(e, rule, *factor)
        elif rule is not None and (reduced := self._reduced(e, rule)) is not None:
            self._reduce(e, rule, *reduced)
        else:
            operands = [self._whole(v, e) for v in e.invars]
            self._give_whole(e.outvars, self.writer.add(e, operands, [v.aval.shape for v in e.outvars], e.params))

    def _give_whole(self, old: Sequence[Any], results: Sequence[Any]) -> None:
        self.held.update((v, _Held(new)) for v, new in zip(old, results, strict=True))

    def _give_parts(self, v: Any, stack: Stack, parts: Sequence[Any]) -> None:
        self.held[v] = _Held(None, stack, tuple(parts))

    def _factor(self, e: Any, rule: ShardingRule) -> tuple[str, int] | None:
        """The factor that counts the layers in all results, with their number."""
        first = self.found.values.get(e.outvars[0]) if e.outvars else None
        factor = major(rule.results[0][first.dimension], rule) if first is not None else None
        if first is None or factor is None or not self._counts(rule, factor, first.length) or self._cut(rule, factor) is None:
            return None
        found = dict(places(rule, e.outvars, rule.results, factor))
        alike = all(v in found and self.found.values.get(v) == Stack(found[v], first.length) for v in e.outvars)
        return (factor, first.length) if alike else None

    def _counts(self, rule: ShardingRule, factor: str, length: int) -> bool:
        """Whether blocks of a factor may be layers."""
        return rule.method[factor] == "plain" and rule.size[factor] % length == 0

    def _cut(self, rule: ShardingRule, factor: str) -> list[int | None] | None:
        """The dimension of each operand that a factor cuts into blocks; None where it stands inside of a dimension, or twice."""
        found: list[int | None] = []
        for dims in rule.operands:
            having = [d for d, names in enumerate(dims) if factor in names]
            if len(having) > 1 or any(major(dims[d], rule) != factor for d in having):
                return None
            found.append(having[0] if having else None)
        return found

    def _in_parts(self, e: Any, rule: ShardingRule, factor: str, length: int) -> None:
        """An op part by part."""
        first = len(self.writer.equations)
        shapes = [self._shapes(v, self.found.values[v]) for v in e.outvars]
        results = [self._run(e, rule, factor, length, n, some) for n, some in enumerate(zip(*shapes, strict=True))]
        for v, parts in zip(e.outvars, zip(*results, strict=True), strict=True):
            self._give_parts(v, self.found.values[v], parts)
        self.in_parts.update(range(first, len(self.writer.equations)))

    def _run(self, e: Any, rule: ShardingRule, factor: str, length: int, n: int, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """An op on part n, with results of these shapes."""
        cut = self._cut(rule, factor)
        assert cut is not None
        operands = [self._whole(v, e) if d is None else self._part(v, Stack(d, length), n, e) for v, d in zip(e.invars, cut, strict=True)]
        strategy, mesh = Strategy(((factor, (AXIS,)),)), LogicalMesh((AXIS,), (length,))
        before = [tuple(v.aval.shape) for v in operands]
        sharding = {k: v for k, v in e.params.items() if k in ("sharding", "out_sharding")}
        params = self.localise(e.primitive.name, dict(e.params), rule, strategy, mesh, before, shapes) | sharding
        return self.writer.add(e, operands, shapes, params)

    def _reduced(self, e: Any, rule: ShardingRule) -> tuple[str, int] | None:
        """The factor that counts the layers of an operand in parts, and that the op reduces."""
        if e.primitive.name not in _REDUCING:
            return None
        for v, dims in zip(e.invars, rule.operands, strict=True):
            stack = None if compat.is_literal(v) else self.held[v].stack
            factor = major(dims[stack.dimension], rule) if stack is not None else None
            if stack is None or factor is None or factor not in rule.reduced:
                continue
            if self._counts(rule, factor, stack.length) and self._cut(rule, factor) is not None:
                return factor, stack.length
        return None

    def _reduce(self, e: Any, rule: ShardingRule, factor: str, length: int) -> None:
        """A reduction over the layers: part by part, then of what the parts give; narrow floats are added up in float32."""
        shapes = [v.aval.shape for v in e.outvars]
        kind = rule.reduction(factor)
        parts = [self._run(e, rule, factor, length, n, shapes)[0] for n in range(len(self.borders[length]) - 1)]
        dtype = e.outvars[0].aval.dtype
        wide = accumulation_dtype(compat.dtype_name(dtype)) if kind == "sum" else compat.dtype_name(dtype)

        def join(*xs: Any) -> list[Any]:
            if wide != compat.dtype_name(dtype):
                xs = tuple(lax.convert_element_type(x, jnp.dtype(wide)) for x in xs)
            return [lax.convert_element_type(reduce(_JOINS[kind], xs), dtype)]

        self._give_whole(e.outvars, self.writer.call(join, parts, e))

    # Scans

    def _scan(self, e: Any, length: int) -> None:
        """Scans of the pieces, one after the other. What each step only adds to begins anew in each piece, and is added up after."""
        inner, consts, carries = compat.scan_parts(e)
        fixed = [self._whole(v, e) for v in e.invars[:consts]]
        carry = [self._whole(v, e) for v in e.invars[consts : consts + carries]]
        sums: dict[int, list[Any]] = {k: [] for k in compat.accumulators(e)}
        spans = list(enumerate(pairwise(self.borders[length])))
        stacks: list[list[Any]] = [[] for _ in e.outvars[carries:]]
        for n, (begin, end) in reversed(spans) if e.params["reverse"] else spans:
            parts = [self._part(v, Stack(0, length), n, e) for v in e.invars[consts + carries :]]
            results = self._piece(e, [*fixed, *carry, *parts], end - begin)
            carry = results[:carries]
            for k, found in sums.items():
                found.append(carry[k])
                carry[k] = self._nothing(inner.in_avals[consts + k], e)
            for stack, y in zip(stacks, results[carries:], strict=True):
                stack.append(y)
        for k, found in sums.items():
            (carry[k],) = self.writer.call(lambda *xs: [reduce(lax.add, xs)], found, e)
        self._give_whole(e.outvars[:carries], carry)
        for v, ys in zip(e.outvars[carries:], stacks, strict=True):
            self._give_parts(v, Stack(0, length), ys[::-1] if e.params["reverse"] else ys)

    def _piece(self, e: Any, operands: Sequence[Any], length: int) -> list[Any]:
        """A scan of some of the layers."""
        carries = compat.scan_parts(e)[2]
        shapes = [v.aval.shape if k < carries else (length, *v.aval.shape[1:]) for k, v in enumerate(e.outvars)]
        unroll = e.params.get("unroll", 1)
        changed = {"length": length, "unroll": unroll if isinstance(unroll, bool) else min(unroll, length)}
        return self.writer.add(e, operands, shapes, {**e.params, **changed})

    def _nothing(self, aval: Any, like: Any) -> Any:
        return self.writer.call(lambda: [lax.full(aval.shape, 0, aval.dtype)], [], like)[0]


def _late(equations: Sequence[Any], movable: Collection[int], inputs: Collection[Any]) -> list[Any]:
    """Equations in an order in which what is made of inputs alone, in parts, comes just before it is first read: a part that is cast for
    the last piece belongs to its layers, though all parts are cast before the first one.
    """
    fixed = set(inputs)
    moving = []
    for i, e in enumerate(equations):
        if all(compat.is_literal(v) or v in fixed for v in e.invars) and not e.effects:
            fixed.update(e.outvars)
            moving += [i] if i in movable else []
    reader: dict[Any, int] = {}
    place = list(range(len(equations)))
    movers = set(moving)
    for i in reversed(range(len(equations))):
        if i in movers:
            place[i] = min((reader[v] for v in equations[i].outvars if v in reader), default=i)
        reader.update((v, place[i]) for v in equations[i].invars if not compat.is_literal(v) and reader.get(v, place[i]) >= place[i])
    return [equations[i] for i in sorted(range(len(equations)), key=lambda i: (place[i], i))]


def _names(names: Sequence[str], parts: Mapping[int, Parts]) -> tuple[str, ...]:
    """Names of leaves where some are in parts."""
    found = dict(enumerate(names))
    for k, some in parts.items():
        for position, (begin, end) in zip(some.positions, some.spans, strict=True):
            found[position] = part_name(names[k], some.dimension, begin, end)
    return tuple(found[k] for k in sorted(found))
