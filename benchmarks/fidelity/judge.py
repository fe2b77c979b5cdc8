"""Predictions beside what was published: errors by table, order and regret by group of plans, and what fits into memory."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from scipy.stats import spearmanr

from benchmarks.fidelity.case import Case, Skipped, Unmapped
from benchmarks.fidelity.price import Price, machine, price
from benchmarks.machines import preset_of

CALIBRATION = Path(__file__).parent / "calibration.toml"
MEDIAN_BAR, TENTH_BAR, RANK_BAR, REGRET_BAR, FIT_BAR = 0.12, 0.30, 0.9, 0.03, 0.90
LEAST_PLANS = 3
"""Plans in a group whose order says anything."""


@dataclass(frozen=True)
class Row:
    """One published row and our prediction: seconds, bytes, and errors relative to what was published.

    `efficiency` is the one that was fitted for its machine and software, None where none was. `calibration` rows served to fit it.
    `fits` is whether it ran, `predicted_fits` whether we say that it does. `reason` says why there is no prediction.
    """

    file: str
    table: str
    row: int
    published: float | None = None
    predicted: float | None = None
    error: float | None = None
    usable: str = "Y"
    machine: str = ""
    software: str = ""
    devices: int = 0
    efficiency: float | None = None
    calibration: bool = False
    published_bytes: float | None = None
    predicted_bytes: float | None = None
    memory_error: float | None = None
    fits: bool | None = None
    predicted_fits: bool | None = None
    group: str = ""
    reason: str = ""

    @property
    def counts(self) -> bool:
        """Whether its error is one of those that the bars are for."""
        return self.error is not None and not self.calibration and self.usable == "Y"


@dataclass(frozen=True)
class Summary:
    """Errors of step times and of memory of one table, calibration left out; `skipped` rows have no prediction."""

    table: str
    rows: int
    median_error: float | None
    p90_error: float | None
    bias: float | None
    memory_rows: int
    memory_median_error: float | None
    skipped: int


@dataclass(frozen=True)
class Group:
    """Plans for one model and machine: rank correlation (Spearman's), and how much slower than the best is the plan that we would take.

    `counts`: all of its rows are fully usable; else something of a plan was inferred, or seconds were derived.
    """

    group: str
    plans: int
    rank: float
    regret: float
    counts: bool = True


@dataclass(frozen=True)
class Fit:
    """What was fitted: one number for a machine and its software, to which rows."""

    machine: str
    software: str
    efficiency: float
    rows: tuple[Mapping[str, Any], ...]


def fits(path: Path = CALIBRATION) -> tuple[Fit, ...]:
    """The calibration as it stands."""
    found = tomllib.loads(path.read_text())["fit"]
    return tuple(Fit(f["machine"], f["software"], f["efficiency"], tuple(f["rows"])) for f in found)


def is_calibration(case: Case, fit: Fit) -> bool:
    """Whether a case is one of the rows that this was fitted to; they are named by table, devices and published seconds."""
    if (case.software, preset_of(case.machine)) != (fit.software, fit.machine):
        return False
    same = ((each["table"] in case.table, each["devices"] == case.devices, each["seconds"] == case.step_s) for each in fit.rows)
    return any(all(each) for each in same)


def judge(cases: Iterable[Case | Skipped], known: Sequence[Fit]) -> Iterator[Row]:
    """Each row with its prediction."""
    for case in cases:
        if isinstance(case, Skipped):
            yield Row(case.file, case.table, case.row, usable=case.usable, reason=case.reason)
            continue
        try:
            yield _row(case, price(case), known)
        except Unmapped as error:
            names = {"usable": case.usable, "machine": case.machine, "software": case.software, "devices": case.devices}
            yield Row(case.file, case.table, case.row, published=case.step_s, **names, reason=str(error))


def _row(case: Case, found: Price, known: Sequence[Fit]) -> Row:
    fit = next((f for f in known if (f.machine, f.software) == (preset_of(case.machine), case.software)), None)
    seconds, room = found.step_s(fit.efficiency if fit else 1.0), machine(case).device.usable_bytes()
    return Row(
        case.file,
        case.table,
        case.row,
        case.step_s,
        seconds,
        _off(seconds, case.step_s),
        case.usable,
        case.machine,
        case.software,
        case.devices,
        fit.efficiency if fit else None,
        fit is not None and is_calibration(case, fit),
        case.peak_bytes,
        found.peak_bytes,
        _off(found.peak_bytes, case.peak_bytes) if case.fits else None,
        case.fits,
        found.peak_bytes <= room,
        case.group,
    )


def _off(predicted: float, published: float | None) -> float | None:
    return predicted / published - 1 if published else None


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One for each table, then all rows together, and those without any fit."""
    tables = dict.fromkeys(f"{row.file}: {row.table}" for row in rows if row.error is not None)
    each = [_summary(name, [row for row in rows if f"{row.file}: {row.table}" == name]) for name in tables]
    return [*each, _summary("all", rows), _summary("no fit at all", [row for row in rows if row.efficiency is None and not row.reason])]


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    errors = [row.error for row in rows if row.counts and row.error is not None]
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None and row.usable == "Y"]
    return Summary(
        name,
        len(errors),
        median(map(abs, errors)) if errors else None,
        _tenth([abs(e) for e in errors]),
        median(errors) if errors else None,
        len(memory),
        median(memory) if memory else None,
        sum(bool(row.reason) for row in rows),
    )


def _tenth(errors: Sequence[float]) -> float | None:
    """The 90th percentile."""
    return quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0] if errors else None


def groups(rows: Sequence[Row]) -> list[Group]:
    """Groups of three plans and more that ran, in all of which only the plan differs. What is one plan to us counts once, by its mean."""
    found = []
    for name in dict.fromkeys(row.group for row in rows if row.group):
        mine = [row for row in rows if row.group == name and row.published and row.predicted]
        ran: dict[float, list[float]] = {}
        for row in mine:
            ran.setdefault(round(row.predicted or 0.0, 6), []).append(row.published or 0.0)
        if len(ran) >= LEAST_PLANS:
            counts = all(row.usable == "Y" for row in mine)
            found.append(_group(name, [(mean(published), predicted) for predicted, published in ran.items()], counts))
    return found


def _group(name: str, ran: Sequence[tuple[Any, Any]], counts: bool) -> Group:
    published, predicted = zip(*ran, strict=True)
    taken = min(ran, key=lambda each: each[1])[0]
    return Group(name, len(ran), float(spearmanr(published, predicted).statistic), taken / min(published) - 1, counts)


def told(rows: Sequence[Row]) -> tuple[int, int]:
    """Rows of which it is known whether they fit: how many are predicted right, and how many there are."""
    known = [row for row in rows if row.fits is not None and row.predicted_fits is not None]
    return sum(row.fits == row.predicted_fits for row in known), len(known)


def passed(rows: Sequence[Row]) -> bool:
    """Whether every bar is met that the rows say something about."""
    whole = _summary("all", rows)
    ordered, (right, of) = [g for g in groups(rows) if g.counts], told(rows)
    checks = [
        whole.median_error is not None and whole.median_error <= MEDIAN_BAR,
        whole.p90_error is not None and whole.p90_error <= TENTH_BAR,
        not ordered or mean(g.rank for g in ordered) >= RANK_BAR,
        not ordered or mean(g.regret for g in ordered) <= REGRET_BAR,
        not of or right >= FIT_BAR * of,
    ]
    return all(checks)


def fitted(cases: Iterable[Case | Skipped], known: Sequence[Fit]) -> list[Fit]:
    """The same fits with the efficiency at which the rows' errors, as logarithms, add up to nothing."""
    mine: dict[int, list[tuple[Price, float]]] = {n: [] for n in range(len(known))}
    for case in cases:
        for n, fit in enumerate(known):
            if isinstance(case, Case) and case.step_s and is_calibration(case, fit):
                mine[n].append((price(case), case.step_s))
    return [Fit(f.machine, f.software, _efficiency(mine[n]) if mine[n] else f.efficiency, f.rows) for n, f in enumerate(known)]


def _efficiency(rows: Sequence[tuple[Price, float]]) -> float:
    low, high = log(0.1), log(10.0)
    for _ in range(60):
        middle = (low + high) / 2
        off = sum(log(found.step_s(exp(middle)) / published) for found, published in rows)
        low, high = (middle, high) if off > 0 else (low, middle)
    return exp((low + high) / 2)
