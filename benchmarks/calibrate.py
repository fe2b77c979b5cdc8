"""Figures of presets fitted to the rows that `calibration.toml` names: `python -m benchmarks.curves --fit` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import exp, log
from typing import Any

from scipy.optimize import minimize

import benchmarks.curves as curves
from benchmarks.machines import cluster_of
from cost_models import Cluster, load_cluster

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
    """The figures `names` with the least mean squared logarithm of predicted over published seconds, given the `known` ones."""
    start = load_cluster(preset).to_dict()["topology"]
    clusters = [cluster_of(row) for row in rows]

    def loss(logs: Sequence[float]) -> float:
        figures = {**known, **dict(zip(names, map(exp, logs), strict=True))}
        pairs = [curves.price(row, changed(cluster, figures)) for row, cluster in zip(rows, clusters, strict=True)]
        return sum(log(predicted / published) ** 2 for published, predicted in pairs) / len(pairs)

    first = [log(get(start, name) or 1e-6) for name in names]
    best = minimize(loss, first, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-9, "maxiter": 2000})
    return dict(zip(names, map(exp, best.x), strict=True))


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
