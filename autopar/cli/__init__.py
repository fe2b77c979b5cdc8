"""The command line: `autopar demo`, `plan`, `run`, `verify`, `baselines`, `explain`, `diff`, `profile`, `clusters`, `models`."""

from __future__ import annotations

import typer

from autopar.cli import catalogue, comparing, planning, profiling, running, verifying

app = typer.Typer(
    name="autopar",
    help="Plans how a JAX training step is sharded over a cluster, and runs exactly that plan.",
    epilog="Exit status: 0 done, 1 a check failed, 2 usage, 3 no plan fits the memory, 4 the function raised or cannot be planned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (
    *(running.demo, planning.plan, running.run, verifying.verify, comparing.baselines),
    *(planning.explain, planning.diff, profiling.profile, catalogue.clusters, catalogue.models),
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """The entry point of the `autopar` command."""
    app()
