"""A programme in the units that HiGHS sees, with the memory rows and covers known so far.

*Scaling.* Costs are divided by a unit such that the optimum is about 10^4: a dual tolerance of 1e-7 on each of a thousand columns is then
1e-8 of the objective, for sums of 1e-7 seconds as for sums of 10^11. The unit is a guess before the relaxation, corrected once by
its value. Memory rows are divided so that the budget is 10^3: coefficients down to 1e-12 of the budget survive HiGHS' threshold for small
values, and its tolerance of 1e-8 is 1e-11 of the budget. What tolerances still let through is cut off exactly (`_cover`).

*Fresh objects.* HiGHS reported wrong objectives when a programme with integers was run twice on one object, so only the
pure relaxation is ever re-run, and each value is recomputed from its solution.
"""

from __future__ import annotations

from dataclasses import replace

import highspy
import numpy as np
from scipy import sparse

from autopar.errors import CheckError, SolverError
from autopar.intraop.solvers.memory import MemoryRows
from autopar.intraop.solvers.programme import Programme
from autopar.ir.problem import Floats

SCALED_OPTIMUM = 1e4
SCALED_BUDGET = 1e3
REPORT_TOLERANCE = 1e-6

LARGE_COLUMNS = 10_000
"""Above so many columns a relaxation may miss dual feasibility by 1e-5 of a scaled cost: its bound is computed from the duals anyway."""


class Scaled:
    """Makes HiGHS objects of `model` under `limit` bytes; with `peak` a last column of the model stands for the limit.

    `unit` is what a scaled cost of one is worth; it, `times` and `covers` change as the solve learns.
    """

    def __init__(self, model: Programme, memory: MemoryRows, limit: float, peak: bool, gap: float, guess: float):
        self.model, self.memory, self.limit, self.peak, self.gap = model, memory, limit, peak, gap
        self.unit = max(abs(guess), float(np.abs(model.cost).max(initial=0.0)) * 1e-3, 1e-300) / SCALED_OPTIMUM
        self.times: list[int] = []
        self.covers: list[np.ndarray] = []

    def fresh(self, lower: Floats, upper: Floats, *, integers: bool, times: list[int] | None = None) -> highspy.Highs:
        """A new HiGHS object with the programme in scaled units and all memory rows known so far."""
        solver = _Highs()
        for option, value in _OPTIONS.items():
            solver.setOptionValue(option, value)
        if not integers and self.model.num_side:
            solver.setOptionValue("presolve", "off")  # finds little in conversion trees, and the simplex method takes longer after it
        if not integers and len(self.model.cost) > LARGE_COLUMNS:
            solver.setOptionValue("dual_feasibility_tolerance", 1e-5)
        solver.setOptionValue("mip_rel_gap", self.gap / 2)
        solver.setOptionValue("mip_abs_gap", 1e-9)
        model, matrix = self.model, self.model.matrix
        args = (
            matrix.shape[1], matrix.shape[0], matrix.nnz, int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize),
            model.constant / self.unit, model.cost / self.unit, lower, upper, model.row_lower, model.row_upper,
            matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32), matrix.data, model.integer.astype(np.int32) * integers,
        )  # fmt: skip
        if solver.passModel(*args) == highspy.HighsStatus.kError:
            raise SolverError("HiGHS refused the programme: a cost or bound is not a number")
        rows = [self.memory_row(at) for at in (self.times if times is None else times)]
        rows += [(cover, np.ones(len(cover)), len(cover) - 1.0) for cover in self.covers]
        self.add_rows(solver, rows)
        return solver

    @property
    def byte_unit(self) -> float:
        """Bytes that a scaled memory row counts as one."""
        limit = self.limit if np.isfinite(self.limit) else 0.0
        return max(limit, 1e-6 * float(self.memory.nbytes.max(initial=1.0))) / SCALED_BUDGET

    def memory_row(self, at: int) -> tuple[np.ndarray, Floats, float]:
        columns, nbytes = self.memory.row(at)
        if self.peak:
            columns, nbytes = np.append(columns, len(self.model.cost) - 1), np.append(nbytes, -self.byte_unit)
        room = -self.memory.fixed[at] if self.peak else self.limit - self.memory.fixed[at]
        return columns, nbytes / self.byte_unit, float(room / self.byte_unit)

    def dual_bound(self, upper: Floats, duals: Floats) -> tuple[float, Floats]:
        """The bound that any row duals prove, and the reduced costs with which they do, both in the objective's unit.

        Duals are those of `fresh` in scaled units; their signs are put right first. No column may fall below its bound for nothing.
        """
        model, base = self.model, self.model.matrix.shape[0]
        rows = [self.memory_row(at) for at in self.times] + [(cover, np.ones(len(cover)), len(cover) - 1.0) for cover in self.covers]
        lower = np.concatenate([model.row_lower, np.full(len(rows), -np.inf)])
        highest = np.concatenate([model.row_upper, [limit for _, _, limit in rows]])
        duals = np.where(np.isinf(lower), np.minimum(duals, 0.0), np.where(np.isinf(highest), np.maximum(duals, 0.0), duals))
        reduced = model.cost / self.unit - model.matrix.T @ duals[:base]
        for (columns, values, _), dual in zip(rows, duals[base:], strict=True):
            reduced[columns] -= dual * values
        side = np.where(duals > 0, lower, highest)
        bound = float(duals[duals != 0] @ side[duals != 0])
        below = (reduced < 0) & np.isfinite(upper)
        if np.any(reduced[np.isinf(upper)] < -1e-7):
            return -np.inf, reduced * self.unit
        return (bound + float(reduced[below] @ upper[below])) * self.unit + model.constant, reduced * self.unit

    @staticmethod
    def add_rows(solver: highspy.Highs, rows: list[tuple[np.ndarray, Floats, float]]) -> None:
        for columns, values, upper in rows:
            bounds = np.array([-highspy.kHighsInf]), np.array([upper])
            solver.addRows(1, *bounds, len(columns), np.zeros(1, np.int32), columns.astype(np.int32), values)

    def checked(self, solver: highspy.Highs, solution: highspy.HighsSolution) -> tuple[Floats, float]:
        """Values and `c.x`, recomputed; a report that differs is a fault of the solver that must not pass."""
        values = np.array(solution.col_value)
        value = float(self.model.cost @ values) + self.model.constant
        reported = solver.getInfo().objective_function_value * self.unit
        size = max(float(np.abs(self.model.cost) @ np.abs(values)), abs(self.model.constant), self.unit)
        if abs(value - reported) > REPORT_TOLERANCE * size:
            raise CheckError(f"HiGHS reports an objective of {reported:.9g}, and its own solution is worth {value:.9g}")
        return values, value


def with_peak(model: Programme, memory: MemoryRows, limit: float) -> Programme:
    """Adds a last column for the peak, the only one that is priced, in thousandths of `limit` and at most what all columns hold."""
    columns, most = len(model.cost), np.inf
    if np.all(np.isfinite(model.upper)):
        most = max(limit, float(memory.usage(model.upper).max(initial=0.0))) / limit * SCALED_BUDGET
    return replace(
        model,
        cost=np.append(np.zeros(columns), 1.0),
        upper=np.append(model.upper, most),
        integer=np.append(model.integer, False),
        matrix=sparse.hstack([model.matrix, sparse.csr_matrix((model.matrix.shape[0], 1))], format="csr"),
        constant=0.0,
    )


class _Highs(highspy.Highs):
    """HiGHS without its callbacks, whose set-up prints a banner to standard output that no option turns off."""

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()


_OPTIONS: dict[str, bool | float | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "primal_feasibility_tolerance": 1e-8,
    "dual_feasibility_tolerance": 1e-7,
    "mip_feasibility_tolerance": 1e-7,
    "small_matrix_value": 1e-12,
}
