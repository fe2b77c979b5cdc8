"""What to make again instead of keeping it from forward to backward: the relaxation of a programme that may do either.

In the doubled graph (`trace/recompute.py`) each value of forward has a twin, made again late, which may be left out; late users
take either. A class of equal layers that the relaxation makes again in part is made again in as many of its members, the first of
forward before the others. What is then made again is as fixed as the rest of the program, and planned like it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.costs import Pricer, is_fusible, is_reduction
from autopar.errors import SolverError
from autopar.intraop.clusters import is_elementwise
from autopar.intraop.connect import fed_by_state
from autopar.intraop.enumerate import Pins, enumerate_problem
from autopar.intraop.shape import Shape
from autopar.intraop.solvers.bases import Bases
from autopar.intraop.solvers.highs import minimum_peak, relaxed, solve
from autopar.ir.graph import BOUNDARY, MATMULS, ROOT, Graph, Op
from autopar.ir.problem import Floats, Ints, Problem
from autopar.ir.same import Memo
from autopar.trace.recompute import Doubled, doubled, recompute, repeatable

MODES = ("auto", "none", "dots", "full")

RISE = 1.2
"""A place is narrow where more than so many times its bytes live on both sides of it."""

DEEP = 1.5
"""A narrow place with more than so many times the bytes of the one before or after it is none."""

SHARE = 1e-3
"""A share of a class below this is a tolerance, not a layer."""

EXCESS = 0.01
"""Share by which the relaxation may miss the budget: it is asked for less than there is."""

ROUGHLY = 0.95
"""Share of the budget for which shardings are sought that are only weighed by: they may need all of it."""

MANY = 5_000
"""Side columns above which no branch and bound is run for mere advice."""

LONGEST_S = 8.0
"""Seconds that what holds least is sought for."""

LEAST = 1.0
"""Bytes: a budget under which every value matters."""

_KEPT = MATMULS | {"sort", "top_k", "cholesky", "eigh", "svd", "qr", "lu", "fft", "pallas_call", "custom_call"}
"""Ops that are not run again where only what is cheap is."""


class Variants:
    """The program as it is, and with values of forward made again; `fold` makes the shape of a graph."""

    def __init__(self, graph: Graph, fold: Callable[[Graph], Shape], mode: str = "none"):
        self.graph, self.fold, self.mode = graph, fold, mode
        self._memo = Memo()

    def in_mode(self, mode: str) -> Variants:
        """The same, with what is known of it, for another mode."""
        found = Variants(self.graph, self.fold, mode)
        found._memo = self._memo
        return found

    def shape(self, values: frozenset[int] = frozenset()) -> Shape:
        """The shape of the program that makes these values again."""
        return self._memo.get(values, lambda: self.fold(recompute(self.graph, values)))

    @cached_property
    def asked(self) -> frozenset[int]:
        """The values that the mode makes again, whatever memory there is."""
        return {"dots": self.cheap, "full": self.every}.get(self.mode, frozenset)()

    def held_at_least(self, devices: int) -> float:
        """Bytes on a device that the program needs as it is, however it is cut: the state, and what forward keeps for later."""
        graph = self.graph
        late = {o for op in graph.ops if op.phase != "forward" for o in op.inputs}
        kept = list(graph.inputs)
        for op, writes in zip(graph.ops, self.shape().charges.writes, strict=True):
            kept += [op.results[k] for k in writes if op.phase == "forward" and op.results[k] in late]
        return sum(graph.avals[v].nbytes for v in kept) / devices

    def needed_at_least(self, devices: int) -> float:
        """About the bytes on a device that the program needs however it is cut, with all made again that the mode allows: the state, what
        is kept at narrow places, and the operands and results of the largest product.
        """
        if self.mode != "auto":
            return self.held_at_least(devices)
        graph = self.graph
        kept = {*graph.inputs, *self.narrow}
        products = (op for op in graph.ops if op.primitive in MATMULS)
        largest = max((sum(graph.avals[v].nbytes for v in {*op.inputs, *op.results} - kept) for op in products), default=0)
        return (sum(graph.avals[v].nbytes for v in kept) + largest) / devices

    def every(self) -> frozenset[int]:
        """All that can be made again between the narrow places."""
        return repeatable(self.graph) - self.narrow

    @property
    def narrow(self) -> frozenset[int]:
        """What crosses the program's narrow places."""
        return self._memo.get("narrow", lambda: borders(self.shape()))

    def cheap(self) -> frozenset[int]:
        """The same without the results of matmuls that hold weights, and of other ops that are dear."""
        dear = {r for op in self.graph.ops if op.primitive in _KEPT and not _is_batched(op) for r in op.results}
        return self.every() - dear

    @property
    def doubled(self) -> tuple[Doubled, Shape]:
        """The program in which all of `every` may be made again."""
        return self._memo.get("doubled", self._doubled)

    def _doubled(self) -> tuple[Doubled, Shape]:
        found = doubled(self.graph, self.narrow)
        return found, self.fold(found.graph)


def _is_batched(op: Op) -> bool:
    """Whether an op multiplies activations, as attention does, whose results are larger than what they are made of."""
    return op.primitive == "dot_general" and bool(op.param("dimension_numbers")[1][0])


def borders(shape: Shape) -> frozenset[int]:
    """The forward values that cross the program's narrow places, such as the residual stream between the blocks of a transformer.

    A narrow place is a valley of the bytes that live between one forward op and the next, with more than `RISE` times as many on
    both sides. What depends on state and constants alone does not count, nor what fusions make of other values that live there.
    """
    places = _Places(shape)
    crossing = [places.crossing(n) for n in places.dear]
    height = [float(sum(shape.graph.avals[v].nbytes for v in values)) for values in crossing]
    return frozenset(v for n in _valleys(height) for v in crossing[n])


def _fixed(graph: Graph, known: frozenset[int]) -> frozenset[int]:
    """These values, and inside of loops what comes from outside the same in each iteration, and what follows from that."""
    found = set(known) | graph.fixed_inside
    for op in graph.ops:
        inside = op.region != ROOT and op.primitive not in BOUNDARY and bool(op.inputs)
        if inside and all(o in found for o in op.inputs):
            found.update(op.results)
    return frozenset(found)


class _Places:
    """The places just before each forward op that is no part of a fusion; ops are counted in forward only."""

    def __init__(self, shape: Shape):
        graph = self.graph = shape.graph
        self.fixed = _fixed(graph, fed_by_state(graph, shape.carried) | graph.free | frozenset(graph.inputs))
        forward = [i for i, op in enumerate(graph.ops) if op.phase == "forward"]
        self.cheap = [is_reduction(graph.ops[i]) or is_fusible(graph.ops[i], is_elementwise(shape.rules[i])) for i in forward]
        self.dear = [n for n, cheap in enumerate(self.cheap) if not cheap]
        self.made = {r: n for n, i in enumerate(forward) for r in graph.ops[i].results}
        self.ops = [graph.ops[i] for i in forward]
        step = {i: n for n, i in enumerate(forward)}
        self.last = {r: max((step[u] for u, _ in graph.uses.get(r, ()) if u in step), default=-1) for r in self.made}
        self.ends: dict[int, list[int]] = {}
        for r, n in self.last.items():
            if n >= 0 and r not in self.fixed:
                self.ends.setdefault(n, []).append(r)
        self.alive: set[int] = set()
        self.reached = 0

    def crossing(self, n: int) -> list[int]:
        """Values made before op n and read there or after, as few as the others follow from. Places are asked for in order."""
        for m in range(self.reached, n):
            self.alive.update(r for r in self.ops[m].results if r not in self.fixed and self.last[r] > m)
            self.alive.difference_update(self.ends.get(m, ()))
        self.reached = n
        known: dict[int, bool] = {}
        return sorted(v for v in self.alive if not self._follows(v, known))

    def _follows(self, value: int, known: dict[int, bool]) -> bool:
        """Whether a value is made by fusions of others that live here. One that backward made, of another loss in the step, is not."""
        if value not in known and value not in self.made:
            known[value] = False
        elif value not in known:
            n = self.made[value]
            inputs = [o for o in self.ops[n].inputs if o not in self.fixed]
            known[value] = self.cheap[n] and all(o in self.alive or self._follows(o, known) for o in inputs)
        return known[value]


def _valleys(height: Sequence[float]) -> list[int]:
    """Positions of the lowest points between one rise by the factor `RISE` and the next, without those high above the next ones."""
    found, falling, low, high = [], False, 0, 0
    for p, here in enumerate(height):
        if falling:
            low = p if here < height[low] else low
            if here > RISE * height[low]:
                found.append(low)
                falling, high = False, p
        else:
            high = p if here > height[high] else high
            if RISE * here < height[high]:
                falling, low = True, p
    beside = [min(height[found[max(0, n - 1)]], height[found[min(n + 1, len(found) - 1)]]) for n in range(len(found))]
    return [p for p, lowest in zip(found, beside, strict=True) if height[p] <= DEEP * lowest]


@dataclass(frozen=True)
class Promise:
    """What a step on a mesh takes where values are made again, in seconds, by relaxations: `all_again_s` if all are, whatever memory there
    is, and `seconds` with what is made again under the budget."""

    all_again_s: float = math.inf
    seconds: float = math.inf


class Advice:
    """What had better be made again on one mesh under a budget.

    A first relaxation finds shardings for the program that makes everything again; a second one, with no others, weighs what it saves
    to keep a value against the memory that it takes.
    """

    def __init__(
        self, variants: Variants, pricer: Pricer, budget: float, pins: Pins, time_limit_s: float | None, bases: Bases | None = None
    ):
        self.variants, self.pricer, self.budget, self.pins = variants, pricer, budget, pins
        self.time_limit_s, self.spent_s = time_limit_s, 0.0
        self.bases = bases or Bases()

    @property
    def seconds_left(self) -> float | None:
        """Seconds that an answer may take, after those before it; None for as long as it does."""
        return None if self.time_limit_s is None else max(0.0, self.time_limit_s - self.spent_s)

    @cached_property
    def _all_again(self) -> Problem:
        """The program that makes everything again."""
        return enumerate_problem(self.variants.doubled[1], self.pricer, ROUGHLY * self.budget, self.pins)[0]

    @cached_property
    def all_again_s(self) -> float:
        """Seconds that a step takes at least if everything is made again, whatever memory there is."""
        return self._relaxed(replace(self._all_again, budget=None, usages=()), 0.0)[1]

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Strategies worth a thought for each node of the program that makes everything again. Raises `Infeasible` if nothing fits."""
        problem = self._all_again
        shares, _ = self._relaxed(problem, 1.0 - ROUGHLY)
        nodes = np.split(shares, problem.offsets[1:-1])
        return tuple(tuple(int(s) for s in np.flatnonzero(node > SHARE)) for node in nodes)

    def values(self, share: float, rounded: Callable[[float], int] = math.ceil) -> tuple[frozenset[int], float]:
        """What to make again under a share of the budget, and about how many seconds a step then takes. Raises `Infeasible`.

        `rounded` makes whole layers of a share of a class.
        """
        doubled, shape = self.variants.doubled
        problem, _ = enumerate_problem(shape, self.pricer, share * self.budget, self.pins, doubled=doubled, only=self.choices)
        shares, seconds = self._relaxed(problem, EXCESS)
        return _values(shape, doubled, _counts(shape, doubled, problem.offsets, shares, rounded)), seconds

    def whole(self) -> tuple[frozenset[int], float]:
        """The same with all of a class or nothing, within the whole budget: the better advice where classes are small."""
        doubled, shape = self.variants.doubled
        problem, _ = enumerate_problem(shape, self.pricer, self.budget, self.pins, doubled=doubled, only=self.choices)
        if len(problem.side) > MANY:
            raise SolverError("too large to be asked for whole classes")
        begin = time.monotonic()
        found = solve(problem, time_limit_s=self.seconds_left, gap=EXCESS, least=False)
        self.spent_s += time.monotonic() - begin
        counts = {c: len(shape.folded.members[c]) for c in _optional(shape, doubled) if found.choice[c]}
        return _values(shape, doubled, counts), found.objective

    def _relaxed(self, problem: Problem, excess: float) -> tuple[Floats, float]:
        left, begin = self.seconds_left, time.monotonic()
        found = relaxed(problem, excess=excess, time_limit_s=left, bases=self.bases) if left != 0.0 else None
        self.spent_s += time.monotonic() - begin
        if found is None:
            raise SolverError("there was no time to say what had better be made again.")
        return found


def least_held(variants: Variants, pricer: Pricer, pins: Pins, time_limit_s: float | None) -> frozenset[int] | None:
    """What to make again, or not, so that the peak is as low as it can be: all or none of a class. None for want of time."""
    doubled, shape = variants.doubled
    problem, _ = enumerate_problem(shape, pricer, LEAST, pins, doubled=doubled)
    try:
        _, solution = minimum_peak(problem, time_limit_s=min(LONGEST_S, time_limit_s or LONGEST_S), gap=EXCESS)
    except SolverError:
        return None
    counts = {c: len(shape.folded.members[c]) for c in _optional(shape, doubled) if solution.choice[c]}
    return _values(shape, doubled, counts)


def _optional(shape: Shape, doubled: Doubled) -> list[int]:
    """The classes of what is made again, if it is."""
    members, clusters, added = shape.folded.members, shape.clusters, doubled.added
    return [c for c, alike in enumerate(members) if all(added.issuperset(clusters[m].ops) for m in alike)]


def _counts(shape: Shape, doubled: Doubled, offsets: Ints, shares: Floats, rounded: Callable[[float], int]) -> Mapping[int, int]:
    """Class of what may be left out -> how many of its members are made again."""
    found = {}
    for c in _optional(shape, doubled):
        share = 1.0 - float(shares[int(offsets[c])])
        found[c] = rounded((share - SHARE) * len(shape.folded.members[c])) if share > SHARE else 0
    return found


def _values(shape: Shape, doubled: Doubled, counts: Mapping[int, int]) -> frozenset[int]:
    """The values that stand for these members, by their numbers before doubling. Late in backward is early in forward."""
    graph = doubled.graph
    found: set[int] = set()
    for c, count in counts.items():
        members = shape.folded.members[c]
        for m in members[len(members) - count :]:
            found.update(doubled.origin[r] for i in shape.clusters[m].ops for r in graph.ops[i].results if r in doubled.origin)
    return frozenset(found)
