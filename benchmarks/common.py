"""What all benchmarks do alike: rows as a table or as one JSON document, and an exit status that says whether the bars were met."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

SCHEMA = 1


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option `--json FILE`."""
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; `-` is standard output, which then has nothing else")


def document(rows: Sequence[Any], passed: bool, summary: Sequence[Any] = ()) -> str:
    """The rows, and their summary if there is one, all dataclasses, as one JSON document."""
    found = {"schema": SCHEMA, "rows": [asdict(row) for row in rows], "passed": passed}
    return json.dumps(found | ({"summary": [asdict(each) for each in summary]} if summary else {}))


def finish(rows: Sequence[Any], passed: bool, table: str, target: str | None, summary: Sequence[Any] = ()) -> int:
    """Print the table, or the JSON document instead where `target` is `-`, write the file, and return the exit status."""
    print(document(rows, passed, summary) if target == "-" else table)
    if target not in (None, "-"):
        Path(target).write_text(document(rows, passed, summary))
    return 0 if passed else 1
