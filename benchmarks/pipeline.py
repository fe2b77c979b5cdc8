"""Whether schedules overlap in wall-clock time as the simulator says, and what the runtime itself costs.

    python -m benchmarks.pipeline [--stages 4] [--microbatches 8] [--milliseconds 5] [--leaves 20] [--schedule NAME ...] [--json -]

Stages stand on one simulated device each and do nothing but sleep, in an XLA custom call that is compiled here with g++: on a CPU,
programs of one device each run beside each other, and sleeping ones do so on any number of cores. A forward sleeps once, a backward
twice: once for the cotangent of its input, once for the gradients of its weights.

Bars: the makespan is within 5 % of what the simulator says of tasks that take as long as those of a stage alone, and starting the
programs of a step takes less than 5 % of it.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import autopar
import cost_models
from autopar import rules
from autopar.costs import Pricer
from autopar.emit.manual import Emission
from autopar.interop import layers_at, ops_of
from autopar.interop.settle import Planned, settle
from autopar.intraop.forced import random_plan
from autopar.ir.mesh import LogicalMesh
from autopar.report.table import render
from autopar.runtime.executor import Owned, make_mesh
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.program import in_layers
from autopar.runtime.stage import StageRun
from autopar.schedule import Schedule, StageCost, build, simulate
from autopar.trace.trace import Traced, trace
from benchmarks.common import add_json_option, finish

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble")
OVERLAP_BAR = 0.05
DISPATCH_BAR = 0.05
WIDTH = 32
SLEEP = """
#include <chrono>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Sleep(int64_t microseconds, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    AutoparSleep, Sleep, ffi::Ffi::Bind().Attr<int64_t>("microseconds").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
"""


@dataclass(frozen=True)
class Row:
    """One schedule. Seconds: the fastest step, the simulator's makespan, and the CPU time of the thread that starts its programs.

    `error` is relative to the simulator; `microseconds` are those of starting, per leaf, device and microbatch.
    """

    schedule: str
    stages: int
    microbatches: int
    leaves: int
    seconds: float
    simulated: float
    error: float
    dispatch_s: float
    dispatch_share: float
    microseconds: float
    serial: float


def sleeping(folder: str) -> None:
    """Compile the custom call that sleeps, and make it known to JAX. Raises `RuntimeError` where there is no g++."""
    source, library = Path(folder) / "sleep.cc", Path(folder) / "sleep.so"
    source.write_text("#include <cstring>\n" + SLEEP)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError("this benchmark compiles a custom call with g++, which is not here: install a C++ compiler.") from error
    if done.returncode:
        raise RuntimeError(f"g++ cannot compile the custom call: {done.stderr[-1000:]}")
    handler = jax.ffi.pycapsule(ctypes.cdll.LoadLibrary(str(library)).AutoparSleep)
    jax.ffi.register_ffi_target("autopar_sleep", handler, platform="cpu")


def _sleep(x: Any, microseconds: int) -> Any:
    return jax.ffi.ffi_call("autopar_sleep", jax.ShapeDtypeStruct(x.shape, x.dtype))(x, microseconds=np.int64(microseconds))


def _sleeper(name: str, spec: str, microseconds: int) -> Callable[[Any], Any]:
    """A function that sleeps and returns its argument, closed under a rule."""

    def run(x: Any) -> Any:
        return _sleep(x, microseconds)

    run.__name__ = name
    return autopar.rule(spec)(run)


def layer(milliseconds: float) -> Callable[[Any, Any], Any]:
    """`(weights, x) -> y`: forward sleeps once, backward once for each of its two halves."""
    forward, back, weight = (_sleeper(f"rest_{what}", "b d -> b d", int(1e3 * milliseconds)) for what in ("forward", "back", "weight"))

    @jax.custom_vjp
    def apply(ws: Any, x: Any) -> Any:
        return forward(jnp.tanh(x @ ws[0]))

    def ahead(ws: Any, x: Any) -> Any:
        return apply(ws, x), (ws, x)

    def behind(kept: Any, g: Any) -> Any:
        ws, x = kept
        rested = back(g)
        first = x.T @ weight(rested)  # one after the other, also where a program may run both at once
        others = [jnp.sum(first) * w for w in ws[1:]]
        return [first, *others], rested @ ws[0].T

    apply.defvjp(ahead, behind)
    return apply


def step_of(stages: int, leaves: int, milliseconds: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of plain gradient descent over as many layers as stages, each with so many leaves."""
    apply = layer(milliseconds)

    def loss(params: Any, x: Any) -> Any:
        for ws in params:
            x = apply(ws, x)
        return jnp.mean(x**2)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value

    def one(n: int) -> Any:
        return [jnp.eye(WIDTH, dtype=jnp.float32) * (1 + 0.1 * n), *(jnp.ones((4,)) for _ in range(leaves - 1))]

    return step, ([one(n) for n in range(stages)], jnp.ones((64, WIDTH)))


def executable(traced: Traced, schedule: Schedule) -> PipelineExecutable:
    """The step on one device a stage, cut before each sleep of forward but the first."""
    count = schedule.num_stages
    begins = [i for i, op in enumerate(traced.graph.ops) if op.primitive == "dot_general" and op.phase == "forward"][1:count]
    layers = layers_at(ops_of(traced.graph, traced.roles.carried), begins)
    program = in_layers(traced, layers, schedule.num_microbatches).staged(range(count), schedule.name)
    mesh = LogicalMesh(("x",), (1,))
    pricer = Pricer(cost_models.load_cluster("fast-link:1", measure=False), mesh)
    planned = []
    for stage in program.stages:
        found = tuple(rules.rule_for(op, stage.graph.aval) for op in stage.graph.ops)
        alone = random_plan(stage.graph, found, mesh, stage.carried, pricer.move, 0)  # on one device all plans are the same
        planned.append(Planned(stage, stage.graph, found, alone, pricer.move))
    runs = []
    for n, (p, plan) in enumerate(zip(planned, settle(planned), strict=True)):
        where = make_mesh(mesh, jax.devices()[n : n + 1])
        runs.append(StageRun(p.stage, Emission(p.graph, program.whole.program, p.rules, plan), program.constants(n), where))
    whole = make_mesh(LogicalMesh(("stage",), (count,)))
    order = [span.task for span in simulate(schedule, _costs(count, 1.0)).order]
    return PipelineExecutable(runs, schedule, order, True, whole, traced)


def _costs(stages: int, seconds: float) -> list[StageCost]:
    """The first stage has no cotangent to send: all of its backward is for its weights."""
    return [StageCost(seconds, 2 * seconds, 0.0, 2 * seconds), *[StageCost(seconds, 2 * seconds, seconds, seconds)] * (stages - 1)]


def measure(name: str, stages: int, microbatches: int, leaves: int, milliseconds: float, steps: int) -> Row:
    """One schedule. The simulator is told how long one task takes where a stage runs alone: sleeping takes longer than asked."""
    task, _ = timed("gpipe", 1, microbatches, leaves, milliseconds, steps)
    task /= 3 * microbatches
    took, started = timed(name, stages, microbatches, leaves, milliseconds, steps)
    simulated = simulate(build(name, stages, microbatches), _costs(stages, task)).makespan_s
    per_leaf = 1e6 * started / (leaves * stages * microbatches)
    serial = 3 * task * stages * microbatches
    return Row(name, stages, microbatches, leaves, took, simulated, took / simulated - 1, started, started / took, per_leaf, serial)


def timed(name: str, stages: int, microbatches: int, leaves: int, milliseconds: float, steps: int) -> tuple[float, float]:
    """The fastest of some steps, each waited for, and the least CPU time of the thread that starts one: others only add to them."""
    step, args = step_of(stages, leaves, milliseconds)
    schedule = build(name, stages, microbatches)
    run = executable(trace(step, args), schedule)
    flat, owned = jax.tree.leaves(args), Owned()
    carried = run.traced.roles.carried
    seconds, dispatch = [], []
    for n in range(steps + 2):
        begin, busy = time.perf_counter(), time.thread_time()
        outputs = run(flat, owned)
        busy = time.thread_time() - busy
        jax.block_until_ready(outputs)
        if n >= 2:
            seconds.append(time.perf_counter() - begin)
            dispatch.append(busy)
        for i, o in carried:
            flat[i] = outputs[o]
    return min(seconds), min(dispatch)


def table(found: Sequence[Row]) -> str:
    """The rows as text."""
    columns = ("schedule", "stages", "microbatches", "leaves", "step", "simulated", "off", "in Python", "share", "us per leaf", "serial")
    shown = Table(*columns)
    for r in found:
        times = (f"{1e3 * r.seconds:.1f} ms", f"{1e3 * r.simulated:.1f} ms", f"{r.error:+.1%}", f"{1e3 * r.dispatch_s:.2f} ms")
        cells = (r.schedule, str(r.stages), str(r.microbatches), str(r.leaves), *times)
        shown.add_row(*cells, f"{r.dispatch_share:.1%}", f"{r.microseconds:.2f}", f"{1e3 * r.serial:.0f} ms")
    return render(shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the schedules that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description="Schedules in wall-clock time.")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help=f"by default {', '.join(SCHEDULES)}")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=5.0, help="of a forward, and of each half of a backward")
    parser.add_argument("--leaves", type=int, default=20, help="of each stage")
    parser.add_argument("--steps", type=int, default=9)
    add_json_option(parser)
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given.stages)
    with tempfile.TemporaryDirectory() as folder:
        sleeping(folder)
    asked = (given.stages, given.microbatches, given.leaves, given.milliseconds, given.steps)
    found = [measure(name, *asked) for name in given.schedule or SCHEDULES]
    passed = all(abs(r.error) <= OVERLAP_BAR and r.dispatch_share <= DISPATCH_BAR for r in found)
    return finish(found, passed, table(found), given.json)


if __name__ == "__main__":
    sys.exit(main())
