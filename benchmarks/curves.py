"""Collectives priced beside published curves: `python -m benchmarks.curves [FILE...] [--json -]`, and `--fit` for the calibration.

A file has the columns of `data/collectives.csv`. Rows that `calibration.toml` names served to fit a preset or to find a price's form, and
do not count. The bar is a median error of 10 % over the other rows above 1 MB.
"""

from __future__ import annotations

import argparse
import csv
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.common import add_json_option, finish
from benchmarks.machines import cluster_of
from cost_models import Cluster, Torus
from cost_models.collective import KINDS, ring_bytes

HERE = Path(__file__).parent
DATA = HERE / "data" / "collectives.csv"
CALIBRATION = HERE / "calibration.toml"
LEAST_BYTES, MEDIAN_BAR = 1_000_000, 0.10
_OPS = {"psum": "all_reduce", "allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_OPS |= {"reducescatter": "reduce_scatter", "psumscatter": "reduce_scatter", "ppermute": "permute", "sendrecv": "permute"}
# Words of an algorithm's name, in order of precedence. None: the library chose.
_ALGORITHMS = (
    *(("nvlstree", "hierarchical"), ("default", None), ("large sizes", None)),
    *(("ring", "ring"), ("nvls", "switch"), ("tree", "tree")),
)
_FIELDS = ("op", "hardware", "nodes", "devices", "algo")


@dataclass(frozen=True)
class Row:
    """One published figure and our price. Seconds; `error` is predicted over published, less one. `reason` says why there is no price."""

    curve: str
    op: str
    hardware: str
    nodes: str
    devices: str
    algo: str
    size_bytes: int
    usable: str
    calibration: bool
    published_s: float | None = None
    predicted_s: float | None = None
    error: float | None = None
    reason: str = ""

    @property
    def counts(self) -> bool:
        """Whether its error is one of those reported."""
        return self.error is not None and not self.calibration and self.size_bytes > LEAST_BYTES


@dataclass(frozen=True)
class Summary:
    """Errors of one curve's rows above 1 MB, calibration left out; over all rows where `curve` is `all`."""

    curve: str
    rows: int
    median_error: float | None
    p90_error: float | None
    calibration_rows: int


def read(files: Iterable[Path]) -> list[dict[str, str]]:
    """Rows of kind `collective` in the files."""
    found: list[dict[str, str]] = []
    for file in files:
        with file.open(newline="") as text:
            rows = csv.DictReader(line for line in text if not line.startswith("#"))
            found += [row for row in rows if row.get("kind", "collective") == "collective" and row["usable"] != "N"]
    return found


def kind_of(op: str) -> str:
    """Our name of a collective. Raises `ValueError` for one that we do not price."""
    name = op.split("(")[0].strip().lower().replace("-", "_")
    name = _OPS.get(name.replace("_", ""), name)
    if name not in KINDS:
        raise ValueError(f"{op} is not priced")
    return name


def algorithm_of(algo: str, cluster: Cluster, known: Mapping[str, Any]) -> str | None:
    """The algorithm that a row names, in our words; None where the library chose."""
    wanted = next((name for word, name in _ALGORITHMS if word in algo.lower()), None)
    if "flat" in known:  # several levels
        wanted = {"ring": "flat", "tree": "hierarchical", "switch": "hierarchical"}.get(wanted or "", wanted)
    return wanted if wanted in known else None


def published_seconds(row: Mapping[str, str], kind: str, members: int, cores: int) -> float:
    """Seconds of a row: its time, or its size over its bandwidth.

    Bus bandwidth is nccl-tests': `2(n-1)/n` of the operand over the time for an all-reduce, `(n-1)/n` of the whole for the others. TPU
    benchmarks count what comes into a chip, whose `cores` gather at once, and give the operand's size.
    """
    size = float(row["size_bytes"])
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if row["algbw_GBps"]:
        return size / (float(row["algbw_GBps"]) * 1e9)
    if not row["busbw_GBps"]:
        raise ValueError("neither time nor bandwidth is given")
    operand = size if "TPU" in row["hardware"] else operand_bytes(row, kind, members)
    return cores * ring_bytes(kind, operand, members) / (float(row["busbw_GBps"]) * 1e9)


def operand_bytes(row: Mapping[str, str], kind: str, members: int) -> float:
    """Bytes of the operand on one device: nccl-tests' size of an all-gather is that of the result."""
    size = float(row["size_bytes"])
    return size / members if kind == "all_gather" and "TPU" not in row["hardware"] else size


def price(row: Mapping[str, str], cluster: Cluster) -> tuple[float, float]:
    """Published and predicted seconds. Raises `ValueError` where the row does not say enough."""
    if not row["size_bytes"]:
        raise ValueError("the size is not given")
    kind, topology = kind_of(row["op"]), cluster.topology
    cores = topology.cores if isinstance(topology, Torus) else 1
    members = cluster.num_devices // cores
    axes = ((members, cores),)
    algorithm = algorithm_of(row["algo"], cluster, cluster.collective_curves(kind, axes))
    nbytes = operand_bytes(row, kind, members)
    return published_seconds(row, kind, members, cores), cluster.collective_seconds(kind, nbytes, axes, algorithm)


def judge(row: Mapping[str, str], calibration: Sequence[Mapping[str, Any]]) -> Row:
    """One row beside its price."""
    known = {name: row[name] for name in _FIELDS} | {"usable": row["usable"]}
    where = f"{row['nodes'] or 1}x{int(row['devices']) // int(row['nodes'] or 1)}" if row["devices"] else "?"
    curve = " ".join(filter(None, (kind_or_op(row["op"]), row["hardware"], where, row["algo"])))
    size, fitted = int(row["size_bytes"] or 0), is_calibration(row, calibration)
    try:
        published, predicted = price(row, cluster_of(row))
    except ValueError as error:
        return Row(curve, **known, size_bytes=size, calibration=fitted, reason=str(error))
    seconds = {"published_s": published, "predicted_s": predicted, "error": predicted / published - 1}
    return Row(curve, **known, size_bytes=size, calibration=fitted, **seconds)


def kind_or_op(op: str) -> str:
    """Our name of a collective, or the row's."""
    try:
        return kind_of(op)
    except ValueError:
        return op


def calibration_rows() -> list[Mapping[str, Any]]:
    """What the calibration file names: rows that figures are fitted to, and rows that decided the form of a price."""
    document = tomllib.loads(CALIBRATION.read_text())
    return [named for each in (*document["fit"], *document["form"]) for named in each["rows"]]


def is_calibration(row: Mapping[str, str], named: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the named groups of rows holds this one."""
    fields = [{name: str(value) for name, value in group.items() if name in _FIELDS} for group in named]
    same = (all(row[name] == value for name, value in each.items()) for each in fields)
    return any(like and row["size_bytes"] in map(str, group["sizes"]) for like, group in zip(same, named, strict=True))


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One per curve that has a row that counts, worst first, then all together."""
    curves = dict.fromkeys(row.curve for row in rows if row.counts)
    each = [_summary(name, [row for row in rows if row.curve == name]) for name in curves]
    return [*sorted(each, key=lambda s: -(s.median_error or 0)), _summary("all", rows)]


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    errors = sorted(abs(row.error or 0.0) for row in rows if row.counts)
    ninth = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0] if errors else None
    return Summary(name, len(errors), median(errors) if errors else None, ninth, sum(row.calibration for row in rows))


def table(rows: Sequence[Row], found: Sequence[Summary]) -> str:
    """Curves with their errors, what was not priced and why, and the calibration."""
    lines = ["rows  median    p90  calibration  curve"]
    for s in found:
        lines.append(f"{s.rows:4}  {s.median_error or 0:6.1%} {s.p90_error or 0:6.1%}  {s.calibration_rows:11}  {s.curve}")
    skipped = dict.fromkeys((row.curve, row.reason) for row in rows if row.reason)
    lines += [f"not priced: {curve}: {reason}" for curve, reason in skipped]
    fitted = [row for row in rows if row.calibration and row.error is not None]
    lines += [f"calibration: {row.curve}: {row.size_bytes} bytes, error {row.error:+.1%}" for row in fitted]
    return "\n".join(lines)


def fits() -> list[dict[str, Any]]:
    """Which figures of which presets are fitted to which rows."""
    return tomllib.loads(CALIBRATION.read_text())["fit"]


def run(files: Sequence[Path]) -> Iterator[Row]:
    """Every row of the files beside its price."""
    named = calibration_rows()
    yield from (judge(row, named) for row in read(files))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[DATA], metavar="FILE")
    parser.add_argument("--fit", action="store_true", help="fit the presets' figures to the calibration rows and print them")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    if options.fit:
        from benchmarks.calibrate import report  # needs scipy

        print(report(read([DATA]), fits()))
        return 0
    rows = list(run(options.files))
    found = summaries(rows)
    overall = found[-1].median_error
    return finish(rows, overall is not None and overall <= MEDIAN_BAR, table(rows, found), options.json, summary=found)


if __name__ == "__main__":
    raise SystemExit(main())
