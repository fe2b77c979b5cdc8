"""`parallelize`: a training step that plans itself on its first call, then runs as planned."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.api.clusters import ClusterLike, device_count, logical_mesh, resolve_cluster
from autopar.api.plans import Plan, axes_of, check_callable, check_program, options_or, static_options, timed_trace
from autopar.compiler import Compilation, Options, compile_plan, fingerprint_of, logical_meshes
from autopar.emit.manual import partition_spec
from autopar.errors import AutoparError, InfeasibleError, PlanError, TraceError, UsageError
from autopar.ir.graph import Aval, Constant, Graph, Op, Operand
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Leaf
from autopar.ir.sharding import TensorSharding
from autopar.runtime.executable import AnyExecutable, executable_for
from autopar.runtime.executor import Owned, check_devices, make_mesh, own_settings
from autopar.runtime.pipeline import PipelineExecutable
from autopar.trace.arguments import FlatFunction, Signature, split
from autopar.trace.trace import Traced
from cost_models import Cluster


class _Program:
    """One signature's plan and, once needed, its executable."""

    def __init__(self, plan: Plan, traced: Traced):
        self.plan, self.traced = plan, traced
        self.executable: AnyExecutable | None = None


class ParallelStep:
    """A function that plans itself on its first call for given shapes, then runs as planned.

    Made by `parallelize`. Calls take the function's own arguments and return its own result, laid out on the mesh.
    """

    def __init__(self, function: Callable[..., Any], mesh: ClusterLike, options: Options, plan: Plan | str | os.PathLike[str] | None):
        check_callable(function)
        functools.update_wrapper(self, function, updated=())
        self.function, self.mesh, self.options = function, mesh, static_options(function, options)
        self._given = _given_plan(plan)
        self._programs: dict[Signature, _Program] = {}
        self._owned = Owned()
        self._resolved: tuple[Cluster, tuple[LogicalMesh, ...]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_devices()
        leaves, signature = self._split(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise UsageError(
                "a parallelized step compiles itself and cannot be called inside jit, grad or vmap. Put the transformation inside the "
                "step, or call the plain function there (`step.function`)."
            )
        return self._run(self._program(signature, args, kwargs), leaves)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method, the step takes its instance first."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or specs). Runs nothing."""
        _, signature = self._split(args, kwargs)
        return self._program(signature, args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The program lowered for the devices here, to be inspected or compiled, as with `jax.jit(f).lower`. Arrays or specs."""
        self._check_devices()
        _, signature = self._split(args, kwargs)
        return Lowered(self, signature, self._program(signature, args, kwargs))

    def init(self, create: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """Run `create(*args)`, which makes the state, with each leaf born in its planned sharding.

        The state is the step's first argument, or its first few where `create` returns a tuple of as many. `batch` (arrays or specs; a
        tuple where the step takes several more arguments) is needed while there is no plan yet.

        Arguments of `create` are traced, numbers too; what it needs as Python values, close over. Raises `TraceError` when it raises.
        """
        check_callable(create)
        self._check_devices()
        leaves, signature = split(args, {})
        flat = FlatFunction(create, signature)
        shapes = _shapes_of(flat, leaves)
        program = self._program_for(flat.rebuild(shapes), batch)
        executable = self._executable(program)
        planned = program.plan.data.inputs[: len(shapes)]
        made: list[Any] = [None] * len(planned)
        for mesh, mine in _by_mesh(executable, planned):
            with own_settings(mesh):
                shardings = list(mine.values())
                born = jax.jit(lambda *x, mine=mine: [flat(*x)[k] for k in mine], out_shardings=shardings)(*leaves)
            for k, array in zip(mine, born, strict=True):
                made[k] = array
                self._owned.add(array)
        return flat.rebuild(self._on_users_mesh(made, [leaf.sharding for leaf in planned], executable.mesh))

    def replan(self) -> None:
        """Forget every plan, a given one too: the next call plans afresh, for the same cluster, and moves the state where that says."""
        if self._given is not None:
            self._where()
        self._programs.clear()
        self._given = None

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Signature]:
        return split(args, kwargs, self.options.static_argnums, self.options.static_argnames)

    def _run(self, program: _Program, leaves: Sequence[Any]) -> Any:
        executable = self._executable(program)
        outputs = executable(leaves, self._owned)
        shardings = [leaf.sharding for leaf in program.plan.data.outputs]
        return program.traced.rebuild_output(self._on_users_mesh(outputs, shardings, executable.mesh))

    def _program_for(self, state: Any, batch: Any) -> _Program:
        """The program that a state is for: one that is there, or a new one for this batch."""
        if batch is None:
            for signature, program in self._programs.items():
                if any(_begins_with(signature, first, self._split) for first in _as_arguments(state)):
                    return program
            why = "has no plan for such a state" if self._programs else "has no plan yet"
            raise UsageError(f"the step {why}, so init needs a batch (arrays or specs): init(create_state, key, batch=batch).")
        args = _fitting(self.function, state, batch)
        _, signature = self._split(args, {})
        return self._program(signature, args, {})

    def _program(self, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Program:
        found = self._programs.get(signature)
        if found is None:
            found = self._programs[signature] = self._plan(args, kwargs)
        return found

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Program:
        given = self._given.data if self._given is not None and not self._programs else None
        if given is not None:
            self._check_mesh(given.mesh)
            traced, seconds = timed_trace(self.function, args, kwargs, self.options, given.mesh_shape)
            check_program(given, traced)
            return _Program(Plan(given, traced, self.options), traced)
        cluster, meshes = self._where()
        traced, seconds = timed_trace(self.function, args, kwargs, self.options, axes_of(meshes, self.options))
        twin = self._twin(traced)
        if twin is not None:
            return _Program(Plan(replace(twin.plan.data, fingerprint=fingerprint_of(traced)), traced, self.options), traced)
        progress = _report if sys.stderr.isatty() else _quiet
        placement = self._placement(traced)
        compilation = Compilation(traced, cluster, meshes, self.options, fixed=placement, progress=progress, trace_s=seconds)
        try:
            done = compile_plan(compilation)
        except InfeasibleError as error:
            if not placement:
                raise
            raise _unpinned(error) from error
        assert done.plan is not None
        return _Program(Plan(done.plan, traced, self.options), traced)

    def _twin(self, traced: Traced) -> _Program | None:
        """A program that differs in weak types alone, as after a first step on Python numbers: its plan will do."""
        graph = _strong(traced.graph)
        found = (p for p in self._programs.values() if p.traced.roles == traced.roles and _strong(p.traced.graph) == graph)
        return next(found, None)

    def _where(self) -> tuple[Cluster, tuple[LogicalMesh, ...]]:
        """What to plan for: once there is a program, the mesh stays what it is, since the state lies on it."""
        if self._resolved is None:
            if self._given is not None and self.mesh is None:
                cluster, meshes = Cluster.from_dict(dict(self._given.data.cluster)), None
            else:
                cluster, meshes, _ = resolve_cluster(self.mesh)
            self._resolved = cluster, meshes or logical_meshes(cluster, self.options.axis_names)
        cluster, meshes = self._resolved
        return cluster, tuple(p.plan.data.mesh for p in self._programs.values())[:1] or meshes

    def _placement(self, traced: Traced) -> dict[str, TensorSharding]:
        """State leaves keep the sharding that an earlier plan gave them."""
        known: dict[str, Any] = {}
        for program in self._programs.values():
            for leaf in program.plan.data.inputs:
                if leaf.role == "state":
                    known.setdefault(leaf.path, leaf)
        names = zip(traced.graph.input_names, (traced.graph.avals[v] for v in traced.graph.inputs), strict=True)
        same = {n: known[n] for n, aval in names if n in known and known[n].shape == aval.shape}
        return {n: (leaf.parts or (leaf,))[0].sharding for n, leaf in same.items()}

    def _executable(self, program: _Program) -> AnyExecutable:
        if program.executable is None:
            data = program.plan.data
            mesh = make_mesh(data.mesh, list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else None)
            program.executable = executable_for(data, program.traced, mesh, self.options.donate, self.options.emitter)
        return program.executable

    def _check_devices(self) -> None:
        """Raise `MeshError` before anything is measured or planned, where the step is to run on more devices than there are."""
        if not self._programs and not isinstance(self.mesh, Mesh):
            needed = self._given.data.mesh.num_devices if self._given is not None else device_count(self.mesh)
            check_devices(needed or 0, jax.device_count())

    def _check_mesh(self, planned: LogicalMesh) -> None:
        if not isinstance(self.mesh, Mesh):
            return
        lists_devices = STAGE_AXIS in planned.names and STAGE_AXIS not in self.mesh.axis_names
        if lists_devices and self.mesh.devices.size == planned.num_devices:
            return
        if logical_mesh(self.mesh) != planned:
            raise PlanError(
                f"the plan is for a mesh of ({planned}), and the mesh given has ({logical_mesh(self.mesh)}). "
                "Leave out `mesh`, or plan again for this one."
            )

    def _on_users_mesh(self, arrays: Sequence[Any], shardings: Sequence[TensorSharding], ours: Mesh) -> Sequence[Any]:
        """Arrays on the mesh that the user gave, where that is not simply ours: the same memory under another name."""
        if not isinstance(self.mesh, Mesh) or self.mesh == ours or STAGE_AXIS in ours.axis_names:
            return arrays
        moved = []
        with own_settings(ours):
            for array, sharding in zip(arrays, shardings, strict=True):
                there = NamedSharding(self.mesh, partition_spec(sharding))
                moved.append(jax.device_put(array, there) if isinstance(array, jax.Array) else array)  # float0 lies nowhere
                self._owned.add(moved[-1])
        return moved


class Lowered:
    """A step lowered for the devices here. What `jax.stages.Lowered` has, this has too (`as_text`, `cost_analysis`, ...)."""

    def __init__(self, step: ParallelStep, signature: Signature, program: _Program):
        self._step, self._signature, self._program = step, signature, program
        self._lowered = step._executable(program).lower()

    def compile(self) -> Compiled:
        """The compiled step, to be called with the arguments that it was lowered for."""
        return Compiled(self._step, self._signature, self._program)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lowered, name)


class Compiled:
    """A compiled step. What `jax.stages.Compiled` has, this has too (`as_text`, `memory_analysis`, ...).

    Called with other shapes than it was compiled for, it raises `UsageError`.
    """

    def __init__(self, step: ParallelStep, signature: Signature, program: _Program):
        self._step, self._signature, self._program = step, signature, program
        self._compiled = step._executable(program).compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, signature = self._step._split(args, kwargs)
        if signature != self._signature:
            raise UsageError("the step was compiled for another tree, other shapes or other dtypes. Call the step itself, which adapts.")
        return self._step._run(self._program, leaves)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._compiled, name)


def _by_mesh(executable: AnyExecutable, leaves: Sequence[Leaf]) -> list[tuple[Mesh, dict[int, NamedSharding]]]:
    """The meshes on which leaves lie, each with those that lie there, by position."""
    found: dict[Mesh, dict[int, NamedSharding]] = {}
    for k, leaf in enumerate(leaves):
        if isinstance(executable, PipelineExecutable) and k in executable.spread_inputs:
            mesh, home = executable.spread_inputs[k].mesh, executable.spread_inputs[k].home
        else:
            mesh = executable.stages[leaf.stage].mesh if isinstance(executable, PipelineExecutable) else executable.mesh
            home = NamedSharding(mesh, partition_spec(leaf.sharding))
        found.setdefault(mesh, {})[k] = home
    return list(found.items())


def _unpinned(error: InfeasibleError) -> InfeasibleError:
    """The error with one more way out: the state need not stay where the first shapes put it."""
    way_out = "Let the state move with `step.replan()`, which plans for these shapes alone."
    return InfeasibleError(
        f"{error} The state lies where an earlier plan put it. {way_out}",
        peak_bytes=error.peak_bytes,
        budget_bytes=error.budget_bytes,
        live=error.live,
        suggestions=(*error.suggestions, way_out),
    )


def _strong(graph: Graph) -> Graph:
    """The graph without weak types."""

    def aval(a: Aval) -> Aval:
        return replace(a, weak_type=False) if a.weak_type else a

    def operand(o: Operand) -> Operand:
        return replace(o, aval=aval(o.aval)) if isinstance(o, Constant) else o

    def op(o: Op) -> Op:
        params = tuple(p for p in o.params if p[0] != "weak_type")
        operands, inner = tuple(map(operand, o.operands)), tuple(map(_strong, o.subgraphs))
        return replace(o, params=params, operands=operands, subgraphs=inner, equation=0)

    return replace(graph, avals=tuple(map(aval, graph.avals)), ops=tuple(map(op, graph.ops)), outputs=tuple(map(operand, graph.outputs)))


def _as_arguments(state: Any) -> list[tuple[Any, ...]]:
    """A state as the step's first argument, or a plain tuple as its first few."""
    return [(state,), state] if type(state) is tuple and state else [(state,)]


def _begins_with(signature: Signature, first: tuple[Any, ...], split_arguments: Callable[..., Any]) -> bool:
    """Whether a call's first arguments look like `first`."""
    _, mine = split_arguments(first, {})
    args, _ = signature.rebuild(range(len(signature.positions)))
    found = jax.tree.structure(args[: len(first)]), signature.avals[: len(mine.avals)]
    return found == (jax.tree.structure(mine.rebuild(range(len(mine.positions)))[0]), mine.avals)


def _shapes_of(create: FlatFunction, leaves: Sequence[Any]) -> Any:
    """Shapes of the state that a function creates. Raises `TraceError` when it raises, with its error as the cause."""
    try:
        return jax.eval_shape(create, *leaves)
    except AutoparError:
        raise
    except Exception as error:
        name = getattr(create.function, "__name__", "the function")
        raise TraceError(
            f"`{name}`, which creates the state, raised {type(error).__name__} while it was traced: {error}\n"
            "It runs under jax.jit, so its arguments are traced. What it needs as a Python value (a size, a flag) it should close over: "
            "init(lambda key: create(key, 8), key)."
        ) from error


def _fitting(function: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, ...]:
    """The step's arguments of a state and a batch, tuples spread where the function takes as many."""
    rests = [batch, (batch,)] if type(batch) is tuple else [(batch,)]
    options = [(*first, *rest) for first in _as_arguments(state) for rest in rests]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return options[0]
    empty = inspect.Parameter.empty
    required = [p for p in signature.parameters.values() if p.default is empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    exact = [o for o in options if len(o) == len(required) and _binds(signature, o)]
    fitting = exact or [o for o in options if _binds(signature, o)]
    if not fitting:
        raise UsageError(
            f"`{getattr(function, '__name__', 'the step')}{signature}` can be called neither with the state and the batch as they are "
            "nor spread: `batch` is the step's second argument, or a tuple of all after the state."
        )
    return fitting[0]


def _binds(signature: inspect.Signature, args: tuple[Any, ...]) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _given_plan(plan: Any) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    raise UsageError(f"`plan` is an autopar.Plan or the path of one, not {type(plan).__name__}.")


def _report(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr)


def _quiet(text: str) -> None:
    """Progress that nobody sees."""


def parallelize(
    function: Callable[..., Any] | None = None,
    mesh: ClusterLike = None,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    options: Options | None = None,
    **fields: Any,
) -> Any:
    """Parallelise a training step: `parallelize(step, mesh)`, `@parallelize` or `@parallelize(mesh=mesh)`.

    `mesh` is a `jax.sharding.Mesh`, a `Cluster`, a string such as `"h100-sxm:8"`, or None for all devices. `plan` is a plan, or the
    path of one, to run instead of solving. Further keywords are fields of `Options` (`donate=False`, `memory_bytes=...`).
    """
    asked = _with_fields(options_or(options), fields)
    if function is None:
        return lambda f: ParallelStep(f, mesh, asked, plan)
    return ParallelStep(function, mesh, asked, plan)


def _with_fields(options: Options, fields: Mapping[str, Any]) -> Options:
    known = list(Options.__dataclass_fields__)
    unknown = [k for k in fields if k not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(f"unknown option {', '.join(unknown)}. {hint}Options are: {', '.join(known)}.")
    return replace(options, **fields)
