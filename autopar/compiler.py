"""The whole compile as one list of named steps, each from one `Compilation` to the next."""

from __future__ import annotations

import fnmatch
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from autopar import costs, rules as rule_table
from autopar.errors import InfeasibleError, MicrobatchError, UsageError
from autopar.intraop.choose import Chosen, Progress, SolveOptions
from autopar.intraop.meshes import Search, choose
from autopar.intraop.price import argument_bytes, collectives, leaves, whole_ops
from autopar.intraop.remat import MODES, Variants
from autopar.intraop.reshard import border_shardings
from autopar.intraop.shape import Shape, shape_of
from autopar.ir import options
from autopar.ir.check import check_graph, check_plan
from autopar.ir.graph import Aval, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan, Predicted, Timings
from autopar.ir.restriction import Restriction
from autopar.ir.rule import ShardingRule
from autopar.ir.serialize import fingerprint, plain
from autopar.ir.sharding import TensorSharding
from autopar.report.fold import fold_ops
from autopar.runtime.program import in_microbatches
from autopar.trace.recompute import recomputed_ops
from autopar.trace.roles import batch_leaves
from autopar.trace.trace import Traced


@dataclass(frozen=True)
class Options:
    """What a user may ask of a plan. Every field has a default that is right for most.

    `memory_bytes` per device overrides `memory_fraction` of the device's memory. `pins` maps a pattern of parameter paths to a
    PartitionSpec (or a NamedSharding, or a tuple of axis names per dimension); a whole path outranks a pattern, patterns that
    match one leaf must agree. `axis_names` names the axes of the logical mesh that is searched. `microbatches` says in how many parts, one
    after the other, the batch runs: a number that divides it, or as many as memory asks for (`auto`); `accumulate_dtype` in what the sums
    of narrow floats over them are kept, `float32` or `as_written`. `batch_argnums` are the arguments that hold the batch, where that is not
    plain. `static_argnums` and
    `static_argnames` are those of `jax.jit`. `donate` lets a step reuse the memory of state that it returned before. `remat` says
    what is made again after forward rather than kept: what memory asks for (`auto`), `none`, all but the results of matmuls with
    weights (`dots`), or all but what crosses the program's narrow places (`full`). `zero` says what may be kept in more parts than it is
    used in, and gathered or scattered for that: nothing (0), the optimiser's state (1), gradients too (2), parameters too (3, as
    `auto`). `reduce_dtype` says in what partial sums of narrow
    floats are reduced: `float32`, or `as_written`. `solver` is `highs` or `pulp`, `time_limit_s` per logical mesh (None: no limit),
    `gap` the relative gap at which an answer counts as optimal. `emitter` is `shard_map` (explicit collectives) or `jit` (sharding
    constraints, the compiler finds the collectives). A value that makes no sense raises
    `UsageError`.
    """

    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    microbatches: int | str = "auto"
    stages: int | str = "off"
    schedule: str = "auto"
    remat: str = "auto"
    zero: int | str = "auto"
    pins: Mapping[str, Any] = field(default_factory=dict)
    axis_names: tuple[str, ...] = ("x", "y", "z")
    batch_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate: bool = True
    reduce_dtype: str = "float32"
    accumulate_dtype: str = "float32"
    pad_state: bool = False
    microbatch_statistics: bool = False
    solver: str = "highs"
    time_limit_s: float | None = 120.0
    gap: float = 1e-4
    emitter: str = "shard_map"

    def __post_init__(self) -> None:
        options.one_of("reduce_dtype", self.reduce_dtype, ("float32", "as_written"))
        options.one_of("accumulate_dtype", self.accumulate_dtype, ("float32", "as_written"))
        options.one_of("remat", self.remat, MODES)
        self._set("microbatches", options.count_or_auto("microbatches", self.microbatches))
        options.one_of("solver", self.solver, ("highs", "pulp"))
        options.one_of("emitter", self.emitter, ("shard_map", "jit"))
        self._set("memory_fraction", options.number("memory_fraction", self.memory_fraction, "a number in (0, 1]", high=1.0, above=True))
        self._set("gap", options.number("gap", self.gap, "a number that is not negative, such as 1e-4"))
        if self.memory_bytes is not None:
            wanted = "a positive number of bytes, such as 40 * 2**30"
            self._set("memory_bytes", int(options.number("memory_bytes", self.memory_bytes, wanted, low=1.0)))
        if self.time_limit_s is not None:
            wanted = "a positive number of seconds, or None for no limit"
            self._set("time_limit_s", options.number("time_limit_s", self.time_limit_s, wanted, above=True))
        options.flag("donate", self.donate)
        self._set("zero", options.zero_level(self.zero))
        self._set("axis_names", options.axis_names(self.axis_names))
        self._set("pins", options.pins(self.pins))
        for name in ("batch_argnums", "static_argnums"):
            self._set(name, options.argument_numbers(name, getattr(self, name)))
        self._set("static_argnames", options.argument_names("static_argnames", self.static_argnames))
        self._not_yet()

    def _set(self, name: str, value: Any) -> None:
        """A field in its one form: of what a user may write, the rest of the compile sees tuples and specs."""
        object.__setattr__(self, name, value)

    def _not_yet(self) -> None:
        """Options of the interface whose passes do not exist yet are refused, never ignored."""
        refused = {
            "stages": (self.stages, ("off", "auto", 1)),
            "schedule": (self.schedule, ("auto",)),
            "pad_state": (self.pad_state, (False,)),
            "microbatch_statistics": (self.microbatch_statistics, (False,)),
        }
        for name, (value, allowed) in refused.items():
            if value not in allowed:
                raise UsageError(f"{name}={value!r} is not supported yet; use {' or '.join(map(repr, allowed))}.")


@dataclass(frozen=True, eq=False)
class Compilation:
    """What is known so far: the steps fill it from top to bottom.

    `fixed` pins inputs by their path beyond `options.pins` (another batch shape keeps the state where it is). `restriction` says what
    the axes of the one mesh are for, if the user does. `least` has a refusal say what would fit, which may take long. `divided` is the
    program that runs the step as `microbatches`; plans whose steps take `below` seconds or more are of no use; `tried` says what was found
    with fewer microbatches.
    """

    traced: Traced
    cluster: Any
    meshes: tuple[LogicalMesh, ...]
    options: Options
    target: str = ""
    fixed: Mapping[str, TensorSharding] = field(default_factory=dict)
    restriction: Restriction | None = None
    least: bool = True
    progress: Progress = lambda text: None
    trace_s: float = 0.0
    microbatches: int = 1
    below: float | None = None
    tried: tuple[str, ...] = ()
    divided: Traced | None = None
    rules: tuple[ShardingRule, ...] = ()
    variants: Variants | None = None
    shape: Shape | None = None
    chosen: Chosen | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    plan: Plan | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


    @property
    def program(self) -> Traced:
        """The program that is planned."""
        return self.divided or self.traced

    @property
    def seconds_per_step(self) -> float:
        """What the chosen plan takes."""
        assert self.chosen is not None
        return self.chosen.price.total_s

    @property
    def makes_again(self) -> bool:
        """Whether the chosen plan recomputes for want of memory."""
        return self.chosen is not None and self.options.remat == "auto" and bool(self.chosen.recomputed)


def microbatch(c: Compilation) -> Compilation:
    """The step as a loop over microbatches."""
    found = in_microbatches(c.traced, c.microbatches, c.options.batch_argnums, c.options.accumulate_dtype)
    return replace(c, divided=found)


def look_up_rules(c: Compilation) -> Compilation:
    """A sharding rule for each op."""
    graph = check_graph(c.program.graph)
    return replace(c, rules=tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops))


def fold(c: Compilation) -> Compilation:
    """Ops to clusters, equal clusters to classes; of the program as it is, and of it with values made again where that is asked for."""
    program = c.program.graph
    pinned = {v: _pin_of(c, name) for v, name in zip(program.inputs, program.input_names, strict=True)}

    def shape(graph: Graph) -> Shape:
        found = c.rules if graph is program else tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops)
        return shape_of(
            graph, found, c.traced.roles.carried, pinned, donated=c.options.donate, restriction=restriction_of(c), batch=batch_of(c)
        )

    return replace(c, variants=Variants(program, shape, c.options.remat))


def restriction_of(c: Compilation) -> Restriction | None:
    """What the user restricts: the roles of axes, or by `zero` alone what may be kept in parts."""
    if c.restriction is not None or c.options.zero == "auto":
        return c.restriction
    return Restriction(int(c.options.zero))


def batch_of(c: Compilation) -> tuple[int, ...] | None:
    """The graph inputs that hold the batch, by position; None where the user does not say."""
    if not c.options.batch_argnums:
        return None
    args, _ = c.traced.signature.rebuild(range(len(c.traced.signature.positions)), with_static=False)
    return tuple(n for k in c.options.batch_argnums if k < len(args) for n in jax.tree.leaves(args[k]))


def intraop(c: Compilation) -> Compilation:
    """Enumerate, price and solve the integer programme on each logical mesh; the fastest plan that fits is chosen."""
    assert c.variants is not None
    limits = SolveOptions(c.options.solver, c.options.time_limit_s, c.options.gap)
    search = Search(
        c.variants,
        c.cluster,
        budget_of(c),
        lambda mesh: input_pins(c, mesh),
        limits,
        c.progress,
        time.perf_counter,
        c.options.reduce_dtype == "as_written",
        c.below,
    )
    chosen, candidates = choose(search, c.meshes, c.least)
    check_plan(chosen.shape.graph, chosen.shape.rules, chosen.plan)
    return replace(c, shape=chosen.shape, rules=chosen.shape.rules, chosen=chosen, candidates=candidates)


def summarise(c: Compilation) -> Compilation:
    """The plan as data, with its predictions."""
    assert c.chosen is not None and c.shape is not None
    graph, chosen = c.shape.graph, c.chosen
    inputs, outputs = leaves(graph, chosen.plan, roles_of(c.program))
    plan = Plan(
        fingerprint_of(c.traced),
        c.target or getattr(c.traced.function, "__name__", ""),
        plain(c.cluster.to_dict()),
        chosen.plan,
        inputs,
        outputs,
        collectives(graph, c.rules, chosen.plan, chosen.pricer),
        whole_ops(graph, c.rules, chosen.plan, chosen.pricer, c.shape.charges, [rule_table.has_rule(op) for op in graph.ops]),
        predict(c),
        chosen.solve,
        Timings(c.trace_s, chosen.enumerate_s + c.seconds.get("fold", 0.0), chosen.solve_s, 0.0, c.trace_s + sum(c.seconds.values())),
        chosen.price.by_kind,
        chosen.live,
        c.candidates,
        plain({k: v for k, v in asdict(c.options).items() if isinstance(v, (str, int, float, bool, tuple, type(None)))}),
        (*_restricted(c), *c.traced.roles.notes, *(c.tried if c.microbatches > 1 else ()), *_made_again(c)),
        jax.__version__,
        microbatches=c.microbatches,
        remat=c.options.remat if chosen.recomputed else "none",
        recomputed=chosen.recomputed,
    )
    return replace(c, plan=plan)


STEPS: tuple[tuple[str, Callable[[Compilation], Compilation]], ...] = (
    ("microbatch", microbatch),
    ("rules", look_up_rules),
    ("fold", fold),
    ("intraop", intraop),
    ("summarise", summarise),
)


def compile_plan(compilation: Compilation) -> Compilation:
    """Run every step in order, for each number of microbatches that is worth it; the fastest plan is taken."""
    asked = 1 if compilation.restriction is not None and compilation.options.microbatches == "auto" else compilation.options.microbatches
    with without_collector():
        if isinstance(asked, int):
            return _run(replace(compilation, microbatches=asked))
        return _as_memory_asks(compilation)


def _run(c: Compilation) -> Compilation:
    for name, step in STEPS:
        begin = time.perf_counter()
        c = step(c)
        c = replace(c, seconds={**c.seconds, name: time.perf_counter() - begin})
    return c


def _as_memory_asks(c: Compilation) -> Compilation:
    """The whole batch at once where it fits as it is; else twice as many microbatches each time, until that is no faster.

    Where nothing fits, the error is that of the whole batch.
    """
    best: Compilation | None = None
    tried: list[str] = []
    for count in _counts(c):
        words = "the whole batch at once" if count == 1 else f"{count} microbatches"
        c.progress(words)
        try:
            below = None if best is None else best.seconds_per_step
            found = _run(replace(c, microbatches=count, below=below, least=False, tried=tuple(tried)))
        except MicrobatchError:
            break
        except InfeasibleError:
            tried.append(f"{words}: nothing fits")
            if best is not None:
                break
            continue
        if best is not None and found.seconds_per_step >= best.seconds_per_step:
            break
        best = found
        tried.append(f"{words}: {found.seconds_per_step * 1e3:.4g} ms")
        if not found.makes_again:
            break
    return best or _run(c)


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


def _restricted(c: Compilation) -> tuple[str, ...]:
    restriction = restriction_of(c)
    return () if restriction is None else (f"planned within limits: {restriction}",)


def _made_again(c: Compilation) -> tuple[str, ...]:
    """What the plan makes again after forward, by place."""
    assert c.chosen is not None and c.shape is not None
    if not c.chosen.recomputed:
        return ()
    return tuple(f"made again after forward: {line}" for line in fold_ops(c.shape.graph, recomputed_ops(c.shape.graph)))


def predict(c: Compilation) -> Predicted:
    """Time, memory and FLOPs of the chosen plan."""
    assert c.chosen is not None and c.shape is not None
    price, work = c.chosen.price, costs.graph_flops(c.traced.graph)
    arguments = argument_bytes(c.shape.graph, c.chosen.plan)
    peak = max(c.chosen.peak_bytes, arguments)
    rate = sum(_peak_flops(c.cluster, dtype) * share for dtype, share in _matmul_dtypes(c).items())
    return Predicted(
        price.total_s,
        price.compute_s + price.copies_s + price.launch_s,
        price.communication_s,
        price.communication_s,
        0.0,
        peak,
        arguments,
        peak - arguments,
        work,
        min(1.0, work / (price.total_s * rate)) if rate and price.total_s else 0.0,
    )


def _matmul_dtypes(c: Compilation) -> dict[str, float]:
    """Share of the matmul FLOPs done in each dtype."""
    found: dict[str, float] = {}
    graph = c.traced.graph
    for op, times in zip(graph.ops, graph.times, strict=True):
        if op.primitive in costs.MATMULS:
            operands = [graph.aval(o) for o in op.operands]
            work = times * costs.flops(op, operands, [graph.avals[r] for r in op.results])
            found[operands[0].dtype] = found.get(operands[0].dtype, 0.0) + work
    total = sum(found.values())
    return {d: w / total for d, w in found.items()} if total else {"float32": 1.0}


def _peak_flops(cluster: Any, dtype: str) -> float:
    return float(cluster.device.peak(dtype)) * cluster.num_devices


def budget_of(c: Compilation) -> float:
    """Bytes that a plan may use on each device."""
    if c.options.memory_bytes is not None:
        return float(c.options.memory_bytes)
    return float(int(c.cluster.device.usable_bytes(c.options.memory_fraction)))


def roles_of(traced: Traced) -> list[str]:
    """`state`, `batch` or `constant` for each graph input. What neither is state nor closed over counts as batch."""
    state = {i for i, _ in traced.roles.carried}
    count = len(traced.graph.inputs) - traced.graph.num_constants
    return ["state" if i in state else "batch" if i < count else "constant" for i in range(len(traced.graph.inputs))]


def fingerprint_of(traced: Traced) -> str:
    """The program's fingerprint: a plan belongs to exactly one."""
    threefry = bool(getattr(jax.config, "jax_threefry_partitionable", True))
    return fingerprint(traced.graph, {"threefry_partitionable": threefry, "carried": traced.roles.carried})


def _pin_of(c: Compilation, name: str) -> str:
    """What pins an input, as text: inputs pinned alike may be folded together."""
    found = [f"{pattern}={spec}" for pattern, spec in _pins_on(c, name)]
    if name in c.fixed:
        found.append(str(c.fixed[name]))
    return ";".join(found)


def _pins_on(c: Compilation, name: str) -> list[tuple[str, Any]]:
    """The pins that count for an input, pattern and spec: the one on its whole path, or else all whose pattern matches."""
    pins = c.options.pins
    return [(name, pins[name])] if name in pins else [(p, spec) for p, spec in pins.items() if _matches(name, p)]


def input_pins(c: Compilation, mesh: LogicalMesh) -> dict[int, tuple[TensorSharding, ...]]:
    """Graph input value -> the shardings that pins leave it. Raises `UsageError` for a pin that cannot hold."""
    graph = c.program.graph
    found: dict[int, tuple[TensorSharding, ...]] = {}
    for v, name in zip(graph.inputs, graph.input_names, strict=True):
        if name in c.fixed:
            found[v] = (c.fixed[name],)
        pinned = {pattern: _pin(pattern, spec, name, graph.avals[v], mesh) for pattern, spec in _pins_on(c, name)}
        if len(set(pinned.values())) > 1:
            raise UsageError(
                f"{name} is pinned in more than one way: {', '.join(f'{p!r} says {s}' for p, s in pinned.items())}. "
                "Give these patterns one spec, or pin the leaf by its whole path, which outranks patterns."
            )
        if pinned:
            found[v] = (next(iter(pinned.values())),)
    _check_used(c.options.pins, graph.input_names)
    return found


def _pin(pattern: str, spec: Any, name: str, aval: Aval, mesh: LogicalMesh) -> TensorSharding:
    """A pin as the sharding of one leaf."""
    pin = sharding_of_spec(spec, aval.ndim)
    if any(a not in mesh.names for a in pin.axes):
        raise UsageError(f"pin {pattern!r} names axis of {spec}, but the mesh has ({mesh}). Set `axis_names` or pass a Mesh.")
    if pin not in border_shardings(aval, mesh):
        raise UsageError(f"pin {pattern!r} to {spec} does not fit {name} {aval} on mesh ({mesh}): a dimension does not divide.")
    return pin


def _check_used(pins: Mapping[str, Any], names: Sequence[str]) -> None:
    unused = [p for p in pins if not any(_matches(name, p) for name in names)]
    if unused:
        known = ", ".join(names[:5])
        raise UsageError(f"no parameter path matches the pins {', '.join(unused)}. Paths look like: {known}.")


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern with `*` and `?`. Paths hold brackets (`params['w']`), which a pattern means literally."""
    return pattern == name or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def sharding_of_spec(spec: Any, ndim: int) -> TensorSharding:
    """A PartitionSpec, or a tuple of axis names per dimension, as a sharding of `ndim` dimensions."""
    entries = options.spec_entries("", spec)
    if len(entries) > ndim:
        raise UsageError(f"PartitionSpec {spec} has more entries than the {ndim} dimensions of what it pins.")
    return TensorSharding(entries + ((),) * (ndim - len(entries)))


def logical_meshes(cluster: Any, axis_names: Sequence[str], max_axes: int = 2) -> tuple[LogicalMesh, ...]:
    """The logical meshes worth searching on a cluster, of one and two axes."""
    shapes = [s for s in cluster.mesh_shapes(max_axes) if len(s) <= len(axis_names)] or [(cluster.num_devices,)]
    return tuple(LogicalMesh(tuple(axis_names[: len(s)]), tuple(s)) for s in shapes)


def smallest_budget(error: InfeasibleError) -> int:
    """Bytes per device at which planning would have succeeded."""
    return error.peak_bytes
