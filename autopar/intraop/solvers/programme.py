"""The strong linear statement of a problem, as arrays.

Columns are the strategies, the side columns, then one *cell* per pair of strategies that an edge allows and prices. The cells of an
edge have the strategies as row and column sums, which makes the relaxation nearly integral (against under 1 % of the optimum for
`e >= s_p + s_q - 1`). Rows or columns of an edge that are priced alike share their cells, which loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from autopar.ir.problem import Edge, Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class Programme:
    """Minimise `cost @ x + constant` with `0 <= x <= upper`, `row_lower <= matrix @ x <= row_upper`, in seconds; without memory.

    Columns below `num_choices` are binary; side columns follow, integer as `integer` says; cells are whole when strategies are.
    """

    cost: Floats
    upper: Floats
    integer: np.ndarray
    matrix: sparse.csr_matrix
    row_lower: Floats
    row_upper: Floats
    constant: float
    num_choices: int
    num_side: int


def programme(problem: Problem) -> Programme:
    """States a presolved problem: every node cost is finite, every strategy has a partner on every edge."""
    node_costs = [np.array(c, float) for c in problem.node_costs]
    first_cell = problem.num_choices + len(problem.side)
    pieces = _Pieces(first_cell, len(node_costs))
    for edge in problem.edges:
        _add_edge(pieces, node_costs, problem.offsets, edge)
    nodes = np.repeat(np.arange(len(node_costs)), np.diff(problem.offsets))
    rows = problem.rows
    row = np.concatenate([nodes, *pieces.row, rows.row + pieces.next_row]).astype(np.int64)
    column = np.concatenate([np.arange(problem.num_choices), *pieces.column, rows.column]).astype(np.int64)
    value = np.concatenate([np.ones(problem.num_choices), *pieces.value, rows.value])
    shape = (pieces.next_row + len(rows), pieces.next_column)
    choose_one, marginals, cells = np.ones(len(node_costs)), np.zeros(pieces.next_row - len(node_costs)), pieces.next_column - first_cell
    return Programme(
        cost=np.concatenate([*node_costs, problem.side.cost, *pieces.cost]),
        upper=np.concatenate([np.ones(problem.num_choices), problem.side.upper, np.ones(cells)]),
        integer=np.concatenate([np.ones(problem.num_choices, bool), problem.side.integer, np.zeros(cells, bool)]),
        matrix=sparse.csr_matrix((value, (row, column)), shape=shape),
        row_lower=np.concatenate([choose_one, marginals, rows.lower]),
        row_upper=np.concatenate([choose_one, marginals, rows.upper]),
        constant=problem.constant_cost,
        num_choices=problem.num_choices,
        num_side=len(problem.side),
    )


class _Pieces:
    """Triplets and cell costs as they grow, an edge at a time."""

    def __init__(self, first_cell: int, first_row: int):
        self.next_column, self.next_row = first_cell, first_row
        self.row: list[Ints] = []
        self.column: list[Ints] = []
        self.value: list[Floats] = []
        self.cost: list[Floats] = []

    def add(self, row: Ints, column: Ints, value: float) -> None:
        self.row.append(row)
        self.column.append(column)
        self.value.append(np.full(len(row), value))


def _add_edge(pieces: _Pieces, node_costs: list[Floats], offsets: Ints, edge: Edge) -> None:
    """Moves what an edge's rows and columns cost at least to the nodes; the rest becomes cells with their marginals."""
    least = edge.cost.min(axis=1)
    rest = edge.cost - least[:, None]
    least_column = rest.min(axis=0)
    rest = rest - least_column
    node_costs[edge.a] += least
    node_costs[edge.b] += least_column
    if not rest.any():
        return
    row_of, rest = _alike(rest)
    column_of, rest = _alike(rest.T)
    p, q = np.nonzero(np.isfinite(rest.T))
    cells = pieces.next_column + np.arange(len(p))
    first, second = pieces.next_row, pieces.next_row + rest.shape[1]
    pieces.add(first + p, cells, 1.0)
    pieces.add(second + q, cells, 1.0)
    pieces.add(first + row_of, offsets[edge.a] + np.arange(len(row_of)), -1.0)
    pieces.add(second + column_of, offsets[edge.b] + np.arange(len(column_of)), -1.0)
    pieces.cost.append(rest.T[p, q])
    pieces.next_column += len(p)
    pieces.next_row = second + rest.shape[0]


def _alike(cost: Floats) -> tuple[Ints, Floats]:
    """Labels for equal rows, numbered by first appearance, and one row of each."""
    labels: dict[bytes, int] = {}
    cost = np.ascontiguousarray(cost)
    label = np.array([labels.setdefault(row.tobytes(), len(labels)) for row in cost], np.int64)
    first = np.unique(label, return_index=True)[1]
    return label, cost[first]
