"""A plan beside baselines, as a table and as JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich.console import RenderableType

from autopar.report.table import cells, titled_table
from autopar.report.units import bytes_text, seconds_text

Row = tuple[str, str, float, int, float, str]
"""Name, setting, seconds per step, bytes per device, time over the plan's, status."""


def comparison_table(rows: Sequence[Row]) -> RenderableType:
    """One line for each row; the plan's comes first."""
    table = titled_table("Priced on the same cost models", "what", "how", "step", "over the plan's", "peak per device")
    for name, setting, seconds, nbytes, ratio, status in rows:
        if isfinite(seconds):
            table.add_row(*cells(name, setting, seconds_text(seconds), f"{ratio:.3f}", bytes_text(nbytes)))
        else:
            table.add_row(*cells(name, setting, status, "", bytes_text(nbytes) if nbytes else ""))
    return table


def comparison_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows by name; times that are not there are null."""
    names = ("name", "setting", "step_time_s", "peak_bytes", "ratio", "status")
    return [{n: v if not isinstance(v, float) or isfinite(v) else None for n, v in zip(names, row, strict=True)} for row in rows]
