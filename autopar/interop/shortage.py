"""Why no stages fit: the plan whose fullest stage needs least, and what that stage lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from autopar.errors import InfeasibleError
from autopar.interop.stages import Grid, Stage, StagePlan
from autopar.interop.sweep import Frame, sweep
from autopar.interop.tables import Tables, formula_arrays, make_plan
from autopar.ir.problem import Floats
from autopar.schedule.formulas import Formula

GIB = 2**30


def shortage(searched: Sequence[tuple[Tables, Formula]], grid: Grid, levels: int) -> InfeasibleError:
    """The error to raise where none of these schedules has a plan that fits."""
    nearest: StagePlan | None = None
    for table, formula in searched:
        cutoff = _peak(nearest) if nearest else np.inf
        nearest = _nearest(table, grid, formula, levels, cutoff) or nearest
    if nearest is None or grid.memory_bytes is None:
        return InfeasibleError(
            f"No stages can be made: no ranges of layers that have a choice tile {grid.nodes} nodes of {grid.devices} devices. "
            "Give the dynamic programme choices for more submeshes, one over all devices among them."
        )
    return _explained(nearest, grid.memory_bytes)


def _peak(plan: StagePlan) -> float:
    return max(stage.nbytes for stage in plan.stages)


def _nearest(table: Tables, grid: Grid, formula: Formula, levels: int, cutoff: float) -> StagePlan | None:
    """The plan under one schedule whose fullest stage needs the least memory, if it is less than `cutoff`."""
    best = None
    frame = Frame(table.row, table.units, table.total)
    interleaved = formula.name == "interleaved"
    for count in range(1, levels + 1) if formula.counts_all else (levels,):
        needs = partial(_needs, table, formula, count)
        found = sweep(frame, partial(_least, needs), np.zeros_like(table.hops.forward), np.maximum, count, cutoff, interleaved)
        if found is not None:
            at = [(len(found.stages) - s, table.row[i, j], m) for s, (i, j, m) in enumerate(found.stages)]
            best = make_plan(table, grid, formula, found.stages, [int(np.argmin(needs(p)[row, m])) for p, row, m in at])
            cutoff = _peak(best)
    return best


def _needs(table: Tables, formula: Formula, count: int, position: int) -> Floats:
    """Bytes of each choice at a position among so many stages; infinite for what is no choice."""
    known = np.isfinite(formula_arrays(table, formula, count)[0])
    return np.where(known, table.nbytes(formula.flight(position, max(count, position))), np.inf)


def _least(needs: Callable[[int], Floats], position: int) -> Floats:
    return needs(position).min(axis=2)


def _explained(plan: StagePlan, limit: float) -> InfeasibleError:
    s = max(range(len(plan.stages)), key=lambda s: plan.stages[s].nbytes)
    stage = plan.stages[s]
    text = (
        f"No stages fit {limit / GIB:.3g} GiB per device. Nearest is {plan.schedule} with {plan.microbatches} microbatches and "
        f"{len(plan.stages)} stages, where stage {s} (layers {stage.start} to {stage.stop - 1} on {stage.submesh} devices) needs "
        f"{stage.nbytes / GIB:.3g} GiB: it lacks {(stage.nbytes - limit) / GIB:.3g} GiB. Use more devices, more microbatches, "
        "or choices that keep less."
    )
    return InfeasibleError(
        text,
        peak_bytes=int(np.ceil(stage.nbytes)),
        budget_bytes=int(limit),
        live=_live(stage),
        suggestions=("more devices", "more microbatches", "choices that keep less from forward to backward"),
    )


def _live(stage: Stage) -> tuple[tuple[str, int], ...]:
    kept = stage.flight.held * stage.choice.residual_bytes
    found = {
        "parameters, optimiser and one microbatch's work": stage.choice.fixed_bytes,
        f"kept for backward, {stage.flight.held:g} microbatches": kept,
        "waiting at the stage's borders": max(stage.nbytes - stage.choice.fixed_bytes - kept, 0.0),
    }
    return tuple((what, int(nbytes)) for what, nbytes in sorted(found.items(), key=lambda item: -item[1]) if nbytes >= 1)
