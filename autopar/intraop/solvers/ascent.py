"""A bound by dual ascent, for problems whose relaxation is too large to solve, and what the bound excludes.

Costs are moved between nodes and edges so that the sum of all minima, a bound, rises: sequential message passing (SRMP, Kolmogorov,
"A new look at reweighted message passing", 2015; on pairs it is TRW-S, 2006). Memory enters with a price per byte at each watched
time, moved along the excess of the answers met (Polyak's step). Choices read off along the way start the local search. Side rows and
columns are not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.intraop.solvers.memory import MemoryRows
from autopar.ir.problem import Edge, Floats, Problem

PATIENCE = 40
"""Passes without a gain of 1e-4 of the gap after which the bound is taken as it is."""

SEARCH_SHARE = 0.5
"""Share of the time so far above which no local search is started."""


@dataclass(frozen=True, eq=False)
class Excluded:
    """The bound (infinite where nothing fits), and the problem without strategies and pairs that no answer as good as the best one uses."""

    bound: float
    problem: Problem


def ascend(
    problem: Problem, memory: MemoryRows, best: Callable[[], float], offer: Callable[[Sequence[int]], None], deadline: float
) -> Excluded:
    """Raises the bound until it stalls, offering a choice now and then; `best()` is the value of the best answer so far.

    A bound above what any choice costs proves that none fits the budget.
    """
    dual, begin, searching = _Dual(problem, memory), time.monotonic(), 0.0
    choice: Sequence[int] = dual.choice
    kept, step, stalled = dual.snapshot(), 1.0, 0
    while time.monotonic() < deadline and stalled < PATIENCE:
        choice = dual.sweep(forward=True)
        dual.sweep(forward=False)
        now = time.monotonic()
        if searching <= SEARCH_SHARE * (now - begin):
            offer(choice)
            searching += time.monotonic() - now
        gained, upper = dual.bound() - kept.bound, best()
        if gained > 0:
            kept = dual.snapshot()
        if gained > 1e-4 * (upper - kept.bound if np.isfinite(upper) else abs(kept.bound)):
            stalled = 0
        else:
            stalled, step = stalled + 1, 0.9 * step
        if kept.bound > dual.most or (np.isfinite(upper) and upper - kept.bound <= 1e-9 * abs(upper)):
            break
        dual.move_prices(choice, step, upper)
    if not np.isfinite(best()):
        offer(choice)
    return Excluded(np.inf if kept.bound > dual.most else kept.bound, kept.without(best() - kept.bound))


def _most(problem: Problem) -> float:
    """More than any choice costs that no pair forbids."""
    largest = [float(c.max()) for c in problem.node_costs] + [float(e.cost[np.isfinite(e.cost)].max()) for e in problem.edges]
    return sum(largest) + problem.constant_cost + 1e-6 * sum(abs(x) for x in largest)


class _Dual:
    """Costs as split between nodes and edges: an edge's is `cost + on_a[:, None] + on_b`, and the nodes have the rest."""

    def __init__(self, problem: Problem, memory: MemoryRows):
        self.problem, self.memory = problem, memory
        self.plain = [np.array(c, float) for c in problem.node_costs]
        self.theta = [c.copy() for c in self.plain]
        self.ends = [(e.a, e.b) if e.a < e.b else (e.b, e.a) for e in problem.edges]
        self.cost = [e.cost if e.a < e.b else np.ascontiguousarray(e.cost.T) for e in problem.edges]
        self.on_a = [np.zeros(len(c)) for c in self.cost]
        self.on_b = [np.zeros(c.shape[1]) for c in self.cost]
        self.later: list[list[int]] = [[] for _ in self.plain]
        self.earlier: list[list[int]] = [[] for _ in self.plain]
        for e, (a, b) in enumerate(self.ends):
            self.later[a].append(e)
            self.earlier[b].append(e)
        self.most = _most(problem)
        self.choice = [0] * len(self.plain)
        self.times: list[int] = []
        self.held = np.zeros((0, problem.num_choices))
        self.price = np.zeros(0)

    @property
    def room(self) -> Floats:
        """Bytes left for the choices at the watched times (none are watched without a budget)."""
        return (self.problem.budget or 0.0) - self.memory.fixed[self.times]

    def sweep(self, forward: bool) -> tuple[int, ...]:
        """One pass over the nodes: each collects from the edges behind it, and spreads evenly over those before it."""
        order = range(len(self.theta)) if forward else range(len(self.theta) - 1, -1, -1)
        behind, ahead = (self.earlier, self.later) if forward else (self.later, self.earlier)
        near, far = (self.on_b, self.on_a) if forward else (self.on_a, self.on_b)
        for u in order:
            if forward:
                self.read_off(u)
            theta = self.theta[u]
            for e in behind[u]:
                least = (self.cost[e] + far[e][:, None]).min(axis=0) if forward else (self.cost[e] + far[e]).min(axis=1)
                theta += least + near[e]
                near[e] = -least
            if ahead[u]:
                share = theta / max(len(behind[u]), len(ahead[u]))
                for e in ahead[u]:
                    far[e] = far[e] + share
                theta -= len(ahead[u]) * share
        return tuple(self.choice)

    def read_off(self, u: int) -> None:
        """The best strategy given the choices of earlier nodes and the messages of later ones."""
        price = self.plain[u].copy()
        for e in self.earlier[u]:
            price += self.cost[e][self.choice[self.ends[e][0]]]
        for e in self.later[u]:
            price -= self.on_a[e]
        self.choice[u] = int(np.argmin(price))

    def bound(self) -> float:
        """The sum of the minima, less what the prices would pay for a full memory."""
        nodes = sum(float(t.min()) for t in self.theta)
        edges = sum(float((c + a[:, None] + b).min()) for c, a, b in zip(self.cost, self.on_a, self.on_b, strict=True))
        return nodes + edges + self.problem.constant_cost - float(self.price @ self.room)

    def move_prices(self, choice: Sequence[int], step: float, upper: float) -> None:
        """Prices follow the excess of a choice at the watched times; new worst times are watched with price 0."""
        if self.problem.budget is None:
            return
        values = np.zeros(self.problem.num_choices)
        values[self.problem.offsets[:-1] + np.array(choice)] = 1.0
        self.watch(self.memory.worst_times(self.memory.usage(values), self.problem.budget, set(self.times)))
        excess = self.held @ values - self.room
        excess[(self.price == 0) & (excess < 0)] = 0.0
        size = float(excess @ excess)
        if not size:
            return
        distance = upper - self.bound() if np.isfinite(upper) else abs(self.bound())
        price = np.maximum(0.0, self.price + step * 0.2 * max(distance, 0.0) / size * excess)
        change = (price - self.price) @ self.held
        self.price = price
        for u, (a, b) in enumerate(zip(self.problem.offsets[:-1], self.problem.offsets[1:], strict=True)):
            self.plain[u] += change[a:b]
            self.theta[u] += change[a:b]

    def watch(self, times: list[int]) -> None:
        rows = np.zeros((len(times), self.problem.num_choices))
        for row, at in zip(rows, times, strict=True):
            columns, nbytes = self.memory.row(at)
            row[columns] = nbytes
        self.times += times
        self.held = np.vstack([self.held, rows])
        self.price = np.append(self.price, np.zeros(len(times)))

    def snapshot(self) -> _Snapshot:
        return _Snapshot(self.problem, self.bound(), [t.copy() for t in self.theta], self.ends, self.cost, list(self.on_a), list(self.on_b))


@dataclass(frozen=True, eq=False)
class _Snapshot:
    """Costs as they were split when the bound was best."""

    problem: Problem
    bound: float
    theta: list[Floats]
    ends: list[tuple[int, int]]
    cost: list[Floats]
    on_a: list[Floats]
    on_b: list[Floats]

    def without(self, gap: float) -> Problem:
        """The problem without what costs more than `gap` over the bound: infinite from here on, for presolve to delete."""
        slack = gap * (1 + 1e-9) + 1e-9 * abs(self.bound)
        extra = [t - t.min() for t in self.theta]
        over = []
        for (a, b), cost, on_a, on_b in zip(self.ends, self.cost, self.on_a, self.on_b, strict=True):
            rest = cost + on_a[:, None] + on_b
            rest -= rest.min()
            over.append(rest)
            extra[a] = extra[a] + rest.min(axis=1)
            extra[b] = extra[b] + rest.min(axis=0)
        nodes = tuple(np.where(x > slack, np.inf, c) for x, c in zip(extra, self.problem.node_costs, strict=True))
        edges = []
        for (a, b), cost, rest in zip(self.ends, self.cost, over, strict=True):
            beyond = (extra[a] - rest.min(axis=1))[:, None] + (extra[b] - rest.min(axis=0)) + rest
            edges.append(Edge(a, b, np.where(beyond > slack, np.inf, cost)))
        return replace(self.problem, node_costs=nodes, edges=tuple(edges))
