"""The conversion graph of a kind of value: its shardings as states, the elementary moves between them as priced arcs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.intraop.reshard import Price, moves_from
from autopar.ir.graph import Aval
from autopar.ir.mesh import LogicalMesh
from autopar.ir.same import Memo
from autopar.ir.sharding import Move, Reduction, TensorSharding


@dataclass(frozen=True)
class Arc:
    """A move from state `tail` to state `head`, in seconds."""

    tail: int
    head: int
    move: Move
    seconds: float


@dataclass(frozen=True, eq=False)
class StateGraph:
    """All shardings of values of one shape and dtype that can be reached, and the moves between them."""

    states: tuple[TensorSharding, ...]
    arcs: tuple[Arc, ...]

    @cached_property
    def index(self) -> dict[TensorSharding, int]:
        return {s: i for i, s in enumerate(self.states)}

    @cached_property
    def distance(self) -> NDArray[np.float64]:
        """Cheapest seconds from each state to each other one (Floyd and Warshall)."""
        n = len(self.states)
        d = np.full((n, n), np.inf)
        np.fill_diagonal(d, 0.0)
        for a in self.arcs:
            d[a.tail, a.head] = min(d[a.tail, a.head], a.seconds)
        for k in range(n):
            np.minimum(d, d[:, k, None] + d[None, k, :], out=d)
        return d

    @cached_property
    def lean(self) -> tuple[Arc, ...]:
        """Arcs that no sequence of other moves beats, one per pair of states."""
        best: dict[tuple[int, int], Arc] = {}
        for a in self.arcs:
            if a.seconds <= self.distance[a.tail, a.head] * (1 + 1e-9) + 1e-15:
                best.setdefault((a.tail, a.head), a)
        return tuple(best.values())

    @cached_property
    def _memo(self) -> Memo:
        return Memo()

    def useful(self, sources: frozenset[int], targets: frozenset[int]) -> tuple[Arc, ...]:
        """Lean arcs on a cheapest way from some source to some target: all that a value with one user needs."""
        return self._memo.get((sources, targets), lambda: self._useful(sources, targets))

    def _useful(self, sources: frozenset[int], targets: frozenset[int]) -> tuple[Arc, ...]:
        d = self.distance
        src, dst = sorted(sources), sorted(targets)
        best = d[np.ix_(src, dst)]
        kept = []
        for a in self.lean:
            through = d[src, a.tail][:, None] + a.seconds + d[a.head, dst][None, :]
            if np.any(np.isfinite(through) & (through <= best * (1 + 1e-9) + 1e-15)):
                kept.append(a)
        return tuple(kept)


def state_graph(
    aval: Aval, mesh: LogicalMesh, kinds: tuple[Reduction, ...], price: Price, barred: Collection[tuple[str, str]] = ()
) -> StateGraph:
    """All shardings reachable for `aval`, partial values of these kinds among them. `barred` moves (kind, axis) are left out."""
    start = TensorSharding.replicated(aval.ndim)
    states: dict[TensorSharding, int] = {start: 0}
    arcs: list[Arc] = []
    queue = [start]
    while queue:
        here = queue.pop()
        for move, there in moves_from(here, aval, mesh, kinds):
            if any((move.kind, a) in barred for a in move.axes):
                continue
            if there not in states:
                states[there] = len(states)
                queue.append(there)
            arcs.append(Arc(states[here], states[there], move, price(move, here, aval)))
    return StateGraph(tuple(states), tuple(arcs))
