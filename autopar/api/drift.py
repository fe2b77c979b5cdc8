"""Measured steps, kept beside the file of the plan that they ran under."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from autopar.errors import PlanError
from autopar.report.drift import Measured

SUFFIX = ".measured.json"


def beside(path: str | os.PathLike[str]) -> Path:
    """Where the measurements of a plan's file are: `plan.json` has `plan.measured.json`."""
    return Path(path).with_suffix(SUFFIX)


def save_measured(measured: Measured, path: str | os.PathLike[str]) -> None:
    """Write measurements beside the plan's file `path`, in place of older ones."""
    beside(path).write_text(json.dumps({"schema": 1, **asdict(measured)}), encoding="utf-8")


def load_measured(path: str | os.PathLike[str]) -> Measured | None:
    """The measurements beside the plan's file `path`; None where there are none. Raises `PlanError` for a file of something else."""
    place = beside(path)
    if not place.exists():
        return None
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
        steps = tuple(float(s) for s in document["step_s"])
        if not steps or min(steps) <= 0:
            raise ValueError("steps take time")
        return Measured(steps, int(document["temp_bytes"]), str(document["device"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{place} holds no measurements ({error}). Remove it, or run the plan again with `autopar run --save`.") from error
