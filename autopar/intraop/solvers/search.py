"""A local search for a first answer, for problems without side rows: one node's strategy at a time, memory as a penalty."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from autopar.intraop.evaluate import evaluate
from autopar.intraop.solvers.memory import MemoryRows
from autopar.ir.problem import Floats, Problem

SWEEPS = 60
ROUNDS = 40


def improve(problem: Problem, memory: MemoryRows, choice: Sequence[int], deadline: float) -> tuple[int, ...] | None:
    """A feasible choice near `choice`, or None where none was found.

    The penalty per byte over the budget grows until the choice fits at the watched times, and shrinks after; times that turn out to
    be over are watched from then on. Of the choices met on the way the cheapest that fits is returned.
    """
    search = _Search(problem, memory, np.array(choice, np.int64))
    best, best_cost = None, np.inf
    for _ in range(ROUNDS):
        search.descend(deadline)
        value = evaluate(problem, tuple(search.choice), np.zeros(0))
        if value.feasible:
            if value.objective < best_cost:
                best, best_cost = tuple(int(p) for p in search.choice), value.objective
            search.penalty /= 2
        else:
            search.penalty *= 1.5 if search.add_times() else 3
        if time.monotonic() >= deadline or problem.budget is None:
            break
    return best


class _Search:
    """A choice with the load of the watched times; a move is priced by one row of numpy."""

    def __init__(self, problem: Problem, memory: MemoryRows, choice: np.ndarray):
        self.problem, self.memory, self.choice = problem, memory, choice
        self.limit = np.inf if problem.budget is None else problem.budget
        self.forbidden = 1e3 * (1.0 + sum(float(np.abs(c[np.isfinite(c)]).max(initial=0)) for c in problem.node_costs))
        self.neighbours: list[list[tuple[int, Floats]]] = [[] for _ in problem.node_costs]
        for edge in problem.edges:
            highest = float(np.abs(edge.cost[np.isfinite(edge.cost)]).max(initial=0))
            self.forbidden = max(self.forbidden, 1e3 * highest)
        for edge in problem.edges:
            cost = np.where(np.isfinite(edge.cost), edge.cost, self.forbidden)
            self.neighbours[edge.a].append((edge.b, cost.T))
            self.neighbours[edge.b].append((edge.a, cost))
        self.times: list[int] = []
        self.held = np.zeros((0, problem.num_choices))
        value = evaluate(problem, tuple(self.choice), np.zeros(0)).objective
        start = abs(value) if np.isfinite(value) else self.forbidden
        self.penalty = max(0.1 * start, 1e-9 * self.forbidden) / max(self.limit, 1.0) if np.isfinite(self.limit) else 0.0
        self.add_times()

    def add_times(self) -> bool:
        """Watches the worst times that are not yet watched; whether there were any."""
        if not np.isfinite(self.limit):
            return False
        values = np.zeros(self.problem.num_choices)
        values[self.problem.offsets[:-1] + self.choice] = 1.0
        times = self.memory.worst_times(self.memory.usage(values), self.limit, set(self.times))
        rows = np.zeros((len(times), self.problem.num_choices))
        for i, at in enumerate(times):
            columns, nbytes = self.memory.row(at)
            rows[i, columns] = nbytes
        self.times += times
        self.held = np.vstack([self.held, rows])
        return bool(times)

    def descend(self, deadline: float) -> None:
        """Moves each node to its cheapest strategy given the others, until none moves."""
        offsets = self.problem.offsets
        load = self.held[:, offsets[:-1] + self.choice].sum(axis=1) + self.memory.fixed[self.times]
        for _ in range(SWEEPS):
            moved = False
            for u, costs in enumerate(self.problem.node_costs):
                now, held = self.choice[u], self.held[:, offsets[u] : offsets[u + 1]]
                price = costs + sum(cost[self.choice[v]] for v, cost in self.neighbours[u])
                if self.times:
                    over = np.maximum(0.0, load[:, None] - held[:, [now]] + held - self.limit)
                    price = price + self.penalty * over.sum(axis=0)
                new = int(np.argmin(price))
                if price[new] < price[now] - 1e-12 * abs(price[now]):
                    load += held[:, new] - held[:, now]
                    self.choice[u], moved = new, True
            if not moved or time.monotonic() >= deadline:
                return
