"""The program as data: ops over single-assignment values.

A `Graph` holds no JAX object. An op keeps `equation`, an index into the JAX side (`trace.program.Program`), from which
emission binds the primitive; everything that planning needs stands in the graph itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal as OneOf

from autopar.ir.dtypes import itemsize

Phase = OneOf["forward", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape, dtype and weak type of a value. PRNG keys have dtype `key<impl>`."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal operand, written into the program: the same on every device, without bytes of its own."""

    aval: Aval
    text: str


Operand = int | Constant


@dataclass(frozen=True, slots=True)
class Op:
    """One primitive applied to values.

    `params` are normalised: tuples, strings and numbers only. `scope` is the name-scope path without the wrappers of
    `jvp` and `transpose`; `source` the user's line as `file:line`. Ops with `effects` are never dead and keep their order.
    """

    primitive: str
    params: tuple[tuple[str, Any], ...]
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    phase: Phase = "forward"
    scope: str = ""
    source: str = ""
    equation: int = -1
    subgraphs: tuple[Graph, ...] = ()
    effects: bool = False

    def param(self, name: str, default: Any = None) -> Any:
        """The normalised parameter called `name`."""
        for key, value in self.params:
            if key == name:
                return value
        return default

    @property
    def inputs(self) -> tuple[int, ...]:
        """The operands that are values, literals left out."""
        return tuple(o for o in self.operands if isinstance(o, int))


@dataclass(frozen=True)
class Graph:
    """Ops in program order over values 0..n-1; `avals[v]` describes value v.

    `inputs` are the function's flat arguments; the last `num_constants` of them are closed-over constants, lifted.
    `outputs` are values or literals.
    """

    avals: tuple[Aval, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    ops: tuple[Op, ...]
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    num_constants: int = 0

    @cached_property
    def producer(self) -> dict[int, int]:
        """Value -> index of the op that makes it; inputs are absent."""
        return {r: i for i, op in enumerate(self.ops) for r in op.results}

    @cached_property
    def uses(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Value -> (op index, operand position) pairs in program order. Outputs are not listed."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, op in enumerate(self.ops):
            for k, o in enumerate(op.operands):
                if isinstance(o, int):
                    found.setdefault(o, []).append((i, k))
        return {v: tuple(u) for v, u in found.items()}

    @cached_property
    def output_values(self) -> frozenset[int]:
        return frozenset(o for o in self.outputs if isinstance(o, int))

    @cached_property
    def free(self) -> frozenset[int]:
        """Values that depend on no input (iota, zeros, masks): any device can make any part of them at no cost."""
        known: set[int] = set()
        for op in self.ops:
            if not op.effects and not op.subgraphs and all(not isinstance(o, int) or o in known for o in op.operands):
                known.update(op.results)
        return frozenset(known)

    def aval(self, operand: Operand) -> Aval:
        """The aval of a value or literal."""
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def walk(self) -> Iterator[Op]:
        """All ops, those of sub-graphs included."""
        for op in self.ops:
            yield op
            for sub in op.subgraphs:
                yield from sub.walk()
