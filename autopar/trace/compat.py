"""The one file that touches `jax.extend` or private JAX: jaxprs seen through a few plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import source_info_util
from jax._src.interpreters.partial_eval import dce_jaxpr
from jax._src.lax.lax import _convert_element_type
from jax.extend.core.primitives import all_gather_p, psum_p
from jax.extend.random import threefry2x32_p
from jax.interpreters import mlir

_OPENED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
}
_NO_MESH = jax.sharding.AbstractMesh((), ())
_LIBRARIES = ("site-packages", "dist-packages", "autopar/trace/")
LOOPS = frozenset({"scan", "while", "cond"})
CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})


def make_jaxpr(function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], axes: Mapping[str, int] | None = None) -> Any:
    """The closed jaxpr of a function of flat arguments, traced outside of any mesh, or on one of these Auto axes. Nothing is executed."""
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        if not axes:
            return jax.jit(function).trace(*avals).jaxpr
        auto = (jax.sharding.AxisType.Auto,) * len(axes)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), auto)):
            return jax.jit(function).trace(*avals).jaxpr


def without_dead_code(closed: Any) -> Any:
    """A program without what no output depends on, within loops and branches too: their operands that nothing reads go as well."""
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jex.ClosedJaxpr(live, closed.consts)


pin_p = jex.Primitive("pin")
"""A sharding constraint: the identity, with the axes asked for in each dimension (None: any)."""
pin_p.def_impl(lambda x, *, spec: x)
pin_p.def_abstract_eval(lambda x, *, spec: x)
mlir.register_lowering(pin_p, lambda ctx, x, *, spec: [x])


_PLACING: dict[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]] = {
    "sharding_constraint": lambda params: (params["sharding"],),
    "reshard": lambda params: (params["dst_sharding"],),
    "device_put": lambda params: tuple(params["devices"]),
}
"""What says where values are to lie: primitive -> from its parameters, for each operand, where."""
_PER_DEVICE = "shard_map"
_VARYING = frozenset({"pvary"})
"""Identities that only tell JAX's types along which axes a value may differ."""
_SAME_AS = {"psum_invariant": psum_p, "all_gather_invariant": all_gather_p}
"""Collectives that differ from another in type only."""

PER_DEVICE_ONLY = frozenset(
    "unreduced_psum unreduced_pmax unreduced_pmin unreduced_reduce_scatter all_gather_reduced preduced vary_unreduced_cast "
    "reduced_vary_cast psend precv pbroadcast pbroadcast_dynamic ragged_all_to_all".split()
)
"""Collectives of a `shard_map` that neither a plan counts nor a batch of devices runs."""


def _constraint(sharding: Any, ndim: int, free: Sequence[int]) -> tuple[Any, ...] | None:
    """Per dimension the axes that a sharding names, None where it leaves the choice; None where it names none."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    return tuple(
        None if d in free or e is unconstrained else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for d, e in enumerate(entries)
    )


def without_constraints(closed: Any) -> tuple[Any, tuple[str, ...]]:
    """A program with its sharding constraints as pins, off the mesh that it was traced on.

    A `device_put` counts as a constraint where it names axes, and is the identity otherwise. Constraints within loops and branches
    that stay closed, since they have effects, are dropped; their lines are returned.
    """
    if not _constrained(closed.jaxpr, {}) and all(e.ctx.cur_abstract_mesh.empty for e in closed.eqns):
        return closed, ()
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        cleaner = _Cleaner()
        return jex.ClosedJaxpr(cleaner.jaxpr(closed.jaxpr), closed.consts), tuple(dict.fromkeys(cleaner.lines))


def _constrained(jaxpr: Any, known: dict[int, bool]) -> bool:
    """Whether a sharding constraint, a `device_put` or a `shard_map` stands in a jaxpr or in one inside it."""
    if id(jaxpr) not in known:
        known[id(jaxpr)] = False
        known[id(jaxpr)] = any(
            e.primitive.name in _PLACING
            or e.primitive.name == _PER_DEVICE
            or any(_constrained(inner, known) for inner in jex.jaxprs_in_params(e.params))
            for e in jaxpr.eqns
        )
    return known[id(jaxpr)]


@dataclass
class _Cleaner:
    """Rewrites jaxprs; one that is shared stays shared. `depth` counts the closed loops and branches around what is rewritten."""

    done: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    depth: int = 0
    lines: list[str] = field(default_factory=list)

    def jaxpr(self, old: Any) -> Any:
        if id(old) not in self.done:
            env: dict[Any, Any] = {}
            for v in (*old.constvars, *old.invars):
                env[v] = _fresh(v)
            equations = [new for e in old.eqns for new in self.rewritten(e, env)]
            new = old.replace(
                constvars=[env[v] for v in old.constvars],
                invars=[env[v] for v in old.invars],
                outvars=[_read(env, v) for v in old.outvars],
                eqns=equations,
            )
            self.done[id(old)] = (old, new)
        return self.done[id(old)][1]

    def rewritten(self, e: Any, env: dict[Any, Any]) -> list[Any]:
        """What an equation becomes: pins, nothing where it is the identity, or itself."""
        if e.primitive.name in _PLACING:
            return self.pins(e, env)
        if e.primitive.name in _VARYING:
            env.update((r, _read(env, v)) for r, v in zip(e.outvars, e.invars, strict=True))
            return []
        return [self.equation(e, env)]

    def pins(self, e: Any, env: dict[Any, Any]) -> list[Any]:
        """A constraint as a pin for each operand; where it names no axes or stands in a closed loop, results are the operands."""
        found, free = [], e.params.get("unconstrained_dims") or ()
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            context = type(e.ctx)()
        for operand, result, sharding in zip(e.invars, e.outvars, _PLACING[e.primitive.name](e.params), strict=True):
            spec = _constraint(sharding, result.aval.ndim, free)
            env[result] = _read(env, operand)
            if spec is not None and not self.depth:
                pinned = _fresh(result)
                new = {"invars": [env[result]], "outvars": [pinned], "params": {"spec": spec}}
                found.append(e.replace(primitive=pin_p, ctx=context, **new))
                env[result] = pinned
            elif spec is not None or e.primitive.name != "device_put":
                self.lines.append(source_line(e))
        return found

    def equation(self, e: Any, env: dict[Any, Any]) -> Any:
        operands = [_read(env, v) for v in e.invars]
        env.update((v, _fresh(v)) for v in e.outvars)
        inside = opened(e) is None and (e.primitive.name not in LOOPS or bool(e.effects))
        self.depth += inside
        params = {k: self.parameter(v) for k, v in e.params.items()}
        self.depth -= inside
        with e.ctx.manager, jax.sharding.use_abstract_mesh(_NO_MESH):
            context = type(e.ctx)()
        primitive = _SAME_AS.get(e.primitive.name, e.primitive)
        params |= {} if primitive is e.primitive else {"axis_index_groups": None}
        return e.replace(primitive=primitive, invars=operands, outvars=[env[v] for v in e.outvars], params=params, ctx=context)

    def parameter(self, value: Any) -> Any:
        if isinstance(value, jex.ClosedJaxpr):
            return jex.ClosedJaxpr(self.jaxpr(value.jaxpr), value.consts)
        if isinstance(value, jex.Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, jax.sharding.NamedSharding) and isinstance(value.mesh, jax.sharding.AbstractMesh):
            return None
        return tuple(map(self.parameter, value)) if type(value) is tuple else value


@dataclass
class _Rewriter(_Cleaner):
    """Puts functions in the place of equations; `form` gives one by primitive and parameters, None where the equation stays."""

    form: Callable[[str, Mapping[str, Any]], Callable[..., Any] | None] = lambda name, params: None
    sizes: tuple[tuple[str, int], ...] = ()

    def rewritten(self, e: Any, env: dict[Any, Any]) -> list[Any]:
        function = self.form(e.primitive.name, e.params)
        if function is None:
            return [self.equation(e, env)]
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            traced = jax.make_jaxpr(function, axis_env=list(self.sizes))(*(abstract_aval(v.aval) for v in e.invars))
        inner = dict(zip(traced.jaxpr.invars, (_read(env, v) for v in e.invars), strict=True))
        found = [self.equation(new, inner) for new in traced.jaxpr.eqns]
        env.update((r, _read(inner, v)) for r, v in zip(e.outvars, traced.jaxpr.outvars, strict=True))
        return found


def _read(env: dict[Any, Any], atom: Any) -> Any:
    if not is_literal(atom):
        return env[atom]
    value = np.asarray(atom.val) if isinstance(getattr(atom.val, "aval", None), jax.core.ShapedArray) else atom.val
    return jex.Literal(value, _on_no_mesh(atom.aval))  # a typed literal remembers its mesh too


def _fresh(variable: Any) -> Any:
    """A new variable of the same type, on no mesh."""
    aval = _on_no_mesh(variable.aval)
    return jex.DropVar(aval) if isinstance(variable, jex.DropVar) else jex.Var(aval)


def _on_no_mesh(aval: Any) -> Any:
    if not hasattr(aval, "sharding"):
        return aval
    plain = jax.core.ShapedArray((), np.float32)
    varying = {k: getattr(plain, k) for k in ("manual_axis_type",) if hasattr(plain, k)}
    return aval.update(sharding=jax.sharding.NamedSharding(_NO_MESH, jax.sharding.PartitionSpec(*(None,) * aval.ndim)), **varying)


@dataclass
class Writer:
    """A program as it is being written: `equations` over variables, in order."""

    equations: list[Any] = field(default_factory=list)

    def add(self, like: Any, operands: Sequence[Any], shapes: Sequence[Sequence[int]], params: Mapping[str, Any]) -> list[Any]:
        """An equation like another on other operands, with other parameters and results of these shapes; returns them."""
        results = [variable_like(v, shape) for v, shape in zip(like.outvars, shapes, strict=True)]
        self.equations.append(like.replace(invars=list(operands), outvars=results, params=dict(params)))
        return results

    def call(self, function: Callable[..., Any], operands: Sequence[Any], like: Any) -> list[Any]:
        """The equations of a function of these operands, as if they stood where another equation does; returns its results."""
        closed = make_jaxpr(function, [abstract_aval(v.aval) for v in operands])
        env = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for e in closed.jaxpr.eqns:
            env.update((v, jex.Var(v.aval)) for v in e.outvars)
            inside = {"invars": [_read(env, v) for v in e.invars], "outvars": [env[v] for v in e.outvars]}
            self.equations.append(e.replace(source_info=like.source_info, **inside))
        return [_read(env, v) for v in closed.jaxpr.outvars]

    def program(self, inputs: Sequence[Any], outputs: Sequence[Any], like: Any) -> Any:
        """The program of all equations, with the constants of another."""
        jaxpr = like.jaxpr.replace(invars=list(inputs), outvars=list(outputs), eqns=self.equations)
        return jex.ClosedJaxpr(jaxpr, like.consts)


def variable_like(variable: Any, shape: Sequence[int]) -> Any:
    """A new variable of the same type but for its shape."""
    return jex.Var(variable.aval if variable.aval.shape == tuple(shape) else variable.aval.update(shape=tuple(shape)))


def inlined(closed: Any, stays: Callable[[Any], bool]) -> Any:
    """A program with its calls opened: those of jitted functions and custom derivatives, but not checkpoints, nor calls that stay."""
    constants: dict[int, tuple[Any, Any]] = {}
    equations: list[Any] = []

    def run(jaxpr: Any, env: dict[Any, Any], around: Any) -> None:
        for e in jaxpr.eqns:
            here = e.source_info
            if around is not None:
                traceback = here.traceback if source_line(e) else around.traceback
                here = here.replace(name_stack=around.name_stack + here.name_stack, traceback=traceback)
            operands = [_read(env, v) for v in e.invars]
            inner = None if stays(e) or e.primitive.name not in _OPENED or e.primitive.name in CHECKPOINTS else opened(e)
            if inner is None:
                env.update((v, _fresh(v)) for v in e.outvars)
                equations.append(e.replace(invars=operands, outvars=[env[v] for v in e.outvars], source_info=here))
                continue
            within = dict(zip(inner.jaxpr.invars, operands, strict=True))
            for v, c in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                within[v] = constants.setdefault(id(c), (_fresh(v), c))[0]
            run(inner.jaxpr, within, here)
            env.update((v, _read(within, w)) for v, w in zip(e.outvars, inner.jaxpr.outvars, strict=True))

    env = {v: _fresh(v) for v in closed.jaxpr.invars}
    for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        env[v] = constants.setdefault(id(c), (_fresh(v), c))[0]
    run(closed.jaxpr, env, None)
    outputs = [_read(env, v) for v in closed.jaxpr.outvars]
    pairs = list(constants.values())
    jaxpr = closed.jaxpr.replace(
        constvars=[v for v, _ in pairs], invars=[env[v] for v in closed.jaxpr.invars], outvars=outputs, eqns=equations
    )
    return jex.ClosedJaxpr(jaxpr, [c for _, c in pairs])


def accumulators(equation: Any) -> tuple[int, ...]:
    """Of a scan: the carried values to which each step adds something, by position. It reads neither them nor their sums otherwise."""
    inner, consts, carries = scan_parts(equation)
    jaxpr = inner.jaxpr
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    reads = [v for e in jaxpr.eqns for v in e.invars if not is_literal(v)] + [v for v in jaxpr.outvars if not is_literal(v)]
    found = []
    for n, v in enumerate(jaxpr.invars[consts : consts + carries]):
        out = jaxpr.outvars[n]
        e = None if is_literal(out) else made.get(out)
        adds = e is not None and e.primitive.name in ("add", "add_any") and sum(w is v for w in e.invars) == 1
        if adds and all(sum(w is x for w in reads) == 1 for x in (v, out)) and jax.numpy.issubdtype(v.aval.dtype, np.inexact):
            found.append(n)
    return tuple(found)


def opened(equation: Any) -> Any | None:
    """The inner jaxpr of a call that tracing opens (jit, custom_jvp, custom_vjp, checkpoint, linear solves), closed; else None."""
    if equation.primitive.name == "custom_linear_solve":
        return _solve(equation)
    key = _OPENED.get(equation.primitive.name)
    if key is None or key not in equation.params:
        return None
    inner = equation.params[key]
    return inner if hasattr(inner, "jaxpr") else jex.ClosedJaxpr(inner, ())


def _solve(equation: Any) -> Any:
    """The solve itself of a `custom_linear_solve`, as a function of all its operands: the others are for derivatives, which are taken."""
    lengths, jaxprs, operands = equation.params["const_lengths"], equation.params["jaxprs"], equation.invars
    first = lengths.matvec + lengths.vecmat
    last = first + lengths.solve
    given = [*range(first, last), *range(last + lengths.transpose_solve, len(operands))]

    def function(*values: Any) -> list[Any]:
        return list(jex.jaxpr_as_fun(jaxprs.solve)(*(values[k] for k in given)))

    return make_jaxpr(function, [abstract_aval(v.aval) for v in operands])


def run_again(equation: Any) -> tuple[int, ...]:
    """Operands that a checkpointed function reads when backward runs it again, as the user asks: positions in its call there."""
    params = equation.params
    if equation.primitive.name not in CHECKPOINTS or not params.get("differentiated") or not params.get("prevent_cse"):
        return ()
    inner = params["jaxpr"]
    read = {id(v) for e in inner.eqns if "rematted_computation" in name_stack(e) for v in e.invars}
    return tuple(k for k, v in enumerate(inner.invars) if id(v) in read)


def call_name(equation: Any) -> str:
    """Name of the function behind a call equation, as in `jit(gelu)`."""
    return str(equation.params.get("name", ""))


def is_as_written(equation: Any) -> bool:
    """Whether a call runs a function as its author wrote it: derivatives and batched forms keep its name, not those of its arguments."""
    inner = equation.params.get("jaxpr")
    known = getattr(getattr(inner, "jaxpr", inner), "debug_info", None)
    return known is not None and known.arg_names is not None and known.result_paths is not None


def inner_jaxprs(equation: Any) -> tuple[Any, ...]:
    """The closed jaxprs among an equation's parameters: bodies of scan, while and cond. (How a scatter combines two numbers is none.)"""
    found = []
    for name, value in equation.params.items():
        for item in () if name == "update_jaxpr" else value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jex.ClosedJaxpr):
                found.append(item)
            elif isinstance(item, jex.Jaxpr) and not item.constvars:
                found.append(jex.ClosedJaxpr(item, ()))
    return tuple(found)


def broadcast_equation(shape: tuple[int, ...], dtype: str, target: tuple[int, ...], dimensions: tuple[int, ...]) -> Any:
    """An equation of `broadcast_in_dim`, or of a copy where that would change nothing."""
    if shape == target:
        return copy_equation(shape, dtype)
    operand = jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))
    return jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim_p.bind(x, shape=target, broadcast_dimensions=dimensions, sharding=None))(
        operand
    ).eqns[0]


def copy_equation(shape: tuple[int, ...], dtype: str) -> Any:
    """An equation that gives its operand back."""
    return jax.make_jaxpr(jax.lax.copy_p.bind)(jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype))).eqns[0]


def loop_equation(length: int) -> Any:
    """An equation of `scan` of this length."""
    return jax.make_jaxpr(lambda: jax.lax.scan(lambda n, _: (n + 1, None), 0, length=length)[0])().eqns[0]


def struct(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """A graph's aval as JAX writes it; PRNG keys and float0 included."""
    if aval.dtype.startswith("key<"):
        impl = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}[aval.dtype[4:-1]]
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding)
    dtype = jax.dtypes.float0 if aval.dtype == "float0" else jax.numpy.dtype(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=sharding, weak_type=aval.weak_type)


def scalar_zero(dtype: str) -> Any:
    """Zero as a NumPy scalar of this dtype."""
    return np.zeros((), jax.numpy.dtype(dtype))[()]


def scan_parts(equation: Any) -> tuple[Any, int, int]:
    """Of a scan: its body, closed, and the numbers of constants and of carried values."""
    params = equation.params
    if "num_consts" in params:
        return params["jaxpr"], params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return params["jaxpr"], len(consts), len(carried)


def run_once(equation: Any) -> Any:
    """The closed jaxpr of a scan of one step without the loop."""
    inner, consts, carries = scan_parts(equation)
    body, split = jex.jaxpr_as_fun(inner), consts + carries

    def once(*operands: Any) -> list[Any]:
        given = body(*operands[:split], *(jax.lax.squeeze(x, (0,)) for x in operands[split:]))
        return [*given[:carries], *(jax.lax.expand_dims(y, (0,)) for y in given[carries:])]

    return make_jaxpr(once, [abstract_aval(v.aval) for v in equation.invars])


def abstract_aval(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def derived_params(equation: Any) -> tuple[tuple[str, Any], ...]:
    """What else a rule must know: whether random bits are a hash of key and position, so that any part can be made by itself; of a
    `shard_map`, its axes with their sizes, those that cut each dimension of operands and results, and into how many parts in all.
    """
    if equation.primitive.name == _PER_DEVICE:
        sizes, ins, outs = per_device(equation)
        cut = {a for dims in (*ins, *outs) for d in dims for a in d}
        acts = any("IO" in str(e) or "Debug" in str(e) or "Ordered" in str(e) for e in equation.effects)
        return ("axis_sizes", sizes), ("in_dims", ins), ("out_dims", outs), ("parts", prod(n for a, n in sizes if a in cut)), ("acts", acts)
    if equation.primitive.name != "random_bits":
        return ()
    fry = dtype_name(equation.invars[0].aval.dtype) == "key<fry>"
    return (("by_position", fry and bool(getattr(jax.config, "jax_threefry_partitionable", True))),)


def per_device(equation: Any) -> tuple[tuple[tuple[str, int], ...], tuple[Any, ...], tuple[Any, ...]]:
    """Of a `shard_map`: its manual axes with their sizes, and per operand and per result the axes that cut each dimension."""
    params = equation.params
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    sizes = tuple((a, int(n)) for a, n in params["mesh"].shape.items() if manual is None or a in manual)
    ins = tuple(_spec_dims(s, v.aval) for s, v in zip(params["in_specs"], equation.invars, strict=True))
    return sizes, ins, tuple(_spec_dims(s, v.aval) for s, v in zip(params["out_specs"], equation.outvars, strict=True))


def _spec_dims(spec: Any, aval: Any) -> tuple[tuple[str, ...], ...]:
    entries = (*spec, *(None,) * (aval.ndim - len(spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def body_of(equation: Any, form: Callable[[str, Mapping[str, Any]], Callable[..., Any] | None]) -> Callable[..., list[Any]]:
    """The body of a `shard_map` as a function of one device's operands, to be run where its axes have names.

    `form` gives functions to run in the place of some of its primitives, by name and parameters.
    """
    jaxpr = _Rewriter(form=form, sizes=per_device(equation)[0]).jaxpr(equation.params["jaxpr"])
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))


def threefry(key: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The hash of a counter, given as its high and low 32 bits, under a key's two words."""
    first, second = threefry2x32_p.bind(key[0], key[1], high, low)
    return first, second


def has_references(closed: Any) -> bool:
    """Whether a jaxpr takes mutable references."""
    return any(not hasattr(v.aval, "shape") or type(v.aval).__name__ == "AbstractRef" for v in closed.jaxpr.invars)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def name_stack(equation: Any) -> str:
    """The equation's own name stack, `jvp` and `transpose` wrappers included."""
    return str(equation.source_info.name_stack)


def source_line(equation: Any) -> str:
    """`file:line` of the innermost frame that is the user's own, libraries left out where possible; or an empty string."""
    traceback = equation.source_info.traceback
    first = ""
    for frame in source_info_util.user_frames(traceback) if traceback is not None else ():
        line = f"{frame.file_name}:{frame.start_line}"
        if not any(part in frame.file_name for part in _LIBRARIES):
            return line
        first = first or line
    return first


def dtype_name(dtype: Any) -> str:
    """A dtype's name: `float32`, `key<fry>`, `float0`."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def bind(equation: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Apply a traced equation's primitive with other operands and parameters, in its own context; always a list of results."""
    primitive = equation.primitive
    if primitive is pin_p:
        return list(operands)
    params = primitive.get_bind_params(params)
    with equation.ctx.manager:
        out = primitive.bind(*operands, **params)
    return list(out) if primitive.multiple_results else [out]


def with_weak_type(x: Any, weak: bool) -> Any:
    """The same array, weakly typed if so wanted: as the result of `jax.jit` would be, so that calls with it share a program."""
    return _convert_element_type(x, x.dtype, weak_type=True) if weak and not jax.typeof(x).weak_type else x


def with_type_strength(x: Any, weak: bool) -> Any:
    """The same array, weakly typed or not, as asked."""
    return x if jax.typeof(x).weak_type == weak else _convert_element_type(x, x.dtype, weak_type=weak)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array, a NumPy value, a Python scalar or a spec; shardings are dropped."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_array_like(leaf: Any) -> bool:
    """Whether `jax.jit` would trace this leaf."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct))
