"""Figures of presets fitted to the rows that `calibration.toml` names: `python -m benchmarks.curves --fit` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import benchmarks.curves as curves
from benchmarks.machines import cluster_of
from cost_models import Cluster, load_cluster
from cost_models.fit import fit_figures

Overrides = dict[str, dict[str, float]]
"""Topology figures by preset, dotted."""


def report(rows: Sequence[Mapping[str, str]], fits: Sequence[Mapping[str, Any]]) -> str:
    """One line per figure: preset, name, fitted value and the one that the preset has. Fits of one preset build on those before."""
    found: Overrides = {}
    lines = []
    for fit in fits:
        preset, mine = fit["preset"], [row for row in rows if curves.is_calibration(row, fit["rows"])]
        before = load_cluster(preset).to_dict()["topology"]
        for name, value in fitted(preset, fit["figures"], mine, found.setdefault(preset, {})).items():
            found[preset][name] = value
            lines.append(f"{preset} {name} = {value:.4g}  (now {get(before, name):.4g}; {len(mine)} rows)")
    return "\n".join(lines)


def fitted(preset: str, names: Sequence[str], rows: Sequence[Mapping[str, str]], known: Mapping[str, float]) -> dict[str, float]:
    """The figures `names` that come closest to the published seconds, given the `known` ones."""
    now = load_cluster(preset).to_dict()["topology"]
    clusters = [cluster_of(row) for row in rows]

    def predict(figures: Mapping[str, float]) -> list[float]:
        return [curves.price(row, changed(cluster, {**known, **figures}))[1] for row, cluster in zip(rows, clusters, strict=True)]

    published = [curves.price(row, cluster)[0] for row, cluster in zip(rows, clusters, strict=True)]
    return fit_figures({name: get(now, name) for name in names}, predict, published)


def changed(cluster: Cluster, figures: Mapping[str, float]) -> Cluster:
    """The cluster with some of its topology's figures, by dotted name, replaced."""
    data = deepcopy(cluster.to_dict())
    for name, value in figures.items():
        *path, last = name.split(".")
        table = data["topology"]
        for key in path:
            table = table[key]
        table[last] = value
    return Cluster.from_dict(data)


def get(table: Mapping[str, Any], name: str) -> float:
    """A figure by its dotted name."""
    value: Any = table
    for key in name.split("."):
        value = value[key]
    return float(value)
