"""`plan` and `Plan`: what was decided, and the program that it is for."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

import cost_models
from autopar import rules
from autopar.api.clusters import ClusterLike, resolve_cluster
from autopar.compiler import Compilation, Options, compile_plan, fingerprint_of, logical_meshes, without_collector
from autopar.costs import Pricer, fusion_charges
from autopar.emit.manual import partition_spec
from autopar.errors import PlanError, UsageError
from autopar.intraop.clusters import is_elementwise
from autopar.ir.check import check_plan
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan as PlanData
from autopar.ir.restriction import Restriction
from autopar.ir.serialize import load_plan, plan_to_dict, save_plan
from autopar.report import diff as report_diff, explain as report_explain, html as report_html, table as report_table
from autopar.report.perfetto import perfetto_json, stages_json
from autopar.report.timeline import timeline
from autopar.runtime.executable import executable_for
from autopar.runtime.executor import make_mesh
from autopar.runtime.foreign import COMPILERS, verify_foreign
from autopar.runtime.program import planned, planned_stages
from autopar.runtime.verify import Verification, verify
from autopar.trace.arguments import split
from autopar.trace.trace import Traced, trace
from cost_models import Cluster

_AGAIN = "Plan again, or take an intact copy of the plan's file."


def _quiet(text: str) -> None:
    """Progress that nobody asked for."""


class Plan:
    """A plan, and where known the program that it is for.

    All fields of the plan data are attributes (`collectives`, `predicted`, `solve`, `mesh_shape`, ...).
    """

    def __init__(self, data: PlanData, traced: Traced | None = None, options: Options | None = None):
        self.data = data
        self._traced = traced
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.data == other.data

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Raises `PlanError` for a place that cannot be written."""
        _check_path(path)
        try:
            save_plan(self.data, path)
        except OSError as error:
            raise PlanError(f"the plan cannot be written to {os.fspath(path)}: {error.strerror or error}. Give a path that can.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. It is data: nothing in it is run. Raises `PlanError`."""
        _check_path(path)
        data = load_plan(path)
        _check_settings(data, os.fspath(path))
        return cls(data)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data, keyed by attribute name."""
        return plan_to_dict(self.data)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the arguments, as `jax.jit` takes them: a tuple of pytrees like the function's, static ones left out; keyword
        arguments, if any, come last as a mapping. By path where the program is not known."""
        specs = [partition_spec(leaf.sharding) for leaf in self.data.inputs]
        if self._traced is None:
            return dict(zip([leaf.path for leaf in self.data.inputs], specs, strict=True))
        args, kwargs = self._traced.signature.rebuild(specs[: len(self._traced.signature.positions)], with_static=False)
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
        """What differs between this plan and `other`. Raises `UsageError` for what is no plan."""
        if not isinstance(other, Plan):
            raise UsageError(f"a plan is compared with another autopar.Plan, not {_a(other)}. `Plan.load` reads one that was saved.")
        return report_diff.diff(self.data, other.data)

    def html(self) -> str:
        """The plan as a self-contained HTML fragment."""
        return report_html.plan_html(self.data)

    def perfetto(self) -> str:
        """The predicted step as trace-event JSON for Perfetto (https://ui.perfetto.dev) or chrome://tracing: ops by phase, collectives by
        axis, and the memory of one device; of a plan in stages, the tasks of each group of devices and what crosses between them.
        Raises `PlanError` for a plan that was read from a file and does not know its program.
        """
        if self.data.stages:
            return stages_json(self.data)
        if self._traced is None:
            raise PlanError("a timeline shows the program's ops, which a plan's file does not hold. Take the plan that `plan` returns.")
        carried = self._traced.roles.carried
        graph = planned(self._traced, self.data).graph
        found = tuple(rules.rule_for(op, graph.aval) for op in graph.ops)
        charges = fusion_charges(graph, [is_elementwise(r) for r in found])
        as_written = self.data.options.get("reduce_dtype") == "as_written"
        pricer = Pricer(Cluster.from_dict(dict(self.data.cluster)), self.data.mesh, as_written)
        return perfetto_json(self.data, timeline(self.data, graph, found, charges, pricer, carried))

    def _repr_html_(self) -> str:
        return self.html()

    def __rich__(self) -> Any:
        return report_table.plan_table(self.data)

    def __repr__(self) -> str:
        p = self.data.predicted
        return f"<autopar.Plan for {self.data.target or 'a function'} on ({self.data.mesh}): {p.step_time_s * 1e3:.3g} ms per step>"

    def verify(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        target: Any = None,
        steps: int = 3,
        *,
        kwargs: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> Verification:
        """Run the plan on the devices here beside one device: numbers over `steps` steps, collectives, memory, time.

        With `target` (`tpu` or `cuda`) that compiler compiles the program for the plan's cluster instead, and nothing runs.
        `options` are those of the planning; a plan that was just made remembers them. Raises `PlanError` when the plan is for another
        program, `MeshError` when devices are too few.
        """
        if target is not None and target not in COMPILERS:
            raise UsageError(f"there is no compiler {target!r} to verify with; there are {' and '.join(COMPILERS)}.")
        check_arguments(args, kwargs)
        options = static_options(function, options_or(options, self._options))
        traced, _ = timed_trace(function, args, kwargs or {}, options, self.data.mesh_shape)
        check_program(self.data, traced)
        if target is not None:
            return verify_foreign(self.data, traced, target, options.donate)
        leaves, _ = split(args, kwargs or {}, options.static_argnums, options.static_argnames)
        executable = executable_for(self.data, traced, make_mesh(self.data.mesh), True, options.emitter)
        return verify(self.data, traced, executable, leaves, steps)


def _check_settings(data: PlanData, path: str) -> None:
    """Raise `PlanError` where the options or the cluster of a plan make no sense."""
    known = {name: value for name, value in data.options.items() if name in Options.__dataclass_fields__}
    for what, read in (("options", lambda: Options(**known)), ("cluster", lambda: Cluster.from_dict(dict(data.cluster)))):
        try:
            read()
        except (UsageError, cost_models.ClusterError) as error:
            raise PlanError(f"{path}: plan.{what}: {error} {_AGAIN}") from error


def check_program(data: PlanData, traced: Traced) -> None:
    """Raise `PlanError` unless the plan was made for this very program."""
    found = fingerprint_of(traced)
    if data.fingerprint != found:
        theirs = {leaf.path: (leaf.shape, leaf.dtype) for leaf in data.inputs}
        ours = {n: (traced.graph.avals[v].shape, traced.graph.avals[v].dtype) for n, v in _named_inputs(traced)}
        changed = [f"{n}: {theirs.get(n)} in the plan, {ours.get(n)} here" for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
        why = "; ".join(changed[:3]) or (
            "the same arguments, but other operations (or another version of JAX or of the model, or Python numbers for arrays)"
        )
        raise PlanError(f"the plan belongs to another program: {why}. Plan again for this function and these shapes.")
    try:
        if data.stages:
            _check_stages(data, traced)
            return
        program = planned(traced, data)
    except PlanError as error:
        raise PlanError(f"{error} {_AGAIN}") from error
    _check_whole(data, program.graph)


def _check_stages(data: PlanData, traced: Traced) -> None:
    """Raise `PlanError` where a plan in stages does not hold together."""
    planned_stages(traced, data)
    expected = (*traced.graph.input_names, *traced.graph.output_names)
    if expected != tuple(leaf.path for leaf in (*data.inputs, *data.outputs)):
        raise PlanError("the inputs and outputs that the plan lists are not those of its program.")


def _check_whole(data: PlanData, graph: Graph) -> None:
    """Raise `PlanError` where a plan for this graph does not hold together."""
    try:
        check_plan(graph, tuple(rules.rule_for(op, graph.aval) for op in graph.ops), data.sharding)
    except PlanError as error:
        raise PlanError(f"the plan does not fit its program: {error} {_AGAIN}") from error
    expected = zip((*graph.input_names, *graph.output_names), (*data.sharding.inputs, *data.sharding.outputs), strict=True)
    if list(expected) != [(leaf.path, leaf.sharding) for leaf in (*data.inputs, *data.outputs)]:
        raise PlanError(f"the inputs and outputs that the plan lists are not those of its program, or lie otherwise. {_AGAIN}")


def _named_inputs(traced: Traced) -> list[tuple[str, int]]:
    return list(zip(traced.graph.input_names, traced.graph.inputs, strict=True))


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
    check_arguments(args, kwargs)
    options = static_options(function, options_or(options))
    priced, meshes, _ = resolve_cluster(cluster)
    meshes = meshes or logical_meshes(priced, options.axis_names)
    traced, seconds = timed_trace(function, args, kwargs or {}, options, axes_of(meshes, options))
    return plan_traced(traced, priced, meshes, options, target, progress, seconds)


def plan_traced(
    traced: Traced,
    cluster: Cluster,
    meshes: tuple[LogicalMesh, ...],
    options: Options,
    target: str = "",
    progress: Callable[[str], None] | None = None,
    trace_s: float = 0.0,
    restriction: Restriction | None = None,
    least: bool = True,
    interleave: int = 2,
) -> Plan:
    """The plan of a function that is traced already, the best over `meshes`. `least` has a refusal say what would fit."""
    asked = Compilation(
        traced,
        cluster,
        meshes,
        options,
        target,
        restriction=restriction,
        interleave=interleave,
        least=least,
        progress=progress or _quiet,
        trace_s=trace_s,
    )
    done = compile_plan(asked)
    assert done.plan is not None
    return Plan(done.plan, traced, options)


def check_callable(function: Any) -> None:
    """Raise `UsageError` for what is no function, or one whose call does not run its body."""
    looks_like_mesh = isinstance(function, (str, os.PathLike, Mesh, Cluster))  # a Mesh can be called, as a decorator
    if looks_like_mesh or not callable(function):
        way_out = "write `parallelize(mesh=...)`" if looks_like_mesh else "pass the training step itself, not its result"
        raise UsageError(f"autopar plans functions, and {type(function).__name__} is not callable: {way_out}.")
    if any(test(function) for test in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)):
        name = getattr(function, "__name__", repr(function))
        raise UsageError(f"`{name}` is a generator or a coroutine: a call does not run its body. Return the results from a plain function.")


def check_arguments(args: Any, kwargs: Any = None) -> None:
    """Raise `UsageError` unless `args` is a tuple or list, the step's arguments one by one, and `kwargs` a mapping or None."""
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"`args` is the tuple of the step's arguments, not {_a(args)}: write plan(function, (state, batch), ...).")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(f"`kwargs` maps names of arguments to their values, not {_a(kwargs)}.")


def options_or(options: Options | None, otherwise: Options | None = None) -> Options:
    """The options given, else others. Raises `UsageError` for what are no options."""
    if options is None:
        return otherwise or Options()
    if not isinstance(options, Options):
        way_out = "pass autopar.Options(**options)" if isinstance(options, Mapping) else "pass autopar.Options(...)"
        raise UsageError(f"`options` is an autopar.Options, not {_a(options)}: {way_out}.")
    return options


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"a path is a string or an os.PathLike, not {_a(path)}.")


def _a(value: Any) -> str:
    """A value's type in a sentence."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def timed_trace(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, axes: Mapping[str, int]
) -> tuple[Traced, float]:
    """The traced function, and the seconds that tracing took."""
    begin = time.perf_counter()
    with without_collector():
        traced = trace(function, args, kwargs, options.static_argnums, options.static_argnames, axes)
    return traced, time.perf_counter() - begin


def axes_of(meshes: Sequence[LogicalMesh], options: Options) -> dict[str, int]:
    """The mesh axes that a function may name: those of the one mesh; while sizes are searched, all names, of size 1."""
    return meshes[0].by_name if len(meshes) == 1 else dict.fromkeys(options.axis_names, 1)


def static_options(function: Callable[..., Any], options: Options) -> Options:
    """Options with static arguments by number and by name, each following from the other as in `jax.jit`.

    Raises `UsageError` for an argument that the function does not have.
    """
    numbers, names = options.static_argnums, options.static_argnames
    if not numbers and not names and not options.batch_argnums:
        return options
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return options
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = tuple(n + len(places) if n < 0 else n for n in numbers)
    batch = tuple(n + len(places) if n < 0 else n for n in options.batch_argnums)
    _check_numbers("static_argnums", function, numbers, parameters, len(places))
    _check_numbers("batch_argnums", function, batch, parameters, len(places))
    _check_names(function, names, parameters)
    by_name = [i for i, p in enumerate(places) if p.name in names]
    by_number = [places[n].name for n in numbers if n < len(places) and places[n].kind is places[n].POSITIONAL_OR_KEYWORD]
    return replace(options, static_argnums=tuple(sorted({*numbers, *by_name})), static_argnames=tuple(sorted({*names, *by_number})))


def _check_numbers(option: str, function: Any, numbers: Sequence[int], parameters: Sequence[inspect.Parameter], count: int) -> None:
    spread = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for n in numbers:
        if n < 0 or (n >= count and not spread):
            known = ", ".join(p.name for p in parameters)
            raise UsageError(f"{option} has {n}, but `{_called(function)}` takes {count} positional arguments: {known}.")


def _check_names(function: Any, names: Sequence[str], parameters: Sequence[inspect.Parameter]) -> None:
    known = [p.name for p in parameters]
    for name in names:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            called = _called(function)
            raise UsageError(f"static_argnames has {name!r}, which `{called}` does not take. Its arguments are {', '.join(known)}.")


def _called(function: Any) -> str:
    return getattr(function, "__name__", "the function")
