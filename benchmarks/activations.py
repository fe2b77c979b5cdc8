"""Closed forms of activation memory beside the figures of the recomputation paper: `python -m benchmarks.activations [FILE...] [--json -]`.

Figure 1 gives GiB per device, figure 7 percent of the tensor-parallel baseline; errors are relative for the first and points of the
plot's percent for the second. Each must be within 1 %.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import add_json_option, finish
from cost_models.activations import Transformer, stage_bytes, state_bytes

DATA = Path(__file__).parent / "data" / "activations.csv"
BAR = 0.01
_GIB = 2**30
_SHARE = re.compile(r"activation memory = ([\d.]+) % of TP-only baseline")
_FORMS = {"full": "full", "seq": "none", "none": "none", "selective": "selective"}


@dataclass(frozen=True)
class Row:
    """One figure: GiB, or a share of the baseline, as published and as the closed form has it."""

    table: str
    model: str
    what: str
    published: float
    predicted: float
    error: float


def rows(files: Iterable[Path]) -> Iterator[Row]:
    """The rows of the files that give memory, beside the closed forms."""
    for file in files:
        with file.open(newline="") as text:
            for row in csv.DictReader(line for line in text if not line.startswith("#")):
                found = judge(row)
                if found is not None:
                    yield found


def judge(row: Mapping[str, str]) -> Row | None:
    """One row beside its closed form; None for one that gives no memory."""
    share = _SHARE.search(row["metric_kind"])
    if not share and not row["mem_GiB"]:
        return None
    model = model_of(row)
    if share:
        published, predicted = float(share[1]) / 100, activations(row, model) / activations({**row, "recompute": "none"}, model)
        return Row(row["table"], row["model"], row["recompute"], published, predicted, predicted - published)
    state = row["metric_kind"].startswith("params")
    total = state_bytes(model, int(row["tp"]), int(row["pp"])) if state else activations(row, model)
    published, predicted = float(row["mem_GiB"]), total / _GIB
    return Row(row["table"], row["model"], "state" if state else row["recompute"], published, predicted, predicted / published - 1)


def model_of(row: Mapping[str, str]) -> Transformer:
    """The model that a row describes."""
    return Transformer(*(int(row[name]) for name in ("layers", "hidden", "heads", "seq", "mbs")))


def activations(row: Mapping[str, str], model: Transformer) -> float:
    """Bytes on the first stage for a row's plan; its `recompute` also tells whether sequences are cut."""
    words = row["recompute"]
    form = next(form for word, form in _FORMS.items() if words.startswith(word))
    return stage_bytes(model, int(row["tp"]), int(row["pp"]), int(row["vpp_chunks"] or 1), "seq-par" in words, form)


def table(found: Sequence[Row]) -> str:
    """The rows as text."""
    lines = ["published  predicted   error  model  what"]
    lines += [f"{r.published:9.4f}  {r.predicted:9.4f}  {r.error:+6.2%}  {r.model:5}  {r.what} ({r.table})" for r in found]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[DATA], metavar="FILE")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    found = list(rows(options.files))
    return finish(found, bool(found) and all(abs(row.error) <= BAR for row in found), table(found), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
