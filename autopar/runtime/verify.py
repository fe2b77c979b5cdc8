"""Hold a plan against the world: numbers of one device, collectives of the compiled program, its memory, its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.emit.compare import CollectiveCheck, compare_collectives
from autopar.emit.hlo import CompiledCollective, read_collectives
from autopar.ir.plan import Plan
from autopar.runtime.executable import AnyExecutable
from autopar.runtime.executor import Owned
from autopar.runtime.pipeline import PipelineExecutable
from autopar.trace.trace import Traced


@dataclass(frozen=True)
class Check:
    """One thing checked: what was expected, what was found, whether they agree, and where they differ most."""

    name: str
    expected: str
    actual: str
    agree: bool
    detail: str = ""

    def __str__(self) -> str:
        sign = "agrees" if self.agree else "DIFFERS"
        return f"{self.name}: {sign}; expected {self.expected}, found {self.actual}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Verification:
    """Numbers, collectives, memory and time of a plan; the first two and memory decide `agree`, time is reported."""

    numbers: Check
    collectives: Check
    memory: Check
    time: Check

    @property
    def agree(self) -> bool:
        return self.numbers.agree and self.collectives.agree and self.memory.agree

    def __str__(self) -> str:
        return "\n".join(map(str, (self.numbers, self.collectives, self.memory, self.time)))


@dataclass(frozen=True)
class LeafError:
    """How far an output leaf is off: largest difference over largest value. `noise` is how far rounding the state's last bits moves it.

    It is known only where it is needed to judge.
    """

    path: str
    dtype: str
    relative: float
    noise: float = 0.0


TOLERANCES = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative difference, by dtype, at which every leaf counts as equal."""
AMPLIFIED = 50.0
"""Beyond its tolerance, a leaf may be off by so many times what the last bits of the state do to it on one device. An adaptive
optimiser's first steps are scale-free: a leaf whose true gradient is zero moves by a full step of random sign."""
_NOISE = 1e-13


def leaf_error(path: str, actual: Any, expected: Any) -> LeafError:
    """The error of one leaf against its reference. Integers, booleans and keys must be equal: any difference is infinite."""
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    a, e = np.asarray(actual), np.asarray(expected)
    dtype = str(e.dtype)
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return LeafError(path, dtype, 0.0 if np.array_equal(a, e) else float("inf"))
    kind = np.complex128 if np.iscomplexobj(e) else np.float64
    a, e = a.astype(kind), e.astype(kind)
    finite = np.isfinite(e)
    if not np.array_equal(np.where(finite, 0, e), np.where(np.isfinite(a), 0, a), equal_nan=True):
        return LeafError(path, dtype, float("inf"))
    a, e = np.where(finite, a, 0), np.where(finite, e, 0)
    off, largest = float(np.max(np.abs(a - e), initial=0.0)), float(np.max(np.abs(e), initial=0.0))
    return LeafError(path, dtype, 0.0 if max(off, largest) < _NOISE else off / (largest + _NOISE))


def wrong_leaves(errors: Sequence[LeafError]) -> list[LeafError]:
    """The leaves of one step whose error rounding does not explain."""
    return [e for e in errors if not e.relative <= max(TOLERANCES.get(e.dtype, 0.0), AMPLIFIED * e.noise)]


@dataclass
class _Shaken:
    """The reference run once more with the last bits of its floating state turned at random: what rounding alone does to each leaf.

    It starts when it is first asked for, from the first step.
    """

    function: Callable[..., list[Any]]
    carried: Mapping[int, int]
    leaves: list[Any]
    given: list[Mapping[int, Any]] = field(default_factory=list)
    done: int = 0
    started: bool = False

    def noise(self, expected: Sequence[Any]) -> list[float]:
        """By output, how far the shaken run is off in the last step that was `given`."""
        if not self.started:
            self.started = True
            random = np.random.default_rng(0)
            for i in self.carried.values():
                self.leaves[i] = _turned(self.leaves[i], random)
        outputs: list[Any] = []
        while self.done < len(self.given):
            for i, x in self.given[self.done].items():
                self.leaves[i] = x
            outputs = self.function(*self.leaves)
            for o, i in self.carried.items():
                self.leaves[i] = outputs[o]
            self.done += 1
        return [leaf_error("", a, e).relative for a, e in zip(outputs, expected, strict=True)]


def _turned(leaf: Any, random: np.random.Generator) -> Any:
    """A leaf with the last bit of each floating number up or down."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    signs = random.choice([-1.0, 1.0], np.shape(leaf))
    return (np.asarray(leaf) * (1 + 2 * float(jnp.finfo(leaf.dtype).eps) * signs)).astype(leaf.dtype)


@dataclass(frozen=True)
class Run:
    """Outputs of some steps under the plan beside those of one device, and the seconds that each took."""

    errors: tuple[tuple[LeafError, ...], ...]
    seconds: tuple[float, ...]
    reference_seconds: tuple[float, ...]
    outputs: tuple[Any, ...]


def run_beside(
    traced: Traced,
    executable: AnyExecutable,
    leaves: Sequence[Any],
    steps: int,
    on_step: Callable[[int, Sequence[Any], Sequence[LeafError]], None] | None = None,
    batches: Sequence[Sequence[Any]] = (),
) -> Run:
    """Run the plan and the plain function on one device, step by step, each from its own state.

    `batches[n]` replaces the leaves that are not state in step n. `on_step(step, outputs, errors)` is called after each.
    """
    carried = dict((o, i) for i, o in traced.roles.carried)
    state_inputs = set(carried.values())
    reference = jax.jit(_flat(traced))
    ours, theirs, owned = list(leaves), [alone(x) for x in leaves], Owned()
    shaken = _Shaken(reference, carried, list(theirs))
    errors, seconds, reference_seconds = [], [], []
    outputs: list[Any] = []
    for n in range(steps):
        if n < len(batches):
            for i, x in enumerate(batches[n]):
                if i not in state_inputs:
                    ours[i], theirs[i] = x, alone(x)
        begin = time.perf_counter()
        outputs = jax.block_until_ready(executable(ours, owned))
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        expected = jax.block_until_ready(reference(*theirs))
        reference_seconds.append(time.perf_counter() - begin)
        shaken.given.append({i: x for i, x in enumerate(theirs) if i not in state_inputs})
        found = tuple(map(leaf_error, traced.graph.output_names, outputs, expected))
        if wrong_leaves(found):
            found = tuple(replace(e, noise=noise) for e, noise in zip(found, shaken.noise(expected), strict=True))
        errors.append(found)
        for o, i in carried.items():
            ours[i], theirs[i] = outputs[o], expected[o]
        if on_step is not None:
            on_step(n, outputs, errors[-1])
    return Run(tuple(errors), tuple(seconds), tuple(reference_seconds), tuple(outputs))


def alone(leaf: Any) -> Any:
    """A leaf as one device has it: host data where it can be."""
    if isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(leaf)
    return leaf


def _flat(traced: Traced) -> Callable[..., list[Any]]:
    """The user's own function on flat leaves."""

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = traced.signature.rebuild(leaves)
        out = jax.tree.leaves(traced.function(*args, **kwargs))
        return [out[i] for i in traced.out_positions]

    return flat


def verify(plan: Plan, traced: Traced, executable: AnyExecutable, leaves: Sequence[Any], steps: int = 3) -> Verification:
    """All four checks, over `steps` steps from these leaves."""
    run = run_beside(traced, executable, leaves, steps)
    return Verification(
        check_numbers(run), check_collectives(plan, executable), check_memory(plan, executable), check_time(plan, run.seconds)
    )


def check_numbers(run: Run) -> Check:
    """Every output of every step against one device."""
    bad = [(n, e) for n, step in enumerate(run.errors) for e in wrong_leaves(step)]
    every = [e for step in run.errors for e in step]
    judged = [e for e in every if e.relative <= TOLERANCES.get(e.dtype, 0.0)]
    left_out = len({e.path for e in every} - {e.path for e in judged})
    shown = bad[0][1] if bad else max(judged, key=lambda e: e.relative, default=None)
    detail = f"{'step ' + str(bad[0][0] + 1) + ': ' if bad else 'worst '}{shown.path}" if shown else ""
    detail += f"; {left_out} leaves that rounding alone decides left out" if left_out and not bad else ""
    found = f"{shown.relative:.2g} off" if shown else "nothing to compare"
    return Check("numbers", "one device's", found, not bad, detail)


def collective_check(plan: Plan, executable: AnyExecutable) -> CollectiveCheck:
    """Planned against compiled collectives."""
    if isinstance(executable, PipelineExecutable):
        return _by_stage(plan, executable)
    platform = executable.mesh.devices.flat[0].platform
    return compare_collectives(plan.collectives, read_collectives(executable.compiled.as_text()), platform, plan.mesh)


def _by_stage(plan: Plan, executable: PipelineExecutable) -> CollectiveCheck:
    """The same stage by stage, as one."""
    platform = executable.mesh.devices.flat[0].platform
    found = []
    for n, stage in enumerate(plan.stages):
        planned = [c for c in plan.collectives if c.stage == n]
        found.append(compare_collectives(planned, executable.collectives(n), platform, stage.sharding.mesh))
    return CollectiveCheck(
        all(f.agree for f in found),
        tuple(c for f in found for c in f.missing),
        tuple(c for f in found for c in f.unexpected),
        tuple(d for f in found for d in f.differing),
        sum(f.planned_bytes for f in found),
        sum(f.compiled_bytes for f in found),
        tuple(dict.fromkeys(name for f in found for name in f.rewrites)),
    )


def compiled_collectives(executable: AnyExecutable) -> tuple[CompiledCollective, ...]:
    """The collectives of all compiled programs of an executable."""
    if isinstance(executable, PipelineExecutable):
        return tuple(c for n in range(len(executable.stages)) for c in executable.collectives(n))
    return read_collectives(executable.compiled.as_text())


def check_collectives(plan: Plan, executable: AnyExecutable) -> Check:
    """The compiled program's collectives are the planned ones."""
    found = collective_check(plan, executable)
    count = len(plan.collectives)
    expected = f"{count} collectives, {found.planned_bytes:,} bytes"
    detail = "" if found.agree else str(found).split("\n", 1)[-1].strip()[:2000]
    return Check("collectives", expected, f"{found.compiled_bytes:,} bytes", found.agree, detail)


MEMORY_TOLERANCE = 0.35
"""How far predicted temporaries may be from XLA's, relative to the larger of the two."""

MEMORY_FLOOR = 256 * 1024
"""Bytes of temporaries below which buffers too small to plan decide."""


def compiled_memory(executable: AnyExecutable) -> dict[str, int]:
    """Bytes per device from XLA: arguments, outputs, aliased (donated), temporaries, and their sum."""
    if isinstance(executable, PipelineExecutable):
        return executable.memory()
    m = executable.compiled.memory_analysis()
    sizes = {
        "argument": m.argument_size_in_bytes,
        "output": m.output_size_in_bytes,
        "alias": m.alias_size_in_bytes,
        "temp": m.temp_size_in_bytes,
    }
    return sizes | {"total": sizes["argument"] + sizes["output"] - sizes["alias"] + sizes["temp"]}


def check_memory(plan: Plan, executable: AnyExecutable) -> Check:
    """Temporaries against XLA's; the rest of memory follows exactly from the shardings."""
    found = compiled_memory(executable)
    predicted = plan.predicted.temp_bytes
    off = abs(found["temp"] - predicted)
    agree = off <= max(MEMORY_FLOOR, MEMORY_TOLERANCE * max(found["temp"], predicted))
    return Check("memory", f"{predicted:,} temporary bytes", f"{found['temp']:,}", agree, f"{found['total']:,} bytes in all on each device")


def check_time(plan: Plan, seconds: Sequence[float]) -> Check:
    """Predicted step time beside the median of the measured ones, the first step left out."""
    measured = float(np.median(seconds[1:] or seconds))
    ratio = measured / plan.predicted.step_time_s if plan.predicted.step_time_s else float("inf")
    expected = f"{plan.predicted.step_time_s * 1e3:.3g} ms"
    return Check("time", expected, f"{measured * 1e3:.3g} ms", True, f"{ratio:.2g} times the prediction")
