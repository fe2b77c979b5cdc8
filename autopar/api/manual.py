"""`manual`: parallelism by name. The user says what each axis of the mesh is for, the integer programme does the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from autopar.api.clusters import ClusterLike, resolve_cluster
from autopar.api.plans import Plan, check_arguments, check_callable, options_or, plan_traced, static_options, timed_trace
from autopar.compiler import Options
from autopar.errors import UsageError
from autopar.ir import options as checks
from autopar.ir.mesh import LogicalMesh
from autopar.ir.restriction import Restriction, Role

ROLES: tuple[Role, ...] = ("replica", "data", "expert", "context", "tensor")
"""Axes of the mesh from the outermost to the innermost: what communicates most often lies on the nearest devices."""
MOST_AXES = 3


def manual(
    function: Callable[..., Any],
    args: Sequence[Any],
    cluster: ClusterLike = None,
    *,
    data: int = 1,
    replica: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    context: int = 1,
    zero: int = 0,
    remat: str = "none",
    sequence_parallel: bool = False,
    microbatches: int = 1,
    schedule: str = "auto",
    interleave: int = 1,
    accumulate: int = 1,
    options: Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    target: str = "",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan `function` at `args` with named parallelism: the numbers of devices along each axis, whose product is the cluster's.

    `data` cuts the batch, `expert` the batch and in their layers the experts, `context` the sequence; devices along these three hold the
    same state, but for what `zero` shares out: nothing (0), the optimiser's state (1), gradients too (2), parameters too (3).
    `replica` cuts the batch as `data` does, and shares nothing out: hierarchical ZeRO is `replica` over nodes with `data` in them.
    `tensor` cuts anything but the batch at ops with parameters, and the sequence only between them, if `sequence_parallel`. Which
    dimensions are the batch and the sequence is read off the arguments that are not state (`Labels`). Within all this the
    programme chooses. The batch runs as `microbatches` times `accumulate` parts, one after the other. `pipeline` stages on equally many
    devices run these in the order of `schedule` (`auto`: the fastest), with as many layers each as is fastest and fits; with `interleave`
    chunks of layers on each, that is `interleaved`. `remat`, and the other `options`, are as in `plan`.

    Raises `UsageError` for sizes that do not fit the cluster, and otherwise what `plan` raises.
    """
    sizes: dict[Role, int] = {"replica": replica, "data": data, "expert": expert, "context": context, "tensor": tensor}
    for name, n in (("pipeline", pipeline), ("microbatches", microbatches), ("accumulate", accumulate), ("interleave", interleave)):
        _check_size(name, n)
    schedule = _schedule(pipeline, schedule, interleave)
    check_callable(function)
    check_arguments(args, kwargs)
    stages = pipeline if pipeline > 1 else "off"
    parts = microbatches * accumulate
    asked = replace(
        options_or(options), remat=remat, zero=checks.zero_level(zero), microbatches=parts, stages=stages, schedule=schedule
    )
    priced, _, _ = resolve_cluster(cluster)
    mesh, restriction = named_mesh(sizes, priced.num_devices, zero, sequence_parallel, pipeline)
    asked = static_options(function, asked)
    traced, seconds = timed_trace(function, args, kwargs or {}, asked, mesh.by_name)
    return plan_traced(traced, priced, (mesh,), asked, target, progress, seconds, restriction, interleave=max(2, interleave))


def named_mesh(
    sizes: Mapping[Role, int], devices: int, zero: Any, sequence_parallel: Any, pipeline: int = 1
) -> tuple[LogicalMesh, Restriction]:
    """The mesh of these axes, those of size one left out, on one of the `pipeline` stages, and what they are for.

    Raises `UsageError` where they make no sense.
    """
    for role, n in sizes.items():
        _check_size(role, n)
    asked: dict[str, int] = {**{str(role): n for role, n in sizes.items()}, "pipeline": pipeline}
    if prod(asked.values()) != devices:
        product = " x ".join(f"{role}={n}" for role, n in asked.items() if n > 1) or "data=1"
        raise UsageError(f"{product} makes {prod(asked.values())} devices, and the cluster has {devices}. Their product must be {devices}.")
    roles = [role for role in ROLES if sizes.get(role, 1) > 1] or ["data"]
    if len(roles) > MOST_AXES:
        raise UsageError(f"at most {MOST_AXES} of {', '.join(ROLES)} may be above 1 together, not {len(roles)}.")
    level = checks.zero_level(zero)
    if isinstance(level, str):
        raise UsageError("zero must be 0, 1, 2 or 3 where parallelism is given by name; `autopar.plan` chooses it.")
    mesh = LogicalMesh(tuple(roles), tuple(sizes[role] for role in roles))
    sequence = checks.flag("sequence_parallel", sequence_parallel)
    return mesh, Restriction(level, tuple((role, role) for role in roles), sequence)


def _check_size(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a whole number, 1 or more, not {value!r}.")


def _schedule(pipeline: int, schedule: str, interleave: int) -> str:
    """The schedule asked for. Raises `UsageError` where it has no stages, or no chunks, to order."""
    if pipeline == 1 and (schedule != "auto" or interleave > 1):
        what = f"schedule={schedule!r}" if schedule != "auto" else f"interleave={interleave}"
        raise UsageError(f"{what} is for pipeline stages, and pipeline=1 makes one. Ask for more, or leave it out.")
    if interleave > 1 and schedule not in ("auto", "interleaved"):
        raise UsageError(f"schedule={schedule!r} has one chunk of layers on each device, not {interleave}. Use schedule='interleaved'.")
    return "interleaved" if interleave > 1 else schedule
