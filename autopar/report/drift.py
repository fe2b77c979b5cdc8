"""Where a prediction was off: measured steps beside the plan that they ran under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from autopar.ir.plan import Plan
from autopar.report.units import bytes_text, seconds_text

ROUND = 0.05
"""Relative differences that say nothing."""


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, the first one included, and the compiler's temporaries in bytes on one device."""

    step_s: tuple[float, ...]
    temp_bytes: int = 0
    device: str = ""

    @property
    def median_s(self) -> float:
        """The median step without the first, which warms up."""
        return median(self.step_s[1:] or self.step_s)


def drift_lines(plan: Plan, measured: Measured) -> Iterator[str]:
    """What was predicted, what was measured, and which part of the prediction would explain the difference by itself."""
    p, took = plan.predicted, measured.median_s
    where = f" on {measured.device}" if measured.device else ""
    yield f"step time: {seconds_text(p.step_time_s)} predicted, {seconds_text(took)} measured{where}, {took / p.step_time_s:.2f} times"
    spread = max(measured.step_s[1:] or measured.step_s) / took - 1
    if spread > ROUND:
        yield f"the slowest of {len(measured.step_s)} steps took {1 + spread:.2f} times the median"
    yield from _parts(plan, took)
    if measured.temp_bytes:
        times = measured.temp_bytes / p.temp_bytes if p.temp_bytes else float("inf")
        yield f"temporaries: {bytes_text(p.temp_bytes)} predicted, {bytes_text(measured.temp_bytes)} compiled, {times:.2f} times"


def _parts(plan: Plan, took: float) -> Iterator[str]:
    """For compute and for exposed communication: how far off it alone would have to be."""
    p = plan.predicted
    off = took - p.step_time_s
    if abs(off) <= ROUND * p.step_time_s:
        return
    for what, part in (("compute", p.compute_s), ("communication", p.exposed_communication_s)):
        if part > 0 and part + off > 0:
            yield f"{what} alone would explain it at {(part + off) / part:.2f} times its {seconds_text(part)}"
        elif part > 0:
            yield f"{what} alone cannot explain it: it is {seconds_text(part)} in all"
