"""From jaxpr to `Graph`: calls opened, equal ops merged, dead ones dropped, update ops ordered leaf by leaf."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.ir.graph import Aval, Constant, Graph, Op, Operand, Phase
from autopar.rules import has_user_rule
from autopar.trace import compat
from autopar.trace.normalise import normalise_params
from autopar.trace.program import Equation, Flattened, Program
from autopar.trace.simplify import simplify

_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|remat|checkpoint|rematted_computation)\(|\)")


def flatten(closed: Any, input_names: Sequence[str] = (), output_names: Sequence[str] = ()) -> Flattened:
    """The graph of a closed jaxpr, its constants lifted to trailing inputs, with the equations to bind.

    Values and ops are renumbered densely after dead code is dropped.
    """
    builder = _Builder()
    inputs = [builder.value(v.aval) for v in closed.jaxpr.invars]
    constants = [builder.lift(c) for c in closed.consts]
    outputs, literals = builder.open(closed.jaxpr, [*constants], [*inputs], _Where())
    constants = [number for number, _ in builder.lifted.values()]
    graph = Graph(
        tuple(builder.avals),
        (*inputs, *constants),
        tuple(outputs),
        tuple(builder.ops),
        (*input_names, *(f"constant[{i}]" for i in range(len(constants)))),
        tuple(output_names),
        len(constants),
    )
    graph = _phases(simplify(graph, [e.literals for e in builder.equations]))
    graph = _compact(_order_updates(_sink(_live(graph))))
    return Flattened(graph, Program(tuple(builder.equations), tuple(c for _, c in builder.lifted.values()), literals))


@dataclass(frozen=True)
class _Where:
    """What an opened call hands down: name stack, user line, and whether we are inside a checkpoint."""

    stack: str = ""
    source: str = ""


@dataclass
class _Literal:
    """A literal with its value; becomes a `Constant` operand."""

    constant: Constant
    value: Any


@dataclass
class _Builder:
    avals: list[Aval] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    seen: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    converted: dict[Any, Aval] = field(default_factory=dict)
    subgraphs: dict[int, tuple[Any, Graph]] = field(default_factory=dict)
    lifted: dict[int, tuple[int, Any]] = field(default_factory=dict)

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

    def open(self, jaxpr: Any, constants: list[Any], arguments: list[Any], where: _Where) -> tuple[list[Operand], dict[int, Any]]:
        """Add a jaxpr's equations; returns its outputs as operands, and the values of those that are literals."""
        found = self.run(jaxpr, constants, arguments, where)
        literals = {i: o.value for i, o in enumerate(found) if isinstance(o, _Literal)}
        return [o.constant if isinstance(o, _Literal) else o for o in found], literals

    def run(self, jaxpr: Any, constants: list[Any], arguments: list[Any], where: _Where) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return self.literal(atom) if compat.is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            operands = [read(a) for a in equation.invars]
            env.update(zip(equation.outvars, self.equation(equation, operands, where), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Any], where: _Where) -> Sequence[Any]:
        here = _Where(_join(where.stack, compat.name_stack(equation)), where.source)
        inner = None if self.stays_closed(equation) else compat.opened(equation)
        if inner is not None:
            constants = [self.lift(c) for c in inner.consts]
            return self.run(inner.jaxpr, constants, operands, replace(here, source=compat.source_line(equation) or where.source))
        return self.add(equation, operands, here)

    def stays_closed(self, equation: Any) -> bool:
        """Whether a user's rule stands for this call of a jitted function."""
        if equation.primitive.name not in ("jit", "pjit"):
            return False
        operands, results = [self.aval(v.aval) for v in equation.invars], [self.aval(v.aval) for v in equation.outvars]
        return has_user_rule(f"jit:{compat.call_name(equation)}", operands, results)

    def lift(self, value: Any) -> int:
        """A constant of an opened call as an input of the graph, one per array."""
        if id(value) not in self.lifted:
            self.lifted[id(value)] = (self.value(compat.abstract(value)), value)
        return self.lifted[id(value)][0]

    def add(self, equation: Any, operands: list[Any], where: _Where) -> tuple[int, ...]:
        """One op, or the results of an equal one that stands already."""
        params = normalise_params(equation.params)
        plain = tuple(o.constant if isinstance(o, _Literal) else o for o in operands)
        bodies = compat.inner_jaxprs(equation)
        effects = bool(equation.effects)
        key = None if effects or bodies or "<" in str(params) else (equation.primitive.name, params, plain)
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
            )
        )
        if key is not None:
            self.seen[key] = results
        return results

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


def _phases(graph: Graph) -> Graph:
    """Forward is what backward is computed from, and what nothing else needs; what depends on backward, or only feeds that, is the update.

    Scaling the old moments needs no gradient, yet belongs to the update.
    """
    feeds = _ancestors(graph, [op.phase == "backward" for op in graph.ops])
    late: set[int] = set()
    depends = []
    for op in graph.ops:
        depends.append(op.phase == "backward" or any(o in late for o in op.inputs))
        if depends[-1]:
            late.update(op.results)
    updates = _ancestors(graph, [d and op.phase != "backward" and not f for op, d, f in zip(graph.ops, depends, feeds, strict=True)])
    ops, made = [], set[int]()
    for op, feeds_backward, update in zip(graph.ops, feeds, updates, strict=True):
        update = (update or any(o in made for o in op.inputs)) and not feeds_backward  # what reads an update's result comes after it
        phase: Phase = "backward" if op.phase == "backward" else "update" if update else "forward"
        made.update(op.results if phase == "update" else ())
        ops.append(op if phase == op.phase else replace(op, phase=phase))
    return replace(graph, ops=tuple(ops))


# Ops that a compiler computes again where they are used rather than keep their result from forward to backward.
_CHEAP = frozenset(
    "add sub mul neg div square integer_pow eq ne ge gt le lt and or not select_n convert_element_type broadcast_in_dim "
    "reshape squeeze transpose max min copy".split()
)


def _sink(graph: Graph) -> Graph:
    """Cheap forward ops that only backward reads move to just before their first reader, where their operands live on anyway."""
    users: dict[int, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for o in op.inputs:
            users.setdefault(o, []).append(i)
    outputs, inputs = graph.output_values, set(graph.inputs)
    place = list(range(len(graph.ops)))
    phases = [op.phase for op in graph.ops]

    def stays(value: int, i: int) -> bool:
        """Whether a value is kept for backward whatever happens to op i."""
        small = graph.avals[value].size * 8 <= graph.avals[graph.ops[i].results[0]].size
        return small or value in inputs or any(phases[u] != "forward" for u in users[value] if u != i)

    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if phases[i] != "forward" or op.primitive not in _CHEAP or op.effects or any(r in outputs for r in op.results):
            continue
        readers = [u for r in op.results for u in users.get(r, ())]
        if readers and all(phases[u] != "forward" for u in readers) and all(stays(o, i) for o in op.inputs):
            place[i] = min(place[u] for u in readers)
            phases[i] = "backward" if any(phases[u] == "backward" for u in readers) else "update"
    order = sorted(range(len(graph.ops)), key=lambda i: (place[i], i))
    return replace(graph, ops=tuple(replace(graph.ops[i], phase=phases[i]) for i in order))


def _ancestors(graph: Graph, chosen: Sequence[bool]) -> list[bool]:
    """Per op: whether it is chosen, or a chosen one needs its results."""
    needed: set[int] = set()
    found = [False] * len(graph.ops)
    for i in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[i]
        if chosen[i] or any(r in needed for r in op.results):
            found[i] = True
            needed.update(op.inputs)
    return found


def _live(graph: Graph) -> Graph:
    """Without ops whose results nobody uses."""
    needed = {o for o in graph.outputs if isinstance(o, int)}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.effects or any(r in needed for r in op.results):
            needed.update(op.inputs)
            kept.append(op)
    return replace(graph, ops=tuple(reversed(kept)))


def _order_updates(graph: Graph) -> Graph:
    """Update ops depth first from each output: one leaf's update ends before the next one's begins.

    `tree_map` writes them level by level, which would keep every leaf's temporaries alive at once.
    """
    updates = {r: op for op in graph.ops if op.phase == "update" for r in op.results}
    if any(op.effects for op in updates.values()):
        return graph
    ordered: list[Op] = []
    done: set[int] = set()
    stack: list[tuple[Operand, bool]] = [(o, False) for o in reversed(graph.outputs)]
    while stack:
        value, ready = stack.pop()
        op = updates.get(value) if isinstance(value, int) else None
        if op is None or op.equation in done:
            continue
        if ready:
            done.add(op.equation)
            ordered.append(op)
        else:
            stack.append((value, True))
            stack.extend((o, False) for o in reversed(op.inputs))
    return replace(graph, ops=tuple(op for op in graph.ops if op.phase != "update") + tuple(ordered))


def _compact(graph: Graph) -> Graph:
    """Values renumbered in order of definition."""
    number: dict[int, int] = {v: i for i, v in enumerate(graph.inputs)}
    for op in graph.ops:
        for r in op.results:
            number[r] = len(number)

    def new(o: Operand) -> Operand:
        return number[o] if isinstance(o, int) else o

    ops = tuple(
        replace(op, operands=tuple(map(new, op.operands)), results=tuple(number[r] for r in op.results)) for op in graph.ops
    )
    old = sorted(number, key=number.__getitem__)
    return replace(
        graph,
        avals=tuple(graph.avals[v] for v in old),
        inputs=tuple(range(len(graph.inputs))),
        outputs=tuple(map(new, graph.outputs)),
        ops=ops,
    )
