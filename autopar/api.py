"""The public interface: `plan`, `parallelize`, `Plan`, `Cluster`."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

import cost_models
from autopar import rules as rule_table
from autopar.compiler import Compilation, Options, compile_plan, fingerprint_of, logical_meshes
from autopar.emit.manual import Emission, partition_spec
from autopar.errors import ClusterError, PlanError, UsageError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan as PlanData
from autopar.ir.serialize import load_plan, plan_to_dict, save_plan
from autopar.ir.sharding import TensorSharding
from autopar.report import diff as report_diff, explain as report_explain, html as report_html, table as report_table
from autopar.runtime.executor import Executable, Owned, make_mesh
from autopar.runtime.verify import Verification, verify
from autopar.trace.arguments import Signature, split
from autopar.trace.trace import Traced, trace
from cost_models import Cluster

ClusterLike = Cluster | Mesh | str | os.PathLike[str] | None
_PRESET_OF_KIND = (("h200", "h200-sxm"), ("h100", "h100-sxm"), ("b200", "b200-sxm"), ("a100", "a100-80"), ("v100", "v100-p3"))
_PRESET_OF_TPU = (("v5 lite", "v5e"), ("v5e", "v5e"), ("v5p", "v5p"), ("v5", "v5p"), ("v6", "v6e"), ("v4", "v4"), ("v3", "v3"), ("7x", "v7x"))


def _quiet(text: str) -> None:
    """Progress that nobody asked for."""


class Plan:
    """A plan, and where known the program that it is for.

    All fields of the plan data are attributes (`collectives`, `predicted`, `solve`, `mesh_shape`, ...).
    """

    def __init__(self, data: PlanData, traced: Traced | None = None):
        self.data = data
        self._traced = traced

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        save_plan(self.data, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. It is data: nothing in it is run. Raises `PlanError`."""
        return cls(load_plan(path))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data, keyed by attribute name."""
        return plan_to_dict(self.data)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the arguments: a tuple of pytrees like the function's, or by path where the program is not known."""
        specs = [partition_spec(leaf.sharding) for leaf in self.data.inputs]
        if self._traced is None:
            return dict(zip([leaf.path for leaf in self.data.inputs], specs, strict=True))
        args, kwargs = self._traced.signature.rebuild(specs[: len(self._traced.signature.positions)])
        return (*args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the result: a pytree like the function's, or by path where the program is not known."""
        specs = [partition_spec(leaf.sharding) for leaf in self.data.outputs]
        if self._traced is None:
            return dict(zip([leaf.path for leaf in self.data.outputs], specs, strict=True))
        return self._traced.rebuild_output(specs)

    def make_mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """A `jax.sharding.Mesh` for the plan's specs. Raises `MeshError` when there are too few devices."""
        return make_mesh(self.data.mesh, devices)

    def table(self) -> str:
        """The plan as text: what was decided, what it costs, which collectives run and why."""
        return report_table.render(report_table.plan_table(self.data))

    def explain(self, target: str | None = None) -> str:
        """What time and memory go to; with `target`, how the leaves and ops of that path are treated and why."""
        return report_explain.explain(self.data, target)

    def diff(self, other: Plan) -> str:
        """What differs between this plan and `other`."""
        return report_diff.diff(self.data, other.data)

    def html(self) -> str:
        """The plan as a self-contained HTML fragment."""
        return report_html.plan_html(self.data)

    def _repr_html_(self) -> str:
        return self.html()

    def __rich__(self) -> Any:
        return report_table.plan_table(self.data)

    def __repr__(self) -> str:
        p = self.data.predicted
        return f"<autopar.Plan for {self.data.target or 'a function'} on ({self.data.mesh}): {p.step_time_s * 1e3:.3g} ms per step>"

    def verify(self, function: Callable[..., Any], args: Sequence[Any], target: Any = None, steps: int = 3) -> Verification:
        """Run the plan on the devices here beside one device: numbers over `steps` steps, collectives, memory, time.

        Raises `PlanError` when the plan is for another program, `MeshError` when devices are too few.
        """
        if target is not None:
            raise UsageError("verification against a compiler for hardware that is not here is not supported yet: leave out `target`.")
        traced = trace(function, args)
        check_program(self.data, traced)
        leaves, _ = split(args, {})
        executable = _executable(self.data, traced, make_mesh(self.data.mesh), True, "shard_map")
        return verify(self.data, traced, executable, leaves, steps)


def check_program(data: PlanData, traced: Traced) -> None:
    """Raise `PlanError` unless the plan was made for this very program."""
    found = fingerprint_of(traced)
    if data.fingerprint != found:
        theirs = {leaf.path: (leaf.shape, leaf.dtype) for leaf in data.inputs}
        ours = {n: (traced.graph.avals[v].shape, traced.graph.avals[v].dtype) for n, v in _named_inputs(traced)}
        changed = [f"{n}: {theirs.get(n)} in the plan, {ours.get(n)} here" for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
        why = "; ".join(changed[:3]) or "the same arguments, but other operations (or another version of JAX or of the model)"
        raise PlanError(f"the plan belongs to another program: {why}. Plan again for this function and these shapes.")


def _named_inputs(traced: Traced) -> list[tuple[str, int]]:
    return list(zip(traced.graph.input_names, traced.graph.inputs, strict=True))


def resolve_cluster(cluster: ClusterLike) -> tuple[Cluster, tuple[LogicalMesh, ...] | None, Mesh | None]:
    """A cluster with prices, the logical mesh that a JAX mesh fixes (None: search), and that JAX mesh.

    Raises `ClusterError` for a name that no preset has, `MeshError` for a mesh larger than the devices.
    """
    if isinstance(cluster, Cluster):
        return cluster, None, None
    if isinstance(cluster, Mesh):
        logical = LogicalMesh(tuple(map(str, cluster.axis_names)), tuple(cluster.devices.shape))
        return cluster_of_devices(list(cluster.devices.flat)), (logical,), cluster
    if cluster is None:
        return cluster_of_devices(jax.devices()), None, None
    if not isinstance(cluster, (str, os.PathLike)):
        raise UsageError(
            f"a mesh is a jax.sharding.Mesh, an autopar.Cluster, a string such as 'h100-sxm:8x8' or None, not {type(cluster).__name__}."
        )
    try:
        return cost_models.load_cluster(os.fspath(cluster)), None, None
    except cost_models.ClusterError as error:
        raise ClusterError(str(error)) from None


def cluster_of_devices(devices: Sequence[Any]) -> Cluster:
    """The preset for the devices at hand: by kind, one host beside the other; simulated and CPU devices are `host`, measured."""
    kind, count = devices[0].device_kind.lower(), len(devices)
    if devices[0].platform == "cpu":
        return cost_models.load_cluster(f"host:{count}")
    table = _PRESET_OF_TPU if devices[0].platform == "tpu" else _PRESET_OF_KIND
    preset = next((p for word, p in table if word in kind), None)
    if preset is None:
        raise ClusterError(f"no preset for devices of kind {kind!r}. Pass a cluster such as 'h100-sxm:{count}' or a measured profile.")
    return cost_models.load_cluster(f"{preset}:{count}")


def plan(
    function: Callable[..., Any],
    args: Sequence[Any],
    cluster: ClusterLike = None,
    *,
    options: Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    target: str = "",
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan `function` at `args` (arrays or `jax.ShapeDtypeStruct`) for a cluster. Nothing runs, no device is needed.

    `progress` is told what happens, a line at a time. Raises `TraceError` when the function raises, `InfeasibleError` when no plan
    fits the memory, `ClusterError` and `UsageError` for arguments that make no sense.
    """
    check_callable(function)
    options = options or Options()
    priced, meshes, _ = resolve_cluster(cluster)
    traced, seconds = _timed_trace(function, args, kwargs or {}, options)
    meshes = meshes or logical_meshes(priced, options.axis_names)
    compilation = Compilation(traced, priced, meshes, options, target, progress=progress or _quiet, trace_s=seconds)
    done = compile_plan(compilation)
    assert done.plan is not None
    return Plan(done.plan, traced)


def check_callable(function: Any) -> None:
    if not callable(function):
        raise UsageError(f"autopar plans functions, and {type(function).__name__} is not callable: pass the training step itself, not its result.")


def _timed_trace(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> tuple[Traced, float]:
    begin = time.perf_counter()
    traced = trace(function, args, kwargs, options.static_argnums, options.static_argnames)
    return traced, time.perf_counter() - begin


def _executable(data: PlanData, traced: Traced, mesh: Mesh, donate: bool, emitter: str) -> Executable:
    rules = tuple(rule_table.rule_for(op, traced.graph.aval) for op in traced.graph.ops)
    as_written = data.options.get("reduce_dtype") == "as_written"
    return Executable(traced, Emission(traced.graph, traced.program, rules, data.sharding, as_written), mesh, donate, emitter)


class _Program:
    """One signature's plan and, once needed, its executable."""

    def __init__(self, plan: Plan, traced: Traced):
        self.plan, self.traced = plan, traced
        self.executable: Executable | None = None


class ParallelStep:
    """A function that plans itself on its first call for given shapes, then runs as planned.

    Made by `parallelize`. Calls take the function's own arguments and return its own result, laid out on the mesh.
    """

    def __init__(self, function: Callable[..., Any], mesh: ClusterLike, options: Options, plan: Plan | str | os.PathLike[str] | None):
        check_callable(function)
        functools.update_wrapper(self, function, updated=())
        self.function, self.mesh, self.options = function, mesh, options
        self._given = Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        self._programs: dict[Signature, _Program] = {}
        self._owned = Owned()
        self._resolved: tuple[Cluster, tuple[LogicalMesh, ...] | None, Mesh | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, signature = self._split(args, kwargs)
        program = self._program(signature, args, kwargs)
        executable = self._executable(program)
        outputs = executable(leaves, self._owned)
        return program.traced.rebuild_output(self._on_users_mesh(outputs, program))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or specs). Runs nothing."""
        _, signature = self._split(args, kwargs)
        return self._program(signature, args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The program lowered for the devices here, as `jax.jit(f).lower` gives it."""
        _, signature = self._split(args, kwargs)
        return self._executable(self._program(signature, args, kwargs)).lower()

    def init(self, create: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """Run `create(*args)`, which makes the state, with each leaf born in its planned sharding.

        `batch` (arrays or specs; a tuple where the step takes several more arguments) is needed while there is no plan yet.
        """
        state = jax.eval_shape(create, *args)
        program = self._program_for_state(state, batch)
        mesh = self._executable(program).mesh
        specs = program.plan.in_specs[0]
        shardings = jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        made = jax.jit(create, out_shardings=shardings)(*args)
        for leaf in jax.tree.leaves(made):
            self._owned.add(leaf)
        return made

    def replan(self) -> None:
        """Forget the placement: the next call plans afresh and moves the state."""
        self._programs.clear()
        self._given = None

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Signature]:
        return split(args, kwargs, self.options.static_argnums, self.options.static_argnames)

    def _program_for_state(self, state: Any, batch: Any) -> _Program:
        if batch is None and self._programs:
            return next(iter(self._programs.values()))
        if batch is None:
            raise UsageError("init needs the batch (arrays or specs) while the step has no plan: init(create_state, key, batch=batch).")
        rest = batch if isinstance(batch, tuple) else (batch,)
        _, signature = self._split((state, *rest), {})
        return self._program(signature, (state, *rest), {})

    def _program(self, signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Program:
        found = self._programs.get(signature)
        if found is None:
            found = self._programs[signature] = self._plan(args, kwargs)
        return found

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Program:
        traced, seconds = _timed_trace(self.function, args, kwargs, self.options)
        if self._given is not None and not self._programs:
            check_program(self._given.data, traced)
            return _Program(Plan(self._given.data, traced), traced)
        cluster, meshes, _ = self._cluster()
        compilation = Compilation(
            traced,
            cluster,
            self._meshes(cluster, meshes),
            self.options,
            fixed=self._placement(traced),
            progress=_report if sys.stderr.isatty() else _quiet,
            trace_s=seconds,
        )
        done = compile_plan(compilation)
        assert done.plan is not None
        return _Program(Plan(done.plan, traced), traced)

    def _cluster(self) -> tuple[Cluster, tuple[LogicalMesh, ...] | None, Mesh | None]:
        if self._resolved is None:
            self._resolved = resolve_cluster(self.mesh)
        return self._resolved

    def _meshes(self, cluster: Cluster, fixed: tuple[LogicalMesh, ...] | None) -> tuple[LogicalMesh, ...]:
        """The mesh stays what it was for the first shapes, since the state lies on it."""
        if self._programs:
            return (next(iter(self._programs.values())).plan.data.mesh,)
        return fixed or logical_meshes(cluster, self.options.axis_names)

    def _placement(self, traced: Traced) -> dict[str, TensorSharding]:
        """State leaves keep the sharding that the first plan gave them."""
        if not self._programs:
            return {}
        first = next(iter(self._programs.values())).plan.data
        known = {leaf.path: leaf for leaf in first.inputs if leaf.role == "state"}
        names = zip(traced.graph.input_names, (traced.graph.avals[v] for v in traced.graph.inputs), strict=True)
        return {n: known[n].sharding for n, aval in names if n in known and known[n].shape == aval.shape}

    def _executable(self, program: _Program) -> Executable:
        if program.executable is None:
            given = self._cluster()[2] if self._given is None else self.mesh if isinstance(self.mesh, Mesh) else None
            devices = list(given.devices.flat) if given is not None else None
            mesh = make_mesh(program.plan.data.mesh, devices)
            program.executable = _executable(program.plan.data, program.traced, mesh, self.options.donate, self.options.emitter)
        return program.executable

    def _on_users_mesh(self, outputs: Sequence[Any], program: _Program) -> Sequence[Any]:
        """Results on the mesh that the user gave, where that is not simply ours."""
        mesh = self.mesh
        if not isinstance(mesh, Mesh) or program.executable is None or mesh == program.executable.mesh:
            return outputs
        moved = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, partition_spec(leaf.sharding)))
            for x, leaf in zip(outputs, program.plan.data.outputs, strict=True)
        ]
        for x in moved:
            self._owned.add(x)
        return moved


def _report(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr)


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
    if fields:
        options = _with_fields(options or Options(), fields)
    if function is None:
        return lambda f: ParallelStep(f, mesh, options or Options(), plan)
    return ParallelStep(function, mesh, options or Options(), plan)


def _with_fields(options: Options, fields: Mapping[str, Any]) -> Options:
    try:
        return replace(options, **fields)
    except TypeError:
        known = ", ".join(Options.__dataclass_fields__)
        unknown = ", ".join(k for k in fields if k not in Options.__dataclass_fields__)
        raise UsageError(f"unknown option {unknown}. Options are: {known}.") from None


__all__ = ["Cluster", "Options", "ParallelStep", "Plan", "parallelize", "plan", "resolve_cluster"]
