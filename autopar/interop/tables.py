"""The stage costs as arrays: each class of ranges is asked for once, and stands for all ranges of its content and borders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import UsageError
from autopar.interop.stages import Chain, Choice, Grid, Oracle, Stage, StagePlan, stage_cost
from autopar.ir.problem import Floats, Ints
from autopar.schedule.costs import Transfer
from autopar.schedule.formulas import Flight, Formula, HopSeconds, StageSeconds

FIELDS = ("forward_s", "backward_s", "weight_s", "update_s", "fixed_bytes", "residual_bytes", "update_bytes")


@dataclass(frozen=True, eq=False)
class Tables:
    """Rows stand for ranges that cost the same: `row[i, j]` is that of layers i to j - 1, and -1 where there is none.

    `seconds` and both bytes have shape (rows, submeshes, choices), with infinite seconds where there is no such choice. `enters` and
    `leaves`, (rows, submeshes), are bytes per device and microbatch at a range's borders. Hops have shape (borders, submeshes
    before, submeshes after). `units` are the submeshes' sizes and `total` the cluster's, in their greatest common divisor.
    """

    row: Ints
    lengths: Ints
    choices: tuple[tuple[tuple[Choice, ...], ...], ...]
    seconds: StageSeconds
    fixed: Floats
    residual: Floats
    update: Floats
    enters: Floats
    leaves: Floats
    hops: HopSeconds
    crossing: Floats
    units: Ints
    total: int

    @property
    def num_layers(self) -> int:
        return len(self.row)

    def nbytes(self, flight: Flight) -> Floats:
        """A bound on each choice's bytes, where so much is in flight."""
        found = flight.nbytes(self.fixed, self.residual, self.enters[:, :, None], self.leaves[:, :, None])
        return np.where(np.isfinite(self.seconds.forward), np.maximum(found, self.update), np.inf)


def tables(chain: Chain, grid: Grid, oracle: Oracle, microbatches: int) -> Tables:
    """Asks the oracle for every class of ranges and every submesh. Raises `UsageError` for costs that are no costs."""
    forward, backward = (np.array(b) / microbatches for b in (chain.forward_bytes, chain.backward_bytes))
    parts = np.array([grid.parts(submesh) for submesh in grid.submeshes], float)
    crossing = np.maximum(forward, backward)[:, None] / parts[None, :]
    row, ranges = _ranges(chain)
    asked: dict[object, tuple[tuple[Choice, ...], ...]] = {}
    choices = []
    for i, j in ranges:
        content = chain.classes[i:j]
        if content not in asked:
            asked[content] = tuple(_checked(i, j, tuple(oracle(i, j, submesh, microbatches))) for submesh in grid.submeshes)
        choices.append(asked[content])
    values = _values(choices)
    starts, stops = np.array(ranges).T
    divisor = int(np.gcd.reduce([grid.size, *(submesh.size for submesh in grid.submeshes)]))
    return Tables(
        row,
        stops - starts,
        tuple(choices),
        StageSeconds(*values[:4]),
        values[4],
        values[5],
        values[6],
        crossing[starts],
        crossing[stops],
        _hops(grid, forward, backward),
        crossing,
        np.array([submesh.size // divisor for submesh in grid.submeshes]),
        grid.size // divisor,
    )


def _ranges(chain: Chain) -> tuple[Ints, list[tuple[int, int]]]:
    """The row of each range, and the first range of each row: equal rows have equal layers between borders that carry as much."""
    n = chain.num_layers
    row = np.full((n, n + 1), -1)
    borders = list(zip(chain.forward_bytes, chain.backward_bytes, strict=True))
    numbers: dict[object, int] = {}
    ranges: list[tuple[int, int]] = []
    for i in range(n):
        for j in range(i + 1, n + 1):
            key = (chain.classes[i:j], borders[i], borders[j])
            if key not in numbers:
                numbers[key] = len(ranges)
                ranges.append((i, j))
            row[i, j] = numbers[key]
    return row, ranges


def _checked(i: int, j: int, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    for choice in choices:
        for name in FIELDS:
            value = getattr(choice, name)
            if not np.isfinite(value) or value < 0:
                raise UsageError(f"{name} of layers {i} to {j - 1} must be a finite number that is not negative, not {value!r}.")
        if choice.weight_s > choice.backward_s:
            raise UsageError(f"weight_s of layers {i} to {j - 1} is part of backward_s, and must not be more than it.")
    return choices


def _values(choices: Sequence[Sequence[Sequence[Choice]]]) -> list[Floats]:
    """An array of shape (rows, submeshes, choices) for each field."""
    most = max((len(some) for row in choices for some in row), default=0)
    found = np.full((len(FIELDS), len(choices), len(choices[0]), max(1, most)), np.inf)
    known: dict[int, Floats] = {}
    for r, row in enumerate(choices):
        if id(row) not in known:
            known[id(row)] = found[:, r]
            for n, some in enumerate(row):
                for c, choice in enumerate(some):
                    found[:, r, n, c] = [getattr(choice, name) for name in FIELDS]
        else:
            found[:, r] = known[id(row)]
    found[4:][~np.isfinite(found[4:])] = 0.0
    return list(found)


def _hops(grid: Grid, forward: Floats, backward: Floats) -> HopSeconds:
    links = [[grid.link(a, b) for b in grid.submeshes] for a in grid.submeshes]
    rate = np.array([[link.seconds_per_byte for link in row] for row in links], float)
    latency = np.array([[link.latency_s for link in row] for row in links], float)
    there, back = (nbytes[:, None, None] * rate for nbytes in (forward, backward))
    return HopSeconds(there, back, np.broadcast_to(latency, there.shape))


def formula_arrays(table: Tables, formula: Formula, stages: int) -> tuple[Floats, Floats, list[tuple[float, Floats, Floats]]]:
    """What stages and hops add to the sum, and (weight, of stages, of hops) of each peak; infinite for what is no choice.

    A share that is cut into chunks has as many layers in each.
    """
    with np.errstate(invalid="ignore"):
        sums = formula.latency(table.seconds)
        peaks = formula.peaks(table.seconds, table.hops, stages)
    known = np.isfinite(table.seconds.forward) & (table.lengths % formula.chunks == 0)[:, None, None]
    clean = [(peak.weight, np.where(known, peak.stage, np.inf), peak.hop) for peak in peaks]
    return np.where(known, sums, np.inf), formula.hop_latency(table.hops), clean


def make_plan(table: Tables, grid: Grid, formula: Formula, stages: Sequence[tuple[int, int, int]], picks: Sequence[int]) -> StagePlan:
    """The plan with these stages, (first layer, layer after the last, submesh), and the choice that each takes."""
    n = len(stages)
    found = []
    for s, ((i, j, m), pick) in enumerate(zip(stages, picks, strict=True)):
        row, flight = int(table.row[i, j]), formula.flight(n - s, n)
        nbytes = float(table.nbytes(flight)[row, m, pick])
        found.append(Stage(i, j, grid.submeshes[m], table.choices[row][m][pick], flight, nbytes))
    hops = tuple(_hop(table, s, stages[s][1], stages[s][2], stages[s + 1][2]) for s in range(n - 1))
    return StagePlan(tuple(found), hops, formula, formula.seconds([stage_cost(stage) for stage in found], hops))


def _hop(table: Tables, s: int, k: int, a: int, b: int) -> Transfer:
    there, back, latency = (float(x[k, a, b]) for x in table.hops)
    before, after = (float(table.crossing[k, m]) for m in (a, b))
    return Transfer(s, s + 1, there, back, latency, after, before, before, after)
