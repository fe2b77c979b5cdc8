"""`autopar run` and `autopar demo`: plan, run beside one device, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from autopar.api import Plan
from autopar.api.clusters import device_count
from autopar.api.drift import save_measured
from autopar.cli.console import FAILED_CHECK, Report, error_console, reporting, say, sparkline, working
from autopar.cli.flags import Batch, Debug, Json, Keyword, with_options
from autopar.cli.planning import TargetArgument, make_plan
from autopar.cli.target import Target, keyword_arguments, load_target
from autopar.compiler import Options
from autopar.errors import InfeasibleError, UsageError
from autopar.report.brief import brief_table
from autopar.report.drift import Measured
from autopar.report.trial import check_lines, trial_tables
from autopar.report.units import bytes_text, count_text
from autopar.runtime import devices
from autopar.runtime.executable import executable_for
from autopar.runtime.executor import check_devices, make_mesh
from autopar.runtime.trial import Trial, attempt
from autopar.trace.arguments import split

ON_CPU = ("host", "slow-link", "fast-link", "tight-memory")
"""Presets that stand for simulated devices."""

ABOUT = """A byte-level GPT of {size} parameters reads the source code of Python's standard library. It is an ordinary flax and optax
training step. autopar plans it for {cluster}, runs the plan, and holds it against plain jax.jit on one device."""

FEW = """The fastest plan there needs no collective: cutting so small a model gains nothing. To show some, plan again with {share:.0%} of
the memory that this plan needs."""

NEXT = """
Next: autopar plan gpt-350m --cluster h100-sxm:8 --batch 32     a cluster that need not be here
      autopar run file.py:callable --cluster host:8             your own step; the callable returns (function, args)"""

FRUGAL = 0.6
"""Share of the unsharded peak that the demo allows where sharding does not pay by itself."""


@with_options
def run(
    target: TargetArgument,
    options: Callable[[], Options],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="C", help="What to plan for; devices that are not here are simulated.")
    ] = "host:8",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to run and compare.")] = 3,
    batch: Batch = None,
    keyword: Keyword = None,
    json: Json = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the plan, and what was measured beside it.")] = None,
    debug: Debug = False,
) -> None:
    """Plan a target, run it, and compare every step with one device: numbers, collectives, memory and time."""
    with reporting(json, debug) as report:
        asked = options()
        simulate(cluster)
        loaded = load_target(target, batch, keyword_arguments(keyword or ()), abstract=False)
        check_concrete(loaded)
        plan = make_plan(loaded, cluster, asked)
        report.show(brief_table(plan.data), "")
        trial = try_out(plan, loaded, asked, steps)
        if save:
            plan.save(save)
            save_measured(Measured(trial.run.seconds, trial.memory["temp"], devices.platform()), save)
        finish(report, plan, trial)


def simulate(cluster: str) -> None:
    """As many CPU devices as the cluster has, should they be needed. Before anything else touches JAX.

    Raises `MeshError` where they are too few all the same, before anything is measured.
    """
    needed = device_count(cluster) or 0
    devices.simulate(needed, only_cpu=cluster.partition(":")[0] in ON_CPU)
    check_devices(needed, devices.count())


def check_concrete(target: Target) -> None:
    """Raise `UsageError` where an argument is a shape: nothing can be run on it."""
    found = devices.abstract_leaves(target.args)
    if found:
        raise UsageError(
            f"`{target.name}` returns shapes, not arrays, for {len(found)} leaves, the first at args{found[0]}: "
            "it can be planned, not run. Return arrays to run it."
        )


def try_out(plan: Plan, target: Target, options: Options, steps: int, batches: Sequence[Sequence[Any]] = ()) -> Trial:
    """Run the plan for some steps beside one device, with a bar that shows the loss on standard error."""
    traced = plan._traced
    assert traced is not None
    executable = executable_for(plan.data, traced, make_mesh(plan.mesh), options.donate, options.emitter)
    with working(f"Compiling for {plan.mesh.num_devices} {devices.platform()} devices"):
        executable.compiled  # noqa: B018
    leaves, _ = split(target.args, {})
    with stepping(steps) as on_step:
        return attempt(plan.data, traced, executable, leaves, steps, on_step, batches)


def finish(report: Report, plan: Plan, trial: Trial) -> None:
    """Show what was found, and set the command's document and status."""
    if len(trial.losses) > 1:
        report.show(Text(f"loss  {sparkline(trial.losses)}  {trial.losses[0]:.3f} to {trial.losses[-1]:.3f}"), "")
    report.show(trial_tables(plan.data, trial), "", check_lines(trial.verification))
    report.document = plan.to_dict() | trial.to_dict()
    report.status = 0 if trial.verification.agree else FAILED_CHECK


@contextmanager
def stepping(steps: int) -> Iterator[Callable[[int, float | None], None]]:
    """A bar of steps on standard error, ten lines or so where that is no terminal. Yields what is told of each step."""
    console = error_console()
    what = "Running beside one device"
    if not console.is_terminal:
        say(f"{what}, {steps} steps")
        yield lambda n, loss: say(f"  step {n + 1}{_loss_text(loss)}") if (n + 1) % max(1, steps // 10) == 0 or n == 0 else None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=steps, loss="")
        yield lambda n, loss: bar.update(task, completed=n + 1, loss=_loss_text(loss))


def _loss_text(loss: float | None) -> str:
    return "" if loss is None else f"  loss {loss:.4f}"


def demo(
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Steps to train.")] = 30,
    cluster: Annotated[str, typer.Option("--cluster", metavar="C", help="What to plan for; its devices are simulated.")] = "host:8",
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Train a small GPT on simulated devices: plan it, run it beside one device, and check the one against the other."""
    with reporting(json, debug) as report:
        simulate(cluster)
        target = load_target("gpt-demo", abstract=False)
        size = count_text(sum(x.size for x in split((target.args[0].params,), {})[0]))
        report.show(Text("autopar demo", style="bold"), Text(f"{ABOUT.format(size=size, cluster=cluster)}\n"))
        batches = _batches(target, steps)
        plan, options = make_plan(target, cluster, Options()), Options()
        report.show(brief_table(plan.data), "")
        if not plan.collectives:
            plan, options = _frugal(report, target, cluster, plan)
            report.show(brief_table(plan.data), "")
        trial = try_out(plan, target, options, steps, batches)
        finish(report, plan, trial)
        report.show(Text(NEXT))


def _batches(target: Target, steps: int) -> list[list[Any]]:
    """The step's flat arguments with the text of each step."""
    from autopar.models.text import corpus_batches  # flax and optax, which only this command needs

    state, batch = target.args
    count, seq = batch["tokens"].shape
    return [split((state, text), {})[0] for text in corpus_batches(count, seq, steps)]


def _frugal(report: Report, target: Target, cluster: str, plan: Plan) -> tuple[Plan, Options]:
    """A plan that has to shard: the fastest here keeps everything on each device, which shows little."""
    whole = plan.predicted.peak_bytes
    report.show(Text(f"{FEW.format(share=FRUGAL)}\n"))
    budget = int(FRUGAL * whole)
    for _ in range(3):
        options = Options(memory_bytes=budget)
        try:
            return make_plan(target, cluster, options), options
        except InfeasibleError as error:
            budget = error.peak_bytes
            say(f"that does not fit; the least is {bytes_text(budget)}")
    return plan, Options()
