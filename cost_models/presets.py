"""Clusters from data files: the presets that come along, and profiles.

Every figure in a file is a table `{ value = ..., source = "..." }`; plain strings and rules are not figures.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from cost_models.cluster import Cluster
from cost_models.errors import ClusterError
from cost_models.notation import split, unknown

_DATA = Path(__file__).parent / "data"
_ORDER = (
    *("v100-p3", "v100-dgx2", "a100-40", "a100-80", "h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200-nvl72", "mi300x"),
    *("l4", "rtx4090", "v3", "v4", "v5e", "v5p", "v6e", "v7x", "host"),
)
_SYNTHETIC = ("slow-link", "fast-link", "tight-memory")


def presets() -> tuple[str, ...]:
    """Names of the presets; the last three are synthetic, for tests."""
    return _ORDER + _SYNTHETIC


def load_cluster(text: str, measure: bool = True) -> Cluster:
    """The cluster named by `PRESET:NODESxDEVICES`, or by the path of a `.toml` profile, which `:NODESxDEVICES` may follow.

    A torus takes its shape in chips, `v4:4x4x4`, or slices first, `v4:2x4x4x4`; one number alone is the most compact slice. Without a
    shape: one node, one host's chips, or what the profile says. `host` is measured on this machine at first use and then read from a
    cache, unless `measure=False`, which takes built-in figures. Raises `ClusterError` for an unknown name or a shape that does not fit.
    """
    name, shape = split(text)
    if name == "host" and measure:
        return _measured(shape or _default_shape("host"), text)
    figures = read_tables(Path(name)) if name.endswith(".toml") else _preset(name)
    return build(text, figures, shape)


def build(name: str, figures: dict[str, Any], shape: tuple[int, ...] = ()) -> Cluster:
    """A cluster from the tables of a data file, at `shape` or the file's own. Sources are dropped."""
    values = _values(figures)
    _check_tables(name, values)
    own = tuple(values["topology"]["shape"])
    if shape:
        for table in (values["topology"], values["topology"].get("base", {})):
            table.pop("wraps", None)  # they belong to the file's own shape
    shape = shape or own
    if values["topology"].get("base", {}).get("kind") == "shared-memory":
        if shape != own:  # simulated devices that were measured as so many share the same machine as another number
            values = {**values, "topology": values["topology"]["base"]}
            values = _share(values, prod(shape) / prod(own))
    if values.pop("whole_machine", False):
        values = _share(values, prod(shape))
    data = {"name": name, "device": {"name": values["title"], **values["device"]}, "topology": {**values["topology"], "shape": shape}}
    try:
        return Cluster.from_dict(data)
    except ClusterError as error:
        raise ClusterError(f"{name}: {error}") from error


def _check_tables(name: str, values: dict[str, Any]) -> None:
    """Raise `ClusterError` unless a data file has its title, tables and shape."""
    tables = {"device": dict, "topology": dict, "title": str}
    wrong = [key for key, kind in tables.items() if not isinstance(values.get(key), kind)]
    if wrong or "kind" not in values["topology"] or not isinstance(values["topology"].get("shape"), list):
        lacks = f"lacks {', '.join(wrong)}" if wrong else "lacks a kind or a shape in [topology]"
        raise ClusterError(
            f"{name} {lacks}. A profile has a title and the tables [device] and [topology]; cost_models/data/h100-sxm.toml is an example."
        )


def describe(name: str) -> dict[str, Any]:
    """A preset for a table: `title`, `kind`, `peak_flops` by dtype, `memory_bytes`, `memory_bytes_per_s`, `link_bytes_per_s` and
    `network_bytes_per_s` as specified per device and direction (None where there is no such link), and `sources` by the figure's dotted
    name.
    """
    figures = _preset(name)
    values = _values(figures)
    device, topology = values["device"], values["topology"]
    return {
        "name": name,
        "title": values["title"],
        "kind": topology["kind"],
        "default_shape": tuple(topology["shape"]),
        "peak_flops": device["peak_flops"],
        "memory_bytes": int(device["memory_bytes"]),
        "memory_bytes_per_s": device["memory_bytes_per_s"],
        "link_bytes_per_s": _rate(topology, "link", -1),
        "network_bytes_per_s": _rate(topology, "network", 0),
        "sources": dict(_sources(figures)),
    }


def _rate(topology: dict[str, Any], name: str, position: int) -> float | None:
    """A link's rate by its name or, in a topology of many levels, its position."""
    links = topology.get("links")
    link = links[sorted(links)[position]] if links else topology.get(name, {})
    return link.get("bytes_per_s")


def save_profile(cluster: Cluster, path: str | Path, source: str) -> None:
    """Write a cluster as a profile that `load_cluster` reads; `source` says where its figures come from."""
    Path(path).write_text("\n".join(profile_lines(cluster, {"": source})) + "\n", encoding="utf-8")


def profile_lines(cluster: Cluster, sources: Mapping[str, str]) -> list[str]:
    """A cluster as the lines of a profile. `sources`, by the start of dotted names, says where figures come from; the longest counts."""
    data = cluster.to_dict()
    device = {key: value for key, value in data["device"].items() if key != "name"}
    lines = [f"title = {json.dumps(data['device']['name'])}"]
    return [*lines, *_lines("device", device, sources), *_lines("topology", data["topology"], sources)]


def _lines(section: str, table: dict[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """One section of a profile, tables in it after its own keys."""
    yield f"\n[{section}]"
    for key, value in table.items():
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            start = max((name for name in sources if f"{section}.{key}".startswith(name)), key=len, default="")
            yield f"{_key(key)} = {{ value = {value!r}, source = {json.dumps(sources.get(start, 'unknown'))} }}"
        elif not isinstance(value, dict):
            yield f"{_key(key)} = {json.dumps(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(f"{section}.{_key(key)}", value, sources)


def _key(key: str) -> str:
    """A TOML key, in quotes where it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _measured(shape: tuple[int, ...], text: str) -> Cluster:
    from cost_models.profile import host  # only this path needs a writable cache and a child process

    return build(text, host.figures(prod(shape)), shape)


def _default_shape(name: str) -> tuple[int, ...]:
    return tuple(_preset(name)["topology"]["shape"])


def _preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise unknown(name, presets())
    return read_tables(_DATA / f"{name}.toml")


@cache
def _read_text(path: Path, changed: int) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomllib.load(file)


def read_tables(path: Path) -> dict[str, Any]:
    """A TOML file. Raises `ClusterError` where it cannot be read."""
    try:
        return _read_text(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ClusterError(f"cannot read the profile {path}: {error.strerror}.") from error
    except ValueError as error:  # no TOML, or no text
        raise ClusterError(f"{path} is not valid TOML: {error}.") from error


def _values(table: dict[str, Any]) -> dict[str, Any]:
    """The tables with each `{ value, source }` replaced by its value."""
    return {key: _value(entry) for key, entry in table.items()}


def _value(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return entry["value"] if "value" in entry else _values(entry)


def _sources(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, entry in table.items():
        if isinstance(entry, dict) and "value" in entry:
            yield prefix + key, entry["source"]
        elif isinstance(entry, dict):
            yield from _sources(entry, f"{prefix}{key}.")


def _share(values: dict[str, Any], devices: float) -> dict[str, Any]:
    """A whole machine's figures, for one of `devices` that share it: rates divide; fixed costs multiply, as collectives wait for all."""
    device, topology = dict(values["device"]), dict(values["topology"])
    for key in ("vector_flops", "memory_bytes", "memory_bytes_per_s"):
        device[key] /= devices
    device["peak_flops"] = {dtype: peak / devices for dtype, peak in device["peak_flops"].items()}
    topology["bytes_per_s"] = {kind: rate / devices for kind, rate in topology["bytes_per_s"].items()}
    topology["call_seconds"] = {kind: fixed * devices for kind, fixed in topology["call_seconds"].items()}
    return {**values, "device": device, "topology": topology}
