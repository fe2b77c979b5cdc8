"""Solvers of the intra-op programme: `highs` (arrays, the default) and `pulp` (the readable statement), which must agree."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from autopar.errors import UsageError
from autopar.intraop.evaluate import Infeasible
from autopar.intraop.solvers import highs, pulp
from autopar.intraop.solvers.branch import Log
from autopar.ir.problem import Problem, Solution

__all__ = ["Infeasible", "minimum_peak", "solve"]

_SOLVERS = {"highs": highs, "pulp": pulp}


def solve(
    problem: Problem, solver: str = "highs", *, time_limit_s: float | None = None, gap: float = 1e-6, log: Log | None = None, **options: Any
) -> Solution:
    """The cheapest answer that fits, from the solver of that name; `options` are the solver's own. Raises `Infeasible`."""
    return _named(solver).solve(problem, time_limit_s=time_limit_s, gap=gap, log=log, **options)


def minimum_peak(
    problem: Problem, solver: str = "highs", *, time_limit_s: float | None = None, log: Log | None = None, **options: Any
) -> tuple[float, Solution]:
    """The least peak in bytes that any answer has, and that answer."""
    return _named(solver).minimum_peak(problem, time_limit_s=time_limit_s, log=log, **options)


def _named(solver: str) -> ModuleType:
    if solver not in _SOLVERS:
        raise UsageError(f"there is no solver `{solver}`. Use one of {', '.join(_SOLVERS)}.")
    return _SOLVERS[solver]
