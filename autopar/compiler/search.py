"""The compile for each number of microbatches that is worth it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autopar.compiler.compilation import Compilation
from autopar.compiler.stages import plan_for_any_stages, plan_in_stages
from autopar.compiler.steps import run
from autopar.errors import InfeasibleError, MicrobatchError, SolverError
from autopar.intraop.choose import TooSlow
from autopar.intraop.meshes import REFUSAL_S
from autopar.intraop.solvers.scaled import LARGE_COLUMNS
from autopar.ir.mesh import LogicalMesh
from autopar.trace.roles import batch_leaves


def compile_plan(compilation: Compilation) -> Compilation:
    """Run every step in order, for each number of microbatches that is worth it; the fastest plan is taken."""
    asked = 1 if compilation.restriction is not None and compilation.options.microbatches == "auto" else compilation.options.microbatches
    with without_collector():
        stages = compilation.options.stages
        if isinstance(stages, int) and stages > 1:
            return plan_in_stages(compilation, stages)
        if stages == "auto":
            return plan_for_any_stages(compilation, lambda c: _whole(c, asked))
        return _whole(compilation, asked)


def _whole(c: Compilation, asked: int | str) -> Compilation:
    """A plan in one stage."""
    return run(replace(c, microbatches=asked)) if isinstance(asked, int) else _as_memory_asks(c)


def _as_memory_asks(c: Compilation) -> Compilation:
    """The whole batch at once where it fits as it is; else twice as many microbatches each time, until that is no faster.

    Where nothing fits, what holds least is tried, and if that does not fit either, named by the error.
    """
    best: Compilation | None = None
    tried: list[str] = []
    for count in _counts(c):
        words = "the whole batch at once" if count == 1 else f"{count} microbatches"
        c.progress(words)
        try:
            below = c.below if best is None else best.seconds_per_step
            meshes = c.meshes if best is None else _meshes_after(best)
            found = run(replace(c, meshes=meshes, microbatches=count, below=below, least=False, tried=tuple(tried)))
        except MicrobatchError:
            break
        except TooSlow:
            break  # nor would more microbatches be faster
        except InfeasibleError:
            tried.append(f"{words}: nothing fits")
            if best is not None:
                break
            continue
        except SolverError:  # what was found with fewer microbatches is not lost for want of time
            if best is None:
                raise
            break
        if best is not None and found.seconds_per_step >= best.seconds_per_step:
            break
        best = found
        tried.append(f"{words}: {found.seconds_per_step * 1e3:.4g} ms")
        if not found.makes_again:
            break
    if best is None and c.below is not None:
        raise InfeasibleError("no plan that was looked for fits, or is as fast as what is known.")
    return best or _holding_least(c)


def _meshes_after(best: Compilation) -> tuple[LogicalMesh, ...]:
    """The logical meshes on which more microbatches are tried: of a large program that of the best plan, since each takes minutes."""
    assert best.chosen is not None
    return best.meshes if best.chosen.solve.variables <= LARGE_COLUMNS else (best.chosen.pricer.mesh,)


def _holding_least(c: Compilation) -> Compilation:
    """A plan that only what holds least allows, with as many microbatches as make that less. Raises the least bad `InfeasibleError`."""
    refused: InfeasibleError | None = None
    worse, begin = 0, time.perf_counter()
    for count in _counts(c):
        c.progress(f"what holds least, with {count} microbatches" if count > 1 else "what holds least")
        try:
            return run(replace(c, microbatches=count))
        except MicrobatchError:
            break
        except InfeasibleError as error:
            if refused is None or 0 < error.peak_bytes < refused.peak_bytes:
                refused, worse = error, 0
            else:
                worse += 1  # sums that are kept over microbatches may cost what the first halving saves
            if worse == 2 or not c.least or not error.peak_bytes or time.perf_counter() - begin > REFUSAL_S:
                break
    assert refused is not None
    raise refused


def _counts(c: Compilation) -> Iterator[int]:
    """Numbers of microbatches to try: 1, 2, 4, ..., as far as the batch divides."""
    batch = batch_leaves(c.traced.signature, c.traced.roles, c.traced.graph, c.options.batch_argnums)
    size = c.traced.graph.avals[c.traced.graph.inputs[batch[0]]].shape[0] if batch else 1
    count = 1
    while size % count == 0 and count <= size:
        yield count
        count *= 2


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's cycle collector at rest: it takes a third of planning's time to look through millions of objects that all stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
