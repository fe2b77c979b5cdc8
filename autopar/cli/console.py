"""Where output goes: results to standard output, all else to standard error, errors to an exit status."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from autopar.errors import AutoparError, CheckError, InfeasibleError, PlanError, TraceError, UsageError
from autopar.report.table import render
from autopar.report.units import bytes_text

FAILED_CHECK, USAGE, INFEASIBLE, FUNCTION = 1, 2, 3, 4
STATUS: tuple[tuple[type[AutoparError], int], ...] = (
    (InfeasibleError, INFEASIBLE),
    (UsageError, USAGE),
    (PlanError, USAGE),  # a plan file that is malformed, or belongs to another program
    (CheckError, FAILED_CHECK),
    (AutoparError, FUNCTION),
)
"""Exit status by class of error; the first that fits."""

SCHEMA = 1
WIDTH = 120
"""Columns where the output is no terminal."""

MOST_LIVE = 8


def exit_status(error: AutoparError) -> int:
    """The exit status that an error stands for."""
    return next(status for kind, status in STATUS if isinstance(error, kind))


class Report:
    """What a command has to say: `show` for people, `document` for programs, `status` for the shell."""

    def __init__(self, destination: str | None = None):
        self.destination = destination
        self.document: Mapping[str, Any] | None = None
        self.status = 0

    def show(self, *parts: RenderableType) -> None:
        """Print on standard output, unless that is kept for JSON."""
        if self.destination == "-":
            return
        console = Console(highlight=False)
        for part in parts:
            if console.is_terminal:
                console.print(part, soft_wrap=isinstance(part, Text))
            else:
                print(render(part, WIDTH) if not isinstance(part, (str, Text)) else f"{part}\n", end="")


@contextmanager
def reporting(json_to: str | None = None, debug: bool = False) -> Iterator[Report]:
    """Runs a command's body: afterwards its document is written to `json_to` (a path, or `-`), and it ends with its exit status.

    Errors of autopar's own become a message on standard error (with `debug`, a traceback before it) and a document of their own.
    """
    report = Report(json_to)
    try:
        _check_place(json_to)
        with _stdout_to_stderr() if json_to == "-" else nullcontext():
            yield report
    except AutoparError as error:
        if debug:
            traceback.print_exception(error)
        _print_error(error)
        report.document, report.status = error_document(error), exit_status(error)
    if json_to is not None and report.document is not None:
        report.status = _written(json_to, report.document) or report.status
    if report.status:
        raise typer.Exit(report.status)


def _check_place(json_to: str | None) -> None:
    """Raise `UsageError` before any work is done for a file that cannot be written."""
    if json_to not in (None, "-") and (not Path(json_to).parent.is_dir() or Path(json_to).is_dir()):
        raise UsageError(f"--json cannot write {json_to}: there is no such folder, or it is one. Give the path of a file, or `-`.")


def _written(json_to: str, document: Mapping[str, Any]) -> int:
    """Write a document; the exit status that this gives."""
    try:
        write_text(json_to, json.dumps(finite(document), allow_nan=False, indent=1))
    except UsageError as error:
        _print_error(error)
        return exit_status(error)
    return 0


def error_document(error: AutoparError) -> dict[str, Any]:
    """An error as JSON data."""
    found: dict[str, Any] = {"type": type(error).__name__, "message": str(error), "exit_status": exit_status(error)}
    if isinstance(error, InfeasibleError):
        found |= {"peak_bytes": error.peak_bytes, "budget_bytes": error.budget_bytes}
        found |= {"live": [list(entry) for entry in error.live], "suggestions": list(error.suggestions)}
    where = _raised_at(error)
    return {"schema": SCHEMA, "error": found | ({"where": where} if where else {})}


def _print_error(error: AutoparError) -> None:
    console = error_console()
    where = _raised_at(error)
    lines = _infeasible_lines(error) if isinstance(error, InfeasibleError) and error.peak_bytes else [str(error)]
    if where:
        lines.append(f"It was raised at {where}; --debug shows the traceback.")
    if isinstance(error, CheckError):
        lines.append("This is a fault of autopar, not of yours. --debug shows the traceback; please report it with that.")
    console.print(Text.assemble(("error: ", "bold red"), "\n".join(lines)), soft_wrap=True)


def _infeasible_lines(error: InfeasibleError) -> list[str]:
    """The least peak, what is live there, and what would do, a line each."""
    lines = [f"no plan fits {bytes_text(error.budget_bytes)} per device; the smallest budget that does is {bytes_text(error.peak_bytes)}."]
    lines += ["Live at that peak:", *(f"  {bytes_text(size):>9}  {what}" for what, size in error.live[:MOST_LIVE])]
    rest = error.live[MOST_LIVE:]
    lines += [f"  {bytes_text(sum(size for _, size in rest)):>9}  {len(rest)} more"] if rest else []
    return [*lines, "To make it fit:", *(f"  {suggestion}" for suggestion in error.suggestions)]


def _raised_at(error: AutoparError) -> str:
    """`file:line` of the innermost frame of the user's own code that raised; empty where none did."""
    if not isinstance(error, TraceError) or error.__cause__ is None:
        return ""
    frames = [f for f in traceback.extract_tb(error.__cause__.__traceback__) if _is_users(Path(f.filename))]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_users(file: Path) -> bool:
    libraries = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1])
    return file.is_file() and "site-packages" not in file.parts and not any(folder in file.parents for folder in libraries)


def write_text(path: str, text: str) -> None:
    """Text to a file, or to standard output for `-`. Raises `UsageError` for a file that cannot be written."""
    if path == "-":
        print(text, flush=True)
        return
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from error


def finite(value: Any) -> Any:
    """JSON data in which numbers that JSON cannot hold are strings, as in plan files."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What anything prints meanwhile, a user's function or a solver's own process too, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error that something takes long: a spinner on a terminal, lines elsewhere. Yields what tells of progress."""
    console = error_console()
    if not console.is_terminal:
        say(what)
        yield lambda text: say(f"  {text}")
        return
    with console.status(Text(what)) as status:
        yield lambda text: status.update(Text(f"{what}: {text}"))


def say(text: str) -> None:
    """One line on standard error."""
    error_console().print(Text(text), soft_wrap=True)


def error_console() -> Console:
    """Standard error."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=WIDTH)


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a row of blocks, the largest the highest.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    blocks = "▁▂▃▄▅▆▇█"
    known = [v for v in values if math.isfinite(v)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((v - low) * scale)] if math.isfinite(v) else "?" for v in values)
