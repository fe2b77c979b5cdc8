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
RegionKind = OneOf["scan", "while", "test", "cond", "branch"]
ENTERING = frozenset({"loop_carry", "loop_slice", "loop_view", "loop_read"})
"""Ops that stand before a region's own ops and make values inside it."""
LEAVING = frozenset({"loop_exit", "loop_stack", "loop_test", "branch_join"})
"""Ops that stand after a region's own ops and bring its values out."""
BOUNDARY = ENTERING | LEAVING
MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
"""Ops that multiply matrices, convolutions among them."""
GATE = "gate"
"""An op that gives its operand back, and that no compiler sees through: what it feeds is made again on purpose."""
ROOT = -1


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
    `region` is the loop body or branch in which the op stands. `again` marks what repeats an op of forward on purpose. `part` is the part
    of a program that is cut to which the op belongs: a layer of the model, or a piece of a stage's program; -1 for none.
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
    region: int = ROOT
    again: bool = False
    part: int = -1

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


@dataclass(frozen=True, slots=True)
class Region:
    """A loop body or branch whose ops stand in the graph themselves, together, between its entering and leaving ops.

    `scan` and `while` are loop bodies, `test` the predicate of the `while` that is its parent, `cond` holds one `branch` per case.
    `times` is how often it runs when its parent runs once (1 where that is not known); `equation` is JAX's own.
    """

    kind: RegionKind
    parent: int
    times: int
    equation: int


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
    regions: tuple[Region, ...] = ()

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
            bound = op.effects or op.subgraphs or op.primitive in BOUNDARY
            if not bound and all(not isinstance(o, int) or o in known for o in op.operands):
                known.update(op.results)
        return frozenset(known)

    @cached_property
    def again(self) -> frozenset[int]:
        """Values made again on purpose, and those of gates."""
        return frozenset(r for op in self.ops if op.again for r in op.results)

    @cached_property
    def fixed_inside(self) -> frozenset[int]:
        """Values of loops that are the same in each iteration: outer ones as `loop_read` brings them in."""
        return frozenset(r for op in self.ops if op.primitive == "loop_read" for r in op.results)

    @cached_property
    def unmoved(self) -> frozenset[int]:
        """Values for which a compiler need wait for nothing: those that are free, and those that no iteration of their loop changes."""
        return self.free | self.fixed_inside

    @cached_property
    def times(self) -> tuple[int, ...]:
        """How often each op runs per step. What stands between a region and its parent and works once per iteration counts so."""
        inside = [self._runs(r) for r in range(len(self.regions))]
        return tuple(inside[r] if (r := reads_in(op)) >= 0 else 1 for op in self.ops)

    def _runs(self, region: int) -> int:
        """How often a region runs per step."""
        n = 1
        while region != ROOT:
            n *= self.regions[region].times
            region = self.regions[region].parent
        return n

    def home(self, value: int) -> int:
        """The region in which a value stands: that of the op that makes it, or that which an entering op brings it into."""
        p = self.producer.get(value)
        if p is None:
            return ROOT
        op = self.ops[p]
        return int(op.param("region")) if op.primitive in ENTERING else op.region

    def value_times(self, value: int) -> int:
        """How often a value is made per step."""
        return self._runs(self.home(value)) if self.regions else 1

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """Region -> its first and last op, with those that enter and leave it and with the regions inside it."""
        found: dict[int, tuple[int, int]] = {}
        for i, op in enumerate(self.ops):
            region = int(op.param("region")) if op.primitive in BOUNDARY else op.region
            while region != ROOT:
                first, _ = found.get(region, (i, i))
                found[region] = (first, i)
                region = self.regions[region].parent
        return found

    @cached_property
    def goes_round(self) -> tuple[tuple[int, int], ...]:
        """The op by which each carried value of a loop comes in, paired with those that take it as it lies: round, and to the test."""
        begins = {op.params: i for i, op in enumerate(self.ops) if op.primitive == "loop_carry"}
        found = []
        for j, op in enumerate(self.ops):
            if op.primitive == "loop_exit":
                found.append((begins[op.params], j))
            elif op.primitive == "loop_view":
                found.append((self.producer[op.inputs[0]], j))
        return tuple(found)

    @cached_property
    def begins(self) -> dict[int, int]:
        """The op that takes a carried value round -> the op by which that value comes in."""
        return {j: i for i, j in self.goes_round}

    def path(self, region: int) -> tuple[int, ...]:
        """The regions from the outermost one to this one."""
        found: list[int] = []
        while region != ROOT:
            found.append(region)
            region = self.regions[region].parent
        return tuple(reversed(found))

    def reach(self, value: int, i: int) -> tuple[int, int]:
        """From where to where op i needs a value: all of a loop that the value stands outside of and the op inside."""
        if not self.regions or i >= len(self.ops):
            return i, i
        outside = set(self.path(self.home(value)))
        region = next((r for r in self.path(reads_in(self.ops[i])) if r not in outside), ROOT)
        return self.spans[region] if region != ROOT else (i, i)

    def aval(self, operand: Operand) -> Aval:
        """The aval of a value or literal."""
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]

    def walk(self) -> Iterator[Op]:
        """All ops, those of sub-graphs included."""
        for op in self.ops:
            yield op
            for sub in op.subgraphs:
                yield from sub.walk()


def reads_in(op: Op) -> int:
    """The region in whose iterations an op works: a slice is taken, and a stack filled, inside of the loop."""
    return int(op.param("region")) if op.primitive in ("loop_slice", "loop_stack", "loop_view", "loop_test", "loop_read") else op.region
