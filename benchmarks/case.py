"""The child process of `benchmarks.cases`: runs one case as its user would, and compares every leaf with one device.

python -m benchmarks.case describe FILE...     one line of JSON per file: its path and META
python -m benchmarks.case run                  jobs as JSON on standard input, one row of JSON per job on standard output
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import autopar
import cost_models
from autopar.compiler import Compilation, compile_plan, roles_of
from autopar.costs import Pricer
from autopar.errors import AutoparError, CheckError, InfeasibleError
from autopar.intraop.forced import random_plan
from autopar.intraop.price import collectives, leaves
from autopar.ir.mesh import LogicalMesh
from autopar.trace.trace import trace
from benchmarks.cases import Job, Row, row_of

CLUSTERS = {"optimum": "host", "fast-link": "fast-link", "random": "fast-link"}
AXES = ("x", "y", "z", "w")


class Differs(Exception):
    """A result is not that of one device; `worst` is the leaf and its distance in tolerances."""

    def __init__(self, reason: str, worst: tuple[str, float] | None = None):
        super().__init__(reason)
        self.worst = worst


def load(path: str) -> ModuleType:
    """A case file as a module."""
    spec = importlib.util.spec_from_file_location("case_" + Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(job: Job) -> Row:
    """One job's row; whatever is raised becomes its status and reason."""
    begin, meta = time.monotonic(), {}
    try:
        module = load(job.path)
        meta = module.META
        worst = agree(job, module)
    except Differs as error:
        return row_of(job, "differ", str(error), time.monotonic() - begin, worst=error.worst)
    except AutoparError as error:
        status = "error" if isinstance(error, CheckError) else "refused"
        return row_of(job, status, f"{type(error).__name__}: {error}", time.monotonic() - begin, allowed=is_allowed(error, job, meta))
    except Exception as error:
        traceback.print_exc()
        return row_of(job, "error", f"{type(error).__name__}: {error}", time.monotonic() - begin)
    return row_of(job, "agree", "", time.monotonic() - begin, worst=worst)


def is_allowed(error: AutoparError, job: Job, meta: Mapping[str, Any]) -> bool:
    """Whether the case accepts this refusal: by name, or because its own budget holds no more than half of what must be there."""
    if meta.get("refusal_ok"):
        return True
    budget = meta.get("memory_budget_bytes")
    if budget is None or not isinstance(error, InfeasibleError):
        return False
    _, args = load(job.path).make()
    # A step reads its arguments while it writes as much again.
    return 2 * sum(np.asarray(x).nbytes for x in jax.tree.leaves(args)) > budget * job.devices


def agree(job: Job, module: ModuleType) -> tuple[str, float] | None:
    """The worst leaf of a run that agrees with one device. Raises `Differs` otherwise, and whatever autopar raises."""
    meta = module.META
    function, args = module.make()
    options = options_for(job, meta)
    begin = time.monotonic()
    plan = plan_for(job, function, args, options)
    check_planning(time.monotonic() - begin, meta)
    step = autopar.parallelize(function, mesh_for(job), plan=plan, options=options)
    single = jax.jit(function)
    expected = single(*args)
    found = step(*args)
    truth = cache(lambda: in_float64(function, args))
    worst = compare(expected, found, meta, truth=truth)
    check = getattr(module, "check", None)
    if check is not None:
        own_check(check, args, found)
    compare(expected, step(*args), meta, "the second call with the same arguments: ", truth)
    for i in meta.get("donate", ()):
        compare(single(*fed_back(args, i, expected)), step(*fed_back(args, i, found)), meta, "the step on the state returned: ")
    return worst


def options_for(job: Job, meta: Mapping[str, Any]) -> autopar.Options:
    """What the job asks of autopar. Raises `UsageError` for what it does not support yet."""
    options = autopar.Options(memory_bytes=meta.get("memory_budget_bytes"))
    if job.stages > 1:
        options = replace(options, stages=job.stages)
    return replace(options, microbatches=job.microbatches) if job.microbatches > 1 else options


def mesh_for(job: Job) -> Mesh:
    """A mesh of the job's shape over the first devices."""
    return Mesh(np.array(jax.devices()[: job.devices]).reshape(job.mesh), AXES[: len(job.mesh)])


def plan_for(job: Job, function: Callable[..., Any], args: Sequence[Any], options: autopar.Options) -> autopar.Plan:
    """The job's kind of plan on exactly its mesh, priced without measuring this machine."""
    cluster = cost_models.load_cluster(f"{CLUSTERS[job.plan]}:{job.devices}", measure=False)
    mesh = LogicalMesh(AXES[: len(job.mesh)], job.mesh)
    done = compile_plan(Compilation(trace(function, args), cluster, (mesh,), options))
    assert done.plan is not None
    return autopar.Plan(forced(done, mesh, job.seed) if job.plan == "random" and not done.plan.stages else done.plan)


def forced(done: Compilation, mesh: LogicalMesh, seed: int) -> Any:
    """A random legal plan in the place of the chosen one."""
    assert done.plan is not None
    graph, pricer = done.traced.graph, Pricer(done.cluster, mesh)
    sharding = random_plan(graph, done.rules, mesh, done.traced.roles.carried, pricer.move, seed)
    inputs, outputs = leaves(graph, sharding, roles_of(done.traced))
    own = collectives(graph, done.rules, sharding, pricer)
    return replace(done.plan, sharding=sharding, inputs=inputs, outputs=outputs, collectives=own)


def check_planning(seconds: float, meta: Mapping[str, Any]) -> None:
    """Raise when planning took longer than the case allows."""
    if seconds > meta.get("plan_seconds", float("inf")):
        raise TimeoutError(f"planning took {seconds:.0f} s where the case allows {meta['plan_seconds']} s")


def own_check(check: Callable[[Any, Any], None], args: Sequence[Any], found: Any) -> None:
    """The case's own test, on arrays of one device: it may mix results with arguments."""
    try:
        check(args, jax.tree.map(fetched, found))
    except Exception as error:
        traceback.print_exc()
        raise Differs(f"the case's own check raised {type(error).__name__}: {error}") from error


def fetched(leaf: Any) -> Any:
    """An array on the first device alone, other leaves as they are."""
    return jax.device_put(leaf, jax.devices()[0]) if isinstance(leaf, jax.Array) else leaf


def in_float64(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The leaves that one device gives for the same numbers in float64; none where the function does not run so."""
    try:
        with jax.enable_x64(True):
            wide = [jax.tree.map(_widened, a) for a in args]
            return list(map(host, jax.tree.leaves(jax.jit(function)(*wide))))
    except Exception:
        traceback.print_exc()
        return []


def _widened(leaf: Any) -> Any:
    narrow = isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return np.asarray(leaf, np.float64) if narrow else leaf


def is_rounding(truth: np.ndarray, expected: np.ndarray, found: np.ndarray) -> bool:
    """Whether a floating leaf is about as far from the truth as that of one device is: at most twice, and a few last bits."""
    if not jnp.issubdtype(expected.dtype, jnp.floating) or truth.shape != expected.shape or truth.dtype != np.float64:
        return False
    ours, theirs = (np.abs(x.astype(np.float64) - truth) for x in (found, expected))
    bits = 4 * float(jnp.finfo(expected.dtype).eps) * np.max(np.abs(truth), initial=0.0)
    return bool(np.all(np.isfinite(ours)) and np.max(ours, initial=0.0) <= 2 * np.max(theirs, initial=0.0) + bits)


def compare(
    expected: Any, found: Any, meta: Mapping[str, Any], when: str = "", truth: Callable[[], list[Any]] = lambda: []
) -> tuple[str, float] | None:
    """The leaf farthest from what is expected, and its distance in tolerances. Raises `Differs` where a leaf does not agree.

    A leaf beyond its tolerance agrees where it is rounding: as near to the float64 run, `truth`, as one device, or nearly so.
    """
    left, structure = jax.tree_util.tree_flatten_with_path(expected)
    right, other = jax.tree_util.tree_flatten_with_path(found)
    if structure != other:
        raise Differs(f"{when}structure {other} instead of {structure}")
    worst: tuple[str, float] | None = None
    for n, ((path, x), (_, y)) in enumerate(zip(left, right, strict=True)):
        name = jax.tree_util.keystr(path)
        a, b = host(x), host(y)
        if (a.shape, x.dtype) != (b.shape, y.dtype):
            raise Differs(f"{when}{y.dtype}{b.shape} instead of {x.dtype}{a.shape}", (name, float("inf")))
        exact = name in meta.get("exact", ())
        distance = leaf_distance(a, b, 0.0 if exact else meta["rtol"], 0.0 if exact else meta["atol"])
        if not distance <= 1 and not (not exact and truth() and is_rounding(truth()[n], a, b)):
            raise Differs(f"{when}{shown(a, b)}", (name, distance))
        if worst is None or distance > worst[1]:
            worst = name, distance
    return worst


def host(leaf: Any) -> np.ndarray:
    """A leaf's value; a key's data."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def leaf_distance(a: np.ndarray, b: np.ndarray, rtol: float, atol: float) -> float:
    """Greatest `|a - b| / (atol + rtol |a|)`: 0 for equal leaves; integers and the like are equal or infinitely far apart."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else float("inf")
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        distance = np.where(same, 0.0, np.abs(a - b) / (atol + rtol * np.abs(a)))
    return float(np.max(np.where(np.isnan(distance), np.inf, distance), initial=0.0))


def shown(a: np.ndarray, b: np.ndarray) -> str:
    """Where two arrays differ, in words."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        different = np.argwhere(np.atleast_1d(a != b))
        return f"{len(different)} of {a.size} elements differ, the first at {tuple(map(int, different[0]))}" if len(different) else "differ"
    difference = np.abs(a.astype(np.complex128) - b.astype(np.complex128))
    return f"greatest difference {np.nanmax(difference):.3g}, where values are up to {np.nanmax(np.abs(a)):.3g}"


def fed_back(args: Sequence[Any], i: int, out: Any) -> list[Any]:
    """The arguments of the next step: argument i replaced by the part of the result that has its structure, shapes and dtypes."""
    wanted = look(args[i])
    new = next((tree for tree in subtrees(out) if look(tree) == wanted), args[i])
    return [new if k == i else a for k, a in enumerate(args)]


def look(tree: Any) -> Any:
    """Structure, shapes and dtypes."""
    found, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), str(getattr(x, "dtype", type(x)))) for x in found]


def subtrees(tree: Any) -> Iterator[Any]:
    """A tree, its children, theirs, and so on."""
    yield tree
    for _, child in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]:
        if child is not tree:
            yield from subtrees(child)


@contextmanager
def rows_alone() -> Iterator[TextIO]:
    """Standard output for rows; whatever else is printed there goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        yield out


def described(path: str) -> dict[str, Any]:
    """META as far as JSON holds it, or why there is none."""
    try:
        meta = load(path).META
    except Exception as error:
        return {"unusable": f"{type(error).__name__}: {error}"}
    return json.loads(json.dumps(meta, default=str))


def main(arguments: Sequence[str]) -> int:
    """Describe or run, as told."""
    with rows_alone() as out:
        if arguments[0] == "describe":
            for path in arguments[1:]:
                print(json.dumps({"path": path, "meta": described(path)}), file=out, flush=True)
            return 0
        for item in json.loads(sys.stdin.read()):
            row = run(Job(**{**item, "mesh": tuple(item["mesh"])}))
            sys.stderr.flush()
            print(json.dumps(asdict(row)), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
