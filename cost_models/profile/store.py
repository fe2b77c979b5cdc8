"""Profiles as TOML: what plans read (title, device, topology), and under it what was measured, where, and how well it fits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cost_models.cluster import Cluster
from cost_models.errors import ClusterError
from cost_models.fit import Sample
from cost_models.presets import profile_lines, read_tables
from cost_models.profile.figures import Accuracy, Points, curve_of

_SCHEMA = 1


def load_points(file: Path, where: Mapping[str, Any]) -> dict[str, dict[str, Sample]]:
    """Points that a file holds, none if it does not exist. Raises `ClusterError` for a file of another machine or another kind."""
    if not file.exists():
        return {}
    tables = read_tables(file)
    found = tables.get("profile")
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise ClusterError(f"{file} was not written by `autopar profile`; give another file.")
    other = [f"{key} {found.get(key)!r}, here {value!r}" for key, value in where.items() if found.get(key) != value]
    if other:
        raise ClusterError(f"{file} was measured elsewhere ({'; '.join(other)}); give another file, or remove it to measure anew.")
    return {name: _samples(file, name, curve) for name, curve in tables.get("curves", {}).items()}


def _samples(file: Path, name: str, curve: Any) -> dict[str, Sample]:
    try:
        return {str(at): Sample(float(seconds), float(spread), int(count)) for at, seconds, spread, count in curve["points"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterError(
            f"the points of curve {name!r} in {file} cannot be read ({error}); remove the curve to measure it anew."
        ) from error


def check_writable(file: Path) -> None:
    """Raise `ClusterError` where a profile could not be written, before time is spent on measuring."""
    if file.suffix != ".toml":
        raise ClusterError(f"a profile is a .toml file, which {file} is not; plans know it by that ending.")
    if not file.parent.is_dir() or file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ClusterError(f"cannot write the profile {file}: there is no such folder, or it may not be written.")


def save(file: Path, cluster: Cluster, sources: Mapping[str, str], points: Points, where: Mapping[str, Any], found: list[Accuracy]) -> None:
    """Write a profile, whole or not at all. `sources` are by dotted figure, the longest prefix counts."""
    lines = [*profile_lines(cluster, sources), *_measured(points, where, {each.curve: each for each in found})]
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise ClusterError(f"cannot write the profile {file}: {error.strerror}.") from error


def _measured(points: Points, where: Mapping[str, Any], accuracy: Mapping[str, Accuracy]) -> Iterator[str]:
    yield from ["", "[profile]", f"schema = {_SCHEMA}", *(f"{key} = {json.dumps(value)}" for key, value in where.items())]
    for name, samples in points.items():
        yield from [
            "",
            f"[curves.{json.dumps(name)}]",
            "# points: what was asked for, seconds, spread of the repeats, their number",
            "points = [",
        ]
        yield from (f"  [{json.dumps(at)}, {s.seconds!r}, {s.spread!r}, {s.count}]," for at, s in samples.items())
        yield "]"
        curve, error = curve_of(points, name), accuracy.get(name)
        if curve is not None:
            per_byte, per_root = curve.terms[0]
            yield f"fit = {{ fixed = {curve.fixed!r}, per_unit = {per_byte!r}, per_cube_root = {per_root!r} }}"
        if error is not None:
            yield f"price = {{ median_error = {error.median_error:.4f}, worst_error = {error.worst_error:.4f} }}"
