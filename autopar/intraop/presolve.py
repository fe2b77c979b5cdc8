"""A smaller problem with the same optimum, and how to lift its answer back.

Three reductions, until none applies:

- *arc consistency*: a strategy of infinite cost, or without a finite partner on some edge, is deleted;
- *functional contraction*: where each live strategy of u has exactly one finite partner at v, v follows u: its costs, edges and
  usages move to u;
- *separable edges*: an edge that is `r_p + c_q` is two node costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autopar.intraop.evaluate import Infeasible, evaluate
from autopar.ir.problem import Edge, Floats, Ints, Problem, SideRows, Solution, Usage

Lift = Callable[[Solution], Solution]


def presolve(problem: Problem) -> tuple[Problem, Lift]:
    """Returns the smaller problem and the function that lifts a solution of it. `Infeasible` where a node loses its last strategy.

    Side columns are kept as they are; rows are rewritten onto the strategies that are left.
    """
    network = _Network(problem)
    network.reduce()
    roots = [u for u in range(len(problem.node_costs)) if network.leader[u] is None]
    images = network.images()
    index = {u: i for i, u in enumerate(roots)}
    root_of = [index[network.root(u)] for u in range(len(problem.node_costs))]
    smaller = replace(
        problem,
        node_costs=tuple(network.costs[u] for u in roots),
        edges=tuple(Edge(index[u], index[v], cost) for u in roots for v, cost in network.links[u].items() if u < v),
        usages=_moved_usages(problem, root_of, images),
    )
    smaller = replace(smaller, rows=_moved_rows(problem, smaller, root_of, images))

    def lift(solution: Solution) -> Solution:
        choice = tuple(int(images[u][solution.choice[root_of[u]]]) for u in range(len(problem.node_costs)))
        value = evaluate(problem, choice, solution.side)
        return replace(solution, choice=choice, objective=value.objective, peak_bytes=value.peak_bytes)

    return smaller, lift


class _Network:
    """Costs and edges with parallel edges merged and both directions at hand; `kept` numbers strategies as in the problem."""

    def __init__(self, problem: Problem):
        count = len(problem.node_costs)
        self.costs: list[Floats] = [np.array(c, float) for c in problem.node_costs]
        self.kept: list[Ints] = [np.arange(len(c)) for c in problem.node_costs]
        self.links: list[dict[int, Floats]] = [{} for _ in range(count)]
        self.leader: list[int | None] = [None] * count
        self.image: list[Ints | None] = [None] * count
        self.absorbed: list[int] = []
        self.waiting: deque[int] = deque(range(count))
        self.is_waiting = [True] * count
        for edge in problem.edges:
            cost = np.asarray(edge.cost, float)
            if edge.a == edge.b:
                self.costs[edge.a] += np.diagonal(cost)
            else:
                self.link(edge.a, edge.b, cost)

    def reduce(self) -> None:
        """Applies all reductions until no node is left to look at."""
        while self.waiting:
            u = self.waiting.popleft()
            self.is_waiting[u] = False
            if self.leader[u] is None:
                self.look_at(u)

    def look_at(self, u: int) -> None:
        """Deletes dead strategies of `u`; then folds or contracts its edges."""
        alive = np.isfinite(self.costs[u])
        for cost in self.links[u].values():
            alive &= np.isfinite(cost).any(axis=1)
        if not alive.size or not alive.all():
            self.keep(u, alive)
        for v in list(self.links[u]):
            if v not in self.links[u]:
                continue
            cost = self.links[u][v]
            finite = np.isfinite(cost)
            partners = int(finite.sum())
            if partners == finite.size:
                self.fold_if_separable(u, v, cost)
            elif not (finite.any(axis=0).all() and finite.any(axis=1).all()):  # an absorbed neighbour's edges were added
                self.wake(v)
                self.wake(u)
            elif partners == len(cost) == cost.shape[1] and len(self.links[u]) < len(self.links[v]):
                self.absorb(v, u)
                return
            elif partners == len(cost):
                self.absorb(u, v)
            elif partners == cost.shape[1]:
                self.absorb(v, u)
                return

    def keep(self, u: int, alive: np.ndarray) -> None:
        if not alive.any():
            raise Infeasible(f"node {u} has no strategy that its neighbours allow")
        self.costs[u], self.kept[u] = self.costs[u][alive], self.kept[u][alive]
        for v in list(self.links[u]):
            self.set_link(u, v, self.links[u][v][alive])
            self.wake(v)

    def fold_if_separable(self, u: int, v: int, cost: Floats) -> None:
        rows, columns, size = cost[:, :1], cost[0] - cost[0, 0], np.abs(cost)
        rounding = 4e-16 * (size + size[:, :1] + size[0] + size[0, 0])
        if np.any(np.abs(cost - rows - columns) > rounding):
            return
        self.costs[u] += rows[:, 0]
        self.costs[v] += columns
        del self.links[u][v], self.links[v][u]

    def absorb(self, u: int, v: int) -> None:
        """Makes v follow u; each row of the edge between them has one finite cell and each column at least one."""
        cost = self.links[u][v]
        follow = np.argmax(np.isfinite(cost), axis=1)
        self.costs[u] += cost[np.arange(len(follow)), follow] + self.costs[v][follow]
        del self.links[u][v], self.links[v][u]
        image = np.full(int(self.kept[u][-1]) + 1, -1)
        image[self.kept[u]] = self.kept[v][follow]
        self.image[v], self.leader[v] = image, u
        self.absorbed.append(v)
        for w, onward in self.links[v].items():
            del self.links[w][v]
            self.link(u, w, onward[follow])
            self.wake(w)
        self.links[v] = {}
        self.wake(u)

    def link(self, u: int, v: int, cost: Floats) -> None:
        known = self.links[u].get(v)
        self.set_link(u, v, cost if known is None else known + cost)

    def set_link(self, u: int, v: int, cost: Floats) -> None:
        self.links[u][v], self.links[v][u] = cost, cost.T

    def wake(self, u: int) -> None:
        if not self.is_waiting[u]:
            self.is_waiting[u] = True
            self.waiting.append(u)

    def root(self, u: int) -> int:
        """The node that decides for `u`; leaders point to it afterwards."""
        path = []
        while (leader := self.leader[u]) is not None:
            path.append(u)
            u = leader
        for v in path[:-1]:  # images still compose along the first leader: see `images`, called before
            self.leader[v] = u
        return u

    def images(self) -> list[Ints]:
        """For each node, its strategy (in the problem's numbers) by the strategy index of its root.

        Composed from the last absorbed to the first, so that a leader's is there before its followers need it.
        """
        images = [self.kept[u] for u in range(len(self.costs))]
        for v in reversed(self.absorbed):
            leader, image = self.leader[v], self.image[v]
            assert leader is not None and image is not None
            images[v] = image[images[leader]]
        return images


def _moved_usages(problem: Problem, root_of: list[int], images: list[Ints]) -> tuple[Usage, ...]:
    """Usages on the roots, those of equal root and interval added up."""
    total: dict[tuple[int, int, int], Floats] = {}
    for usage in problem.usages:
        key = (root_of[usage.node], usage.start, usage.stop)
        nbytes = usage.nbytes[images[usage.node]]
        total[key] = total[key] + nbytes if key in total else nbytes
    return tuple(Usage(*key, nbytes) for key, nbytes in total.items() if nbytes.any())


def _moved_rows(problem: Problem, smaller: Problem, root_of: list[int], images: list[Ints]) -> SideRows:
    """Each entry on a strategy becomes entries on the root's strategies that imply it."""
    rows = problem.rows
    if smaller.num_choices == problem.num_choices:  # nothing was deleted or contracted
        return rows
    on_strategy = rows.column < problem.num_choices
    row, column, value = (
        [rows.row[~on_strategy]],
        [rows.column[~on_strategy] - problem.num_choices + smaller.num_choices],
        [rows.value[~on_strategy]],
    )
    nodes = np.searchsorted(problem.offsets, rows.column, side="right") - 1
    for i in np.flatnonzero(on_strategy):
        u = int(nodes[i])
        implied = np.flatnonzero(images[u] == rows.column[i] - problem.offsets[u])
        row.append(np.full(len(implied), rows.row[i]))
        column.append(smaller.offsets[root_of[u]] + implied)
        value.append(np.full(len(implied), rows.value[i]))
    return replace(rows, row=np.concatenate(row), column=np.concatenate(column), value=np.concatenate(value))
