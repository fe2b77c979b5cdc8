"""All that a solver sees of the intra-op programme: one strategy per node, costs, memory over time, side rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal as OneOf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Edge:
    """`cost[p, q]` seconds when node `a` takes strategy p and node `b` strategy q; infinite where they exclude each other."""

    a: int
    b: int
    cost: Floats


@dataclass(frozen=True, eq=False)
class Usage:
    """Bytes that node `node` holds at every time in `[start, stop)`, by strategy."""

    node: int
    start: int
    stop: int
    nbytes: Floats


@dataclass(frozen=True, eq=False)
class SideColumns:
    """Variables beside the strategies, each in `[0, upper]`: flows and open arcs of the conversion trees.

    `integer` marks those that must be whole numbers. `usage_*` are bytes held per unit of a column over `[start, stop)`.
    """

    cost: Floats = field(default_factory=lambda: np.zeros(0))
    upper: Floats = field(default_factory=lambda: np.zeros(0))
    integer: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    usage_column: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    usage_start: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    usage_stop: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    usage_bytes: Floats = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.cost)


@dataclass(frozen=True, eq=False)
class SideRows:
    """Sparse rows `lower <= sum value * column <= upper`, in triplets.

    Columns are numbered globally: node i's strategy s is `Problem.offsets[i] + s`; side column k is `Problem.num_choices + k`.
    """

    row: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    column: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    value: Floats = field(default_factory=lambda: np.zeros(0))
    lower: Floats = field(default_factory=lambda: np.zeros(0))
    upper: Floats = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.lower)


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one strategy per node at the least cost in seconds, within `budget` bytes at every time.

    `node_costs[i][s]` is in seconds, infinite where strategy s is excluded. `fixed_bytes[t]` is held at time t whatever is chosen
    (empty: nothing). `budget` is None where memory does not matter.
    """

    node_costs: tuple[Floats, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    side: SideColumns = field(default_factory=SideColumns)
    rows: SideRows = field(default_factory=SideRows)
    horizon: int = 0
    fixed_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    budget: float | None = None
    constant_cost: float = 0.0

    @cached_property
    def offsets(self) -> Ints:
        """First global column of each node, and the number of strategy columns at the end."""
        return np.concatenate([[0], np.cumsum([len(c) for c in self.node_costs])]).astype(np.int64)

    @property
    def num_choices(self) -> int:
        """Number of strategy columns."""
        return int(self.offsets[-1])


Status = OneOf["optimal", "feasible", "infeasible", "time_limit"]


@dataclass(frozen=True, eq=False)
class Solution:
    """A choice per node and values of the side columns, with the proof of how good it is.

    `objective` and `bound` in seconds, `gap = (objective - bound) / objective`; `peak_bytes` the largest of the bytes over time.
    `status` says how the solve ended: `optimal` within the asked gap, `feasible` or `time_limit` with an answer that is not proven so.
    `memory_rows` counts the times at which the budget had to be stated: where it is 0, memory decided nothing.
    """

    choice: tuple[int, ...]
    side: Floats
    objective: float
    bound: float
    status: Status
    peak_bytes: float = 0.0
    seconds: float = 0.0
    variables: int = 0
    constraints: int = 0
    memory_rows: int = 0

    @property
    def gap(self) -> float:
        """Relative distance to the bound; 0 when proven optimal."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-30)
