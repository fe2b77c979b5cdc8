"""From jaxpr to `Graph`: calls opened, equal ops merged, dead ones dropped, update ops ordered leaf by leaf."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.dtypes import is_key
from autopar.ir.graph import GATE, ROOT, Aval, Constant, Graph, Op, Operand, Phase, Region, RegionKind
from autopar.rules import has_user_rule
from autopar.trace import compat
from autopar.trace.hoist import hoist
from autopar.trace.normalise import normalise_params
from autopar.trace.order import arrange
from autopar.trace.program import Equation, Flattened, Program
from autopar.trace.regions import opener
from autopar.trace.simplify import simplify

_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|remat|checkpoint|rematted_computation)\(|\)")


def flatten(closed: Any, input_names: Sequence[str] = (), output_names: Sequence[str] = ()) -> Flattened:
    """The graph of a closed jaxpr, its constants lifted to trailing inputs, with the equations to bind.

    Values and ops are renumbered densely after dead code is dropped.
    """
    builder = Builder()
    inputs = [builder.value(v.aval) for v in closed.jaxpr.invars]
    constants = [builder.lift(c) for c in closed.consts]
    outputs, literals = builder.open(closed.jaxpr, [*constants], [*inputs], Where())
    constants = [number for number, _ in builder.lifted.values()]
    graph = Graph(
        tuple(builder.avals),
        (*inputs, *constants),
        tuple(outputs),
        tuple(builder.ops),
        (*input_names, *(f"constant[{i}]" for i in range(len(constants)))),
        tuple(output_names),
        len(constants),
        tuple(builder.regions),
    )
    graph = simplify(graph, [e.literals for e in builder.equations])
    if graph.regions:
        graph = hoist(graph, builder.spread)
        graph = simplify(graph, [e.literals for e in builder.equations])
    graph = arrange(graph)
    return Flattened(graph, Program(tuple(builder.equations), tuple(c for _, c in builder.lifted.values()), literals))


@dataclass(frozen=True)
class Where:
    """What an opened call hands down: name stack, user line, the region that we are in, and whether forward's ops are run again in it."""

    stack: str = ""
    source: str = ""
    region: int = ROOT
    repeats: bool = False


@dataclass
class _Literal:
    """A literal with its value; becomes a `Constant` operand."""

    constant: Constant
    value: Any


@dataclass
class Builder:
    avals: list[Aval] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    seen: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    converted: dict[Any, Aval] = field(default_factory=dict)
    subgraphs: dict[int, tuple[Any, Graph]] = field(default_factory=dict)
    lifted: dict[int, tuple[int, Any]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)

    def aval(self, aval: Any) -> Aval:
        key = (aval.shape, aval.dtype, aval.weak_type) if hasattr(aval, "weak_type") else aval
        found = self.converted.get(key)
        if found is None:
            weak = bool(getattr(aval, "weak_type", False))
            found = Aval(tuple(map(int, getattr(aval, "shape", ()))), compat.dtype_name(getattr(aval, "dtype", "token")), weak)
            self.converted[key] = found
        return found

    def value(self, aval: Any) -> int:
        self.avals.append(self.aval(aval))
        return len(self.avals) - 1

    def literal(self, atom: Any) -> _Literal:
        return _Literal(Constant(self.aval(atom.aval), repr(_plain_number(atom.val))), atom.val)

    def open(self, jaxpr: Any, constants: list[Any], arguments: list[Any], where: Where) -> tuple[list[Operand], dict[int, Any]]:
        """Add a jaxpr's equations; returns its outputs as operands, and the values of those that are literals."""
        found = self.run(jaxpr, constants, arguments, where)
        literals = {i: o.value for i, o in enumerate(found) if isinstance(o, _Literal)}
        return [o.constant if isinstance(o, _Literal) else o for o in found], literals

    def run(self, jaxpr: Any, constants: list[Any], arguments: list[Any], where: Where) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return self.literal(atom) if compat.is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            operands = [read(a) for a in equation.invars]
            env.update(zip(equation.outvars, self.equation(equation, operands, where), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any], where: Where) -> Sequence[Any]:
        here = Where(_join(where.stack, compat.name_stack(equation)), where.source, where.region, where.repeats)
        opens = opener(equation)
        if opens is not None:
            return opens(self, equation, operands, replace(here, source=compat.source_line(equation) or where.source))
        inner = None if self.stays_closed(equation) else compat.opened(equation)
        if inner is not None:
            constants = [self.lift(c) for c in inner.consts]
            repeated = compat.run_again(equation)
            for k in repeated:
                operands[k] = self.gate(operands[k], here)
            here = replace(here, repeats=here.repeats or bool(repeated))
            return self.run(inner.jaxpr, constants, operands, replace(here, source=compat.source_line(equation) or where.source))
        return self.add(equation, operands, here)

    def gate(self, value: Any, where: Where) -> Any:
        """A value as it is read again on purpose."""
        if isinstance(value, _Literal) or not self.avals[value].size:
            return value
        result = self.value_of(self.avals[value])
        self.equations.append(Equation(None, {}))
        last = len(self.equations) - 1
        named = scope(where.stack), where.source
        self.ops.append(Op(GATE, (), (value,), (result,), "backward", *named, last, region=where.region, again=True))
        return result

    def stays_closed(self, equation: Any) -> bool:
        """Whether a user's rule stands for this call of a jitted function, and not for one that was made of it, as its derivative."""
        if equation.primitive.name not in ("jit", "pjit") or not compat.is_as_written(equation):
            return False
        operands, results = [self.aval(v.aval) for v in equation.invars], [self.aval(v.aval) for v in equation.outvars]
        return has_user_rule(f"jit:{compat.call_name(equation)}", operands, results)

    def lift(self, value: Any) -> int:
        """A constant of an opened call as an input of the graph, one per array."""
        if id(value) not in self.lifted:
            self.lifted[id(value)] = (self.value(compat.abstract(value)), value)
        return self.lifted[id(value)][0]

    def add(self, equation: Any, operands: list[Any], where: Where) -> tuple[int, ...]:
        """One op, or the results of an equal one that stands already."""
        params = normalise_params(equation.params) + compat.derived_params(equation)
        plain = tuple(o.constant if isinstance(o, _Literal) else o for o in operands)
        bodies = compat.inner_jaxprs(equation)
        effects = bool(equation.effects)
        avals = [self.aval(v.aval) for v in equation.outvars]
        if avals and not effects and not any(a.size or is_key(a.dtype) or a.dtype == "float0" for a in avals):
            return tuple(self.nothing(a, where) for a in avals)
        key = None if effects or bodies or "<" in str(params) else (equation.primitive.name, params, plain, where.region)
        if key is not None and key in self.seen:
            return self.seen[key]
        results = tuple(self.value(v.aval) for v in equation.outvars)
        literals = {i: o.value for i, o in enumerate(operands) if isinstance(o, _Literal)}
        self.equations.append(Equation(equation, literals))
        self.ops.append(
            Op(
                equation.primitive.name,
                params,
                plain,
                results,
                "backward" if "transpose(" in where.stack else "forward",
                scope(where.stack),
                compat.source_line(equation) or where.source,
                len(self.equations) - 1,
                tuple(self.subgraph(b) for b in bodies),
                effects,
                where.region,
                where.repeats and "rematted_computation" in where.stack,
            )
        )
        if key is not None:
            self.seen[key] = results
        return results

    def begin(self, kind: RegionKind, equation: Any, where: Where, times: int) -> tuple[int, Where]:
        """A new region inside that of `where`, with what its ops are handed down."""
        self.equations.append(Equation(equation, {}))
        self.regions.append(Region(kind, where.region, times, len(self.equations) - 1))
        return len(self.regions) - 1, replace(where, region=len(self.regions) - 1)

    def body(self, closed: Any, operands: Sequence[Any], where: Where) -> list[Any]:
        """What a region's jaxpr gives for these operands."""
        return self.run(closed.jaxpr, [self.lift(c) for c in closed.consts], list(operands), where)

    def boundary(
        self, kind: str, equation: Any, operands: Sequence[Any], avals: Sequence[Any], where: Where, at: tuple[int, int]
    ) -> int | None:
        """An op between a region and its parent, in which it stands, `at` (region, position); returns its result, where it has one."""
        results = tuple(self.value(a) for a in avals)
        literals = {i: o.value for i, o in enumerate(operands) if isinstance(o, _Literal)}
        self.equations.append(Equation(equation, literals))
        plain = tuple(o.constant if isinstance(o, _Literal) else o for o in operands)
        phase: Phase = "backward" if "transpose(" in where.stack else "forward"
        params = (("position", at[1]), ("region", at[0]))
        last = len(self.equations) - 1
        self.ops.append(Op(kind, params, plain, results, phase, scope(where.stack), where.source, last, region=where.region))
        return results[0] if results else None

    def nothing(self, aval: Aval, where: Where) -> int:
        """A value without elements, made of a literal: it needs no operand's numbers."""
        zero = Aval((), aval.dtype)
        literal = compat.scalar_zero(aval.dtype)
        self.equations.append(Equation(compat.broadcast_equation((), aval.dtype, aval.shape, ()), {0: literal}))
        params = (("broadcast_dimensions", ()), ("shape", aval.shape), ("sharding", None))
        result, last = self.value_of(aval), len(self.equations) - 1
        operand, name = Constant(zero, repr(_plain_number(literal))), scope(where.stack)
        op = Op("broadcast_in_dim", params, (operand,), (result,), "forward", name, where.source, last, region=where.region)
        self.ops.append(op)
        return result

    def value_of(self, aval: Aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def spread(self, aval: Aval, shape: tuple[int, ...], dimensions: tuple[int, ...], like: int) -> int:
        """An equation that broadcasts a value of this aval, with the literals of equation `like`; returns its index."""
        equation = compat.broadcast_equation(aval.shape, aval.dtype, shape, dimensions)
        self.equations.append(Equation(equation, self.equations[like].literals))
        return len(self.equations) - 1

    def subgraph(self, closed: Any) -> Graph:
        """The graph of a body, one per cached jaxpr; its equations are not bound one by one."""
        found = self.subgraphs.get(id(closed.jaxpr))
        if found is None:
            found = (closed, flatten(closed).graph)
            self.subgraphs[id(closed.jaxpr)] = found
        return found[1]


def _plain_number(value: Any) -> Any:
    """A literal as Python writes it, whatever typed wrapper JAX keeps it in."""
    if hasattr(value, "tolist"):
        return value.tolist()
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)


def _join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner


def scope(stack: str) -> str:
    """The name-scope path without the wrappers that transformations put around it."""
    parts = [p for p in _WRAPPER.sub("", stack).split("/") if p and p not in ("checkpoint", "remat", "rematted_computation")]
    return "/".join(parts)
