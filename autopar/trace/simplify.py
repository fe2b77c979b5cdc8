"""Ops that change nothing, and ops that say the same twice: left out, as every compiler leaves them out.

Two values that are one to the compiler would be moved twice in the plan and once in the compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import BOUNDARY, Constant, Graph, Op, Operand

Literals = Sequence[Mapping[int, Any]]
_NARROW = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"})
_PLATFORMS = frozenset({"cpu", "gpu", "cuda", "rocm", "tpu"})
_COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
_NOTHING = frozenset({"copy", "copy_p", "stop_gradient", "name"})
_SPREADS = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type", "transpose"})
# Ops that lay the same elements out in another shape, where they neither repeat nor combine any.
_REDUCTIONS = frozenset(f"reduce_{kind}" for kind in ("sum", "max", "min", "prod", "and", "or", "xor"))
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose"}) | _REDUCTIONS
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
}
# Primitive -> (operand that is the result, number that the other operand must be for that).
_UNITS: dict[str, tuple[tuple[int, float], ...]] = {
    "add": ((0, 0), (1, 0)),
    "add_any": ((0, 0), (1, 0)),
    "sub": ((0, 0),),
    "mul": ((0, 1), (1, 1)),
    "div": ((0, 1),),
    "pow": ((0, 1),),
    "max": ((0, -math.inf), (1, -math.inf)),
    "min": ((0, math.inf), (1, math.inf)),
    "or": ((0, 0), (1, 0)),
    "xor": ((0, 0), (1, 0)),
    "shift_left": ((0, 0),),
    "shift_right_logical": ((0, 0),),
    "shift_right_arithmetic": ((0, 0),),
}


def simplify(graph: Graph, literals: Literals) -> Graph:
    """The graph without ops that give one of their operands back, or what an earlier op gives. `literals[equation]` holds values."""
    state = _Simplifier(graph, literals)
    ops = tuple(op for op in map(state.op, graph.ops) if op is not None)
    return replace(graph, ops=ops, outputs=tuple(map(state.now, graph.outputs)))


@dataclass
class _Simplifier:
    """`same` maps a value to the one that stands for it, `uniform` to the number that all its elements are."""

    graph: Graph
    literals: Literals
    same: dict[int, int] = field(default_factory=dict)
    uniform: dict[int, Any] = field(default_factory=dict)
    made: dict[int, Op] = field(default_factory=dict)
    seen: dict[Any, tuple[int, ...]] = field(default_factory=dict)
    joins: dict[int, list[Op]] = field(default_factory=dict)

    def now(self, operand: Operand) -> Operand:
        return self.same.get(operand, operand) if isinstance(operand, int) else operand

    def op(self, op: Op) -> Op | None:
        """The op on the values that stand now, or None where its results stand already."""
        op = replace(op, operands=tuple(map(self.now, op.operands)))
        if op.primitive == "branch_join" and (chosen := self._taken(op)) is not None:
            self.same[op.results[0]] = chosen
            return None
        if op.effects or op.subgraphs or op.primitive in BOUNDARY:
            return op
        earlier = self._given(op) if len(op.results) == 1 else None
        if earlier is None:
            key = self._key(op)
            earlier = self.seen.setdefault((op.region, key), op.results) if key is not None else op.results
        if earlier != op.results and all(map(self._alike, earlier, op.results)):
            self.same.update(zip(op.results, earlier, strict=True))
            return None
        self._fold(op)
        self.made.update(dict.fromkeys(op.results, op))
        return op

    def _taken(self, op: Op) -> int | None:
        """The value that a join of branches gives, where it is known which branch is taken, for all that the branches give."""
        index = self._number(op, 0)
        if index is None:
            first = op.operands[1]
            return first if isinstance(first, int) and len(set(op.operands[1:])) == 1 else None
        if not self.joins:
            for other in self.graph.ops:
                if other.primitive == "branch_join":
                    self.joins.setdefault(other.param("region"), []).append(other)
        at = 1 + min(max(int(index), 0), len(op.operands) - 2)
        if any(isinstance(o.operands[at], Constant) for o in self.joins[op.param("region")]):
            return None
        found = op.operands[at]
        return found if isinstance(found, int) else None

    def _alike(self, a: int, b: int) -> bool:
        """Whether value `a` may stand for `b`. What leaves the program also keeps its weak type."""
        x, y = self.graph.avals[a], self.graph.avals[b]
        return (x.shape, x.dtype) == (y.shape, y.dtype) and (x.weak_type == y.weak_type or b not in self.graph.output_values)

    def _given(self, op: Op) -> tuple[int, ...] | None:
        """The value that the op gives back."""
        position = self._position(op)
        direct = op.operands[position] if position is not None else None
        for found in (direct, self._undone(op)):
            if isinstance(found, int) and self._alike(found, op.results[0]):
                return (found,)
        return None

    def _position(self, op: Op) -> int | None:
        """Position of the operand that is the result, if shapes and dtypes agree."""
        name = op.primitive
        if name in _NOTHING or name in ("convert_element_type", "slice", "dynamic_slice"):
            return 0
        if self._is_idle(op):
            return 0
        if name == "select_n":
            return self._branch(op)
        return next((at for at, unit in _UNITS.get(name, ()) if self._number(op, 1 - at) == unit), None)

    def _is_idle(self, op: Op) -> bool:
        """Whether the parameters leave the op nothing to do."""
        shape = self.graph.aval(op.operands[0]).shape if op.operands else ()
        match op.primitive:
            case "integer_pow":
                return bool(op.param("y") == 1)
            case "rev":
                return all(shape[d] == 1 for d in op.param("dimensions"))
            case "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
                return shape[op.param("axis")] == 1
            case "concatenate":
                return len(op.operands) == 1
            case "pad":
                return not any(any(config) for config in op.param("padding_config"))
        return op.primitive in _RESHAPES and self._keeps_order(op)

    def _branch(self, op: Op) -> int | None:
        """The branch that a known predicate picks, or any where all are one."""
        which = self._number(op, 0)
        if which is not None:
            return 1 + int(which)
        numbers = {repr(self._number(op, k)) for k in range(1, len(op.operands))}
        alike = len(set(op.operands[1:])) == 1 or (len(numbers) == 1 and "None" not in numbers)
        return 1 if alike else None

    def _undone(self, op: Op) -> int | None:
        """What this op makes of another of its kind: the operand of two negations, transposes, reshapes or casts that undo each other."""
        if op.primitive in _RESHAPES and self._keeps_order(op):
            return self._root(op)
        inner = self._maker(op)
        if inner is None or inner.primitive != op.primitive or not isinstance(inner.operands[0], int):
            return None
        if op.primitive == "transpose":
            p, q = inner.param("permutation"), op.param("permutation")
            return inner.operands[0] if all(p[q[d]] == d for d in range(len(p))) else None
        if op.primitive == "convert_element_type":
            source, middle = self.graph.avals[inner.operands[0]].dtype, self.graph.avals[inner.results[0]].dtype
            return inner.operands[0] if _holds(middle, source) else None
        return inner.operands[0] if op.primitive == "neg" else None

    def _maker(self, op: Op) -> Op | None:
        return self.made.get(op.operands[0]) if op.operands and isinstance(op.operands[0], int) else None

    def _root(self, op: Op) -> int | None:
        """The value that a chain of reshapes begins with."""
        inner = self._maker(op)
        while inner is not None and inner.primitive in _RESHAPES and self._keeps_order(inner):
            op, inner = inner, self._maker(inner)
        return op.operands[0] if isinstance(op.operands[0], int) else None

    def _reduced(self, op: Op) -> tuple[str, Operand, tuple[int, ...]]:
        """A chain of transposes and of reductions of one kind: the kind, the value that it begins with, and the dimensions of that
        value which are left, in their new order. Compilers do in one step what is transposed or reduced in several.
        """
        kind, dims = "transpose", self._long(op.results[0])
        value: Operand = op.results[0]
        step: Op | None = op
        while step is not None and (before := self._before(step, kind)) is not None:
            dims = [before[d] for d in dims]
            kind = step.primitive if step.primitive in _REDUCTIONS and not self._keeps_order(step) else kind
            value, step = step.operands[0], self._maker(step)
        return kind, value, tuple(dims)

    def _before(self, op: Op, kind: str) -> dict[int, int] | None:
        """Result dimension -> operand dimension, where the op transposes, reshapes dimensions of size one, or reduces by `kind`;
        `transpose` stands for any kind. Dimensions of size one may be left out.
        """
        if not op.operands:
            return None
        before, after = self._long(op.operands[0]), self._long(op.results[0])
        if op.primitive == "transpose":
            return dict(enumerate(op.param("permutation")))
        if op.primitive in _RESHAPES and self._keeps_order(op):
            sizes = [[self.graph.aval(o).shape[d] for d in dims] for o, dims in ((op.operands[0], before), (op.results[0], after))]
            return dict(zip(after, before, strict=True)) if sizes[0] == sizes[1] else None
        if op.primitive in _REDUCTIONS and kind in ("transpose", op.primitive):
            return dict(zip(after, [d for d in before if d not in op.param("axes")], strict=True))
        return None

    def _long(self, operand: Operand) -> list[int]:
        """The dimensions whose size is not one."""
        return [d for d, n in enumerate(self.graph.aval(operand).shape) if n != 1]

    def _keeps_order(self, op: Op) -> bool:
        """Whether the same elements stand in the same order, so that only dimensions of size one come, go or move."""
        before, after = self.graph.aval(op.operands[0]), self.graph.avals[op.results[0]]
        if op.primitive == "transpose":
            moved = [d for d in op.param("permutation") if before.shape[d] != 1]
            return moved == sorted(moved)
        return before.size == after.size and (op.primitive != "reshape" or op.param("dimensions") is None)

    def _number(self, op: Op, k: int) -> Any:
        """The number that all elements of operand k are, or None."""
        operand = op.operands[k]
        value: Any = self.uniform.get(operand) if isinstance(operand, int) else self.literals[op.equation].get(k)
        if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
            value = value.item()
        return value if isinstance(value, (bool, int, float)) else None

    def _fold(self, op: Op) -> None:
        """Note the number that all elements of the result are, where the operands say it."""
        if op.primitive == "platform_index" and (found := _platform(op.param("platforms"))) is not None:
            self.uniform[op.results[0]] = found
        numbers = [self._number(op, k) for k in range(len(op.operands))]
        if not numbers or len(op.results) != 1 or any(n is None or n != n for n in numbers):
            return
        result = self.graph.avals[op.results[0]].dtype
        if op.primitive in _SPREADS:
            found = numbers[0]
        elif op.primitive in _ARITHMETIC:
            found = _computed(_ARITHMETIC[op.primitive], numbers, [self.graph.aval(o).dtype for o in op.operands])
        elif op.primitive == "select_n":
            found = numbers[1 + int(numbers[0])]
        else:
            return
        if found is not None and _is_exact(result, found):
            self.uniform[op.results[0]] = found

    def _key(self, op: Op) -> Any:
        """What the op computes: equal keys, equal results. None where nothing is known about it."""
        name, params = op.primitive, tuple(p for p in op.params if p[0] != "update_jaxpr" or op.primitive == "scatter")
        operands = tuple(map(_name, op.operands))
        if "<" in str(params):
            return None
        if name in _RESHAPES and self._keeps_order(op):
            root = self._root(op)
            return "reshape", operands if root is None else (root,), self.graph.avals[op.results[0]].shape
        if name == "transpose" or name in _REDUCTIONS:
            kind, value, dims = self._reduced(op)
            return kind, _name(value), dims, self.graph.avals[op.results[0]].shape
        if name == "square" or (name == "integer_pow" and op.param("y") == 2):
            return "mul", operands * 2
        name = "add" if name == "add_any" else name
        operands = tuple(sorted(operands, key=str)) if name in _COMMUTATIVE else operands
        return (name, operands) if name in ("add", "mul") else (name, params, operands)


def _platform(platforms: Sequence[Sequence[str] | None]) -> int | None:
    """Which of the branches for certain platforms runs, where none of them is one that plans are for: the one for all others."""
    named = {p for entry in platforms for p in entry or ()}
    return platforms.index(None) if None in platforms and not named & _PLATFORMS else None


def _computed(function: Callable[..., Any], numbers: Sequence[Any], dtypes: Sequence[str]) -> Any:
    """What the arithmetic gives in these dtypes, with their rounding and wrap-around; None for dtypes that are not known here."""
    if not _NARROW.issuperset(dtypes):
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(*(np.asarray([n]).astype(d) for n, d in zip(numbers, dtypes, strict=True)))).item()


def _is_exact(dtype: str, number: Any) -> bool:
    """Whether a dtype has exactly this number."""
    if dtype not in _NARROW:
        return bool(number == 0 or number == 1 or (isinstance(number, float) and math.isinf(number)))
    with np.errstate(all="ignore"):
        try:
            return bool(np.asarray([number]).astype(dtype).item() == number)
        except OverflowError:
            return False


def _name(operand: Operand) -> Any:
    """Equal for operands that are one."""
    return operand if isinstance(operand, int) else (operand.aval.dtype, operand.text)


def _holds(wide: str, narrow: str) -> bool:
    """Whether every number of dtype `narrow` is one of `wide`. NumPy calls a cast of 64-bit integers to float64 safe."""
    if narrow.startswith(("int64", "uint64")):
        return wide == narrow
    return np.can_cast(jnp.dtype(narrow), jnp.dtype(wide))
