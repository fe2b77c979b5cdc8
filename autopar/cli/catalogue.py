"""`autopar clusters` and `autopar models`: what there is to name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

import cost_models
from autopar.cli.console import SCHEMA, Report, reporting
from autopar.cli.flags import Debug, Json
from autopar.errors import ClusterError
from autopar.report.units import bytes_text, count_text


def clusters(
    names: Annotated[list[str] | None, typer.Argument(metavar="PRESET", help="Show each figure of these, with its source.")] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """List the presets of clusters; with names, every figure and where it comes from."""
    with reporting(json, debug) as report:
        found = [_describe(name) for name in names or cost_models.presets()]
        report.document = {"schema": SCHEMA, "clusters": found}
        if not names:
            _show_clusters(report, found)
        for each in found if names else ():
            _show_cluster(report, each)


def _describe(name: str) -> dict[str, Any]:
    try:
        return cost_models.describe(name)
    except cost_models.ClusterError as error:
        raise ClusterError(str(error)) from None


def _show_clusters(report: Report, found: list[dict[str, Any]]) -> None:
    figures = ("bf16 peak", "memory", "memory/s", "link/s", "network/s")
    table = _table("preset", "device", "topology", "default", *figures, numbers=figures)
    for each in found:
        table.add_row(
            *(each["name"], each["title"], each["kind"], "x".join(map(str, each["default_shape"]))),
            count_text(each["peak_flops"].get("bfloat16", each["peak_flops"]["float32"]), "FLOP/s"),
            bytes_text(each["memory_bytes"]),
            *(_rate(each[f"{what}_bytes_per_s"]) for what in ("memory", "link", "network")),
        )
    report.show(
        table,
        Text("\nRates are per device and direction. Name a cluster by preset and shape: nodes x devices, h100-sxm:2x8; a torus, v5e:2x4."),
        Text("`host` is this machine: simulated devices, measured at first use. The last three are synthetic."),
        Text("Every figure has a source: `autopar clusters h100-sxm` shows them."),
    )


def _show_cluster(report: Report, each: Mapping[str, Any]) -> None:
    values = cost_models.load_cluster(each["name"], measure=False).to_dict()
    table = _table("figure", "value", "source", numbers=("value",))
    table.title, table.title_justify = Text(f"{each['name']}: {each['title']}", style="bold"), "left"
    for figure, source in each["sources"].items():
        table.add_row(Text(figure), Text(_figure(values, figure)), Text(source))
    report.show(table, "")


def _figure(values: Mapping[str, Any], dotted: str) -> str:
    found: Any = values
    for key in dotted.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return f"{found:g}" if isinstance(found, (int, float)) else "" if found is None else str(found)


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else count_text(bytes_per_s, "B")


def models(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Show these alone, with the number of parameters.")] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """List the models of the zoo, which `plan` and `run` take by name."""
    from autopar import models as zoo  # flax and optax

    with reporting(json, debug) as report:
        found = [zoo.describe(name) for name in names or zoo.names()]
        described = [_model(info, bool(names)) for info in found]
        report.document = {"schema": SCHEMA, "models": described}
        counted = ("parameters",) if names else ()
        table = _table("name", *counted, "batch", "optimizer", "size", "source", numbers=("parameters", "batch"))
        for info, each in zip(found, described, strict=True):
            count = (f"{info.parameters:,}",) if names else ()
            table.add_row(info.name, *count, str(info.batch), info.optimizer, ", ".join(_sizes(each["config"])), info.source)
        report.show(table)
        if not names:
            report.show(Text("\nFields of a size are changed with -k, as in `autopar plan gpt-350m --cluster h100-sxm:8 -k layers=12`."))


def _model(info: Any, counted: bool) -> dict[str, Any]:
    config = {f.name: getattr(info.config, f.name) for f in fields(info.config)}
    known = {name: getattr(info, name) for name in ("name", "family", "batch", "optimizer", "source")}
    return known | {"config": config} | ({"parameters": info.parameters} if counted else {})


def _sizes(config: Mapping[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, (int, tuple)) and not isinstance(value, bool):
            yield f"{name} {value}"


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """A plain table; columns named in `numbers` are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table
