"""Run one op part by part, as devices would, and put its results together again. Only an op with collectives of its own needs devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from autopar.emit.collectives import axis_index
from autopar.emit.lower import Place, lower
from autopar.ir.graph import Aval, Constant, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy, is_legal, operand_sharding, result_sharding
from autopar.rules import rule_for
from autopar.rules.inside import inside
from autopar.trace import compat
from autopar.trace.normalise import normalise_params

MESH = LogicalMesh(("x", "y"), (2, 2))
_UNITS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "and": np.logical_and, "or": np.logical_or}


@dataclass(frozen=True, eq=False)
class Case:
    """One equation with its global operands and results. Keys are held as their key data."""

    op: Op
    equation: Any
    avals: tuple[Aval, ...]
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @property
    def avals_in(self) -> tuple[Aval, ...]:
        return self.avals[: len(self.operands)]

    @property
    def avals_out(self) -> tuple[Aval, ...]:
        return self.avals[len(self.operands) :]

    @property
    def rule(self) -> ShardingRule:
        return rule_of(self.op, self.avals)

    @property
    def key(self) -> tuple:
        """Two cases with equal keys test the same thing: rule, dtypes and parameters other than shapes are the same."""
        plain = (bool, str, type(None))
        params = tuple((k, str(v)) for k, v in self.op.params if isinstance(v, plain) or "count" in k or "dilation" in k)
        return self.op.primitive, params, str(self.rule), self.rule.methods, self.rule.passes, tuple(a.dtype for a in self.avals)


def cases(function: Callable, *arguments: Any) -> list[Case]:
    """Every equation of `function`, calls opened, with the values it has for these arguments. Compiled in one go."""
    closed = jax.make_jaxpr(function)(*arguments)
    equations: list[Any] = []

    def everything(*leaves: Any) -> list[tuple[list[Any], list[Any]]]:
        found: list[tuple[Any, list[Any], list[Any]]] = []
        _evaluate(closed, leaves, found)
        equations.extend(e for e, _, _ in found)
        return [(operands, results) for _, operands, results in found]

    values = jax.jit(everything)(*jax.tree.leaves(arguments))
    return [_case(e, operands, results) for e, (operands, results) in zip(equations, values, strict=True)]


def ops(function: Callable, *arguments: Any) -> list[tuple[Op, tuple[Aval, ...]]]:
    """Every op of `function`, calls opened, with the avals of operands and results. Nothing is computed."""
    return list(_ops(jax.make_jaxpr(function)(*arguments)))


def _ops(closed: Any) -> Iterator[tuple[Op, tuple[Aval, ...]]]:
    for equation in closed.jaxpr.eqns:
        inner = compat.opened(equation)
        if inner is None:
            yield _op(equation)
        else:
            yield from _ops(inner)


def rule_of(op: Op, avals: tuple[Aval, ...]) -> ShardingRule:
    """The rule of an op whose values are numbered as `avals`."""
    return rule_for(op, lambda o: o.aval if isinstance(o, Constant) else avals[o])


def _evaluate(closed: Any, arguments: Sequence[Any], found: list[tuple[Any, list[Any], list[Any]]]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return jnp.asarray(atom.val, atom.aval.dtype) if compat.is_literal(atom) else env[atom]

    for equation in closed.jaxpr.eqns:
        operands = [read(a) for a in equation.invars]
        inner = compat.opened(equation)
        if inner is not None:
            results = _evaluate(inner, operands, found)
        else:
            results = compat.bind(equation, operands, dict(equation.params))
            found.append((equation, operands, results))
        env |= dict(zip(equation.outvars, results, strict=True))
    return [read(a) for a in closed.jaxpr.outvars]


def _op(equation: Any) -> tuple[Op, tuple[Aval, ...]]:
    avals = tuple(Aval(tuple(v.aval.shape), compat.dtype_name(v.aval.dtype)) for v in (*equation.invars, *equation.outvars))
    names = [Constant(avals[n], str(a.val)) if compat.is_literal(a) else n for n, a in enumerate(equation.invars)]
    results = tuple(range(len(names), len(avals)))
    return Op(equation.primitive.name, normalise_params(equation.params) + compat.derived_params(equation), tuple(names), results), avals


def _case(equation: Any, operands: Sequence[Any], results: Sequence[Any]) -> Case:
    op, avals = _op(equation)
    return Case(op, equation, avals, tuple(map(_data, operands)), tuple(map(_data, results)))


def strategies(rule: ShardingRule, rng: np.random.Generator, randoms: int = 3, mesh: LogicalMesh = MESH) -> list[Strategy]:
    """Each factor and each pass over x alone, then random legal strategies over all axes."""
    single = [Strategy(((f, ("x",)),)) for f in rule.factors] + [Strategy((), (("x", n),)) for n in range(len(rule.passes))]
    both = [s for s in (random_strategy(rule, rng, mesh) for _ in range(randoms)) if not s.is_whole]
    return [s for s in dict.fromkeys([*single, *both]) if is_legal(rule, s, mesh) and _one_kind(rule, s)]


def covering(rule: ShardingRule, rng: np.random.Generator, mesh: LogicalMesh = MESH) -> list[Strategy]:
    """Each factor and each pass once, two at a time on two axes where that is legal, then one random strategy."""
    left, chosen = strategies(rule, rng, 0, mesh), []
    while left:
        first = left.pop(0)
        pairs = [(n, _both(first, second)) for n, second in enumerate(left)]
        fitting = [(n, s) for n, s in pairs if is_legal(rule, s, mesh) and _one_kind(rule, s)]
        chosen.append(fitting[0][1] if fitting else first)
        if fitting:
            left.pop(fitting[0][0])
    return list(dict.fromkeys([*chosen, *strategies(rule, rng, 1, mesh)[len(strategies(rule, rng, 0, mesh)) :]]))


def _both(first: Strategy, second: Strategy) -> Strategy:
    """Two strategies over x, the second moved to y."""
    cuts = (*first.cuts, *((f, ("y",)) for f, _ in second.cuts))
    return Strategy(cuts, tuple(sorted((*first.passes, *(("y", n) for _, n in second.passes)))))


def random_strategy(rule: ShardingRule, rng: np.random.Generator, mesh: LogicalMesh = MESH) -> Strategy:
    """Every axis cuts a random factor or carries a random pass; possibly illegal."""
    cuts: dict[str, tuple[str, ...]] = {}
    passes: list[tuple[str, int]] = []
    for axis in rng.permutation(mesh.names).tolist():
        choice = int(rng.integers(0, max(1, len(rule.factors) + len(rule.passes))))
        if choice < len(rule.factors):
            factor = rule.factors[choice]
            cuts[factor] = cuts.get(factor, ()) + (axis,)
        elif rule.passes:
            passes.append((axis, choice - len(rule.factors)))
    return Strategy(tuple(cuts.items()), tuple(sorted(passes)))


def _one_kind(rule: ShardingRule, strategy: Strategy) -> bool:
    """A value that is partial in two ways at once has no meaning."""
    return all(len({kind for _, kind in result_sharding(rule, strategy, n).partial}) <= 1 for n in range(len(rule.results)))


def run(case: Case, strategy: Strategy, rng: np.random.Generator, mesh: LogicalMesh = MESH, as_written: bool = False) -> list[np.ndarray]:
    """The op's global results, computed part by part and put together. Parts that should be equal are checked to be."""
    rule = case.rule
    spread = []
    for n, (aval, x) in enumerate(zip(case.avals_in, case.operands, strict=True)):
        spread.append(scatter(x, operand_sharding(rule, strategy, n), aval, mesh, rng, as_written))

    def on(here: Place, parts: Sequence[Any]) -> tuple[Any, ...]:
        bind, avals = partial(_bind, case.equation), (case.avals_in, case.avals_out)
        params, more = dict(case.equation.params), {"as_written": as_written, "equation": case.equation}
        return lower(bind, case.op, params, rule, strategy, *avals, parts, here, **more)

    parts = [[_array(pieces[d], aval) for pieces, aval in zip(spread, case.avals_in, strict=True)] for d in range(mesh.num_devices)]
    together = bool(rule.manual and strategy.cuts) or bool(inside(case.op, rule, strategy, case.avals_in, mesh))
    found = _together(on, parts, mesh) if together else _one_by_one(on, parts, mesh)
    local = [[_data(x) for x in results] for results in zip(*found, strict=True)]
    return [collect(local[n], result_sharding(rule, strategy, n), aval, mesh) for n, aval in enumerate(case.avals_out)]


def _one_by_one(on: Callable, parts: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """The results on each device, none of which hears of another."""
    compiled = jax.jit(lambda device, mine: on(place(device, mesh), mine))
    return [compiled(device, mine) for device, mine in enumerate(parts)]


def _together(on: Callable, parts: Sequence[Any], mesh: LogicalMesh) -> list[Any]:
    """The results on each device where the op has collectives of its own, which takes real devices."""
    devices = Mesh(np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.sizes), mesh.names)
    each = PartitionSpec(mesh.names)

    def run(*stacked: Any) -> tuple[Any, ...]:
        return tuple(x[None] for x in on(Place(mesh, axis_index), [x[0] for x in stacked]))

    stacked = [jnp.stack(pieces) for pieces in zip(*parts, strict=True)]
    results = jax.jit(jax.shard_map(run, mesh=devices, in_specs=each, out_specs=each, check_vma=False))(*stacked)
    return [tuple(x[d] for x in results) for d in range(mesh.num_devices)]


def _bind(equation: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    return compat.bind(equation, operands, params)


def place(device: Any, mesh: LogicalMesh = MESH) -> Place:
    """A device's place, by its number, traced or plain."""
    return Place(mesh, lambda axes: _position(device, axes, mesh))


def _position(device: Any, axes: Sequence[str], mesh: LogicalMesh) -> Any:
    index = 0
    for axis in axes:
        index = index * mesh.by_name[axis] + device // mesh.stride(axis) % mesh.by_name[axis]
    return index


def _block(sharding: TensorSharding, shape: tuple[int, ...], device: int, mesh: LogicalMesh) -> tuple[slice, ...]:
    sizes = sharding.local_shape(shape, mesh)
    starts = [_position(device, axes, mesh) * n for axes, n in zip(sharding.dims, sizes, strict=True)]
    return tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))


def scatter(x, sharding: TensorSharding, aval: Aval, mesh: LogicalMesh, rng: np.random.Generator, as_written: bool) -> list[np.ndarray]:
    """Each device's part of a global value; partial ones are random values that combine to it."""
    whole = [x.astype(jnp.dtype(sharding.local_dtype(aval.dtype, as_written))) if sharding.partial else x] * mesh.num_devices
    for axis, kind in sharding.partial:
        whole = _decompose(whole, axis, kind, mesh, rng)
    return [w[_block(sharding, aval.shape, device, mesh)] for device, w in enumerate(whole)]


def _decompose(whole: list[np.ndarray], axis: str, kind: str, mesh: LogicalMesh, rng: np.random.Generator) -> list[np.ndarray]:
    """Values per device whose combination over a two-device axis is what stood there before; equal where that was equal."""
    halves: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for x in whole:
        if id(x) not in halves:
            halves[id(x)] = _two_parts(x, kind, rng)
    return [halves[id(x)][_position(device, (axis,), mesh)] for device, x in enumerate(whole)]


def _two_parts(x: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    if kind in ("and", "or"):
        noise = rng.integers(0, 2, x.shape).astype(bool)
        return (x | noise, x | ~noise) if kind == "and" else (x & noise, x & ~noise)
    noise = rng.integers(1, 5, x.shape).astype(x.dtype) if x.dtype.kind in "iu" else rng.uniform(0.5, 1.5, x.shape).astype(x.dtype)
    if kind == "sum":
        return _two_summands(x, noise, rng) if x.dtype.kind in "fcV" else (noise, x - noise)
    other = _beyond(x, noise, kind)
    first = rng.integers(0, 2, x.shape).astype(bool)
    return np.where(first, x, other), np.where(first, other, x)


def _beyond(x: np.ndarray, noise: np.ndarray, kind: str) -> np.ndarray:
    """Smaller numbers, or larger ones, as far as the dtype goes."""
    if x.dtype.kind not in "iu":
        return x - noise if kind == "max" else x + noise
    ends = np.iinfo(x.dtype)
    return np.where(x - ends.min < noise, x, x - noise) if kind == "max" else np.where(ends.max - x < noise, x, x + noise)


def _two_summands(x: np.ndarray, noise: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two parts whose sum is x without rounding in any wider type: twice x and minus x, or halves; around a zero any noise."""
    share = rng.choice([2.0, -1.0, 0.5], x.shape).astype(x.dtype)
    first, second = share * x, (1 - share).astype(x.dtype) * x
    finite, zero = np.isfinite(x), x == 0
    return np.where(zero | ~finite, noise, first), np.where(zero, -noise, np.where(finite, second, x))


def collect(parts: Sequence[np.ndarray], sharding: TensorSharding, aval: Aval, mesh: LogicalMesh) -> np.ndarray:
    """The global value from each device's part."""
    whole = np.zeros(aval.shape + parts[0].shape[aval.ndim :], parts[0].dtype)
    filled = np.zeros(whole.shape, bool)
    for device in _owners(sharding, mesh):
        total = _combined(parts, device, sharding, mesh)
        at = _block(sharding, aval.shape, device, mesh)
        if np.all(filled[at]):
            np.testing.assert_allclose(np.asarray(whole[at], _wide(whole)), np.asarray(total, _wide(whole)), rtol=1e-5, err_msg="replicas")
        whole[at], filled[at] = total, True
    assert filled.all()
    return whole


def _owners(sharding: TensorSharding, mesh: LogicalMesh) -> Iterator[int]:
    """The devices at index 0 of all partial axes."""
    partial = [a for a, _ in sharding.partial]
    return (d for d in range(mesh.num_devices) if all(_position(d, (a,), mesh) == 0 for a in partial))


def _combined(parts: Sequence[np.ndarray], device: int, sharding: TensorSharding, mesh: LogicalMesh) -> np.ndarray:
    total = None
    for steps in product(*(range(mesh.by_name[a]) for a, _ in sharding.partial)):
        other = device + sum(s * mesh.stride(a) for s, (a, _) in zip(steps, sharding.partial, strict=True))
        total = parts[other] if total is None else _UNITS[sharding.partial[0][1]](total, parts[other])
    return total


def assert_same(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    """Integers exactly; floats within `tolerance` of the largest value, NaN equal to NaN."""
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(found, expected)
        return
    found, expected = np.asarray(found, _wide(expected)), np.asarray(expected, _wide(expected))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


def _wide(x: np.ndarray) -> type:
    return np.complex128 if x.dtype.kind == "c" else np.float64 if x.dtype.kind in "fV" else x.dtype


def _data(x: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def _array(x: np.ndarray, aval: Aval) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(x)) if aval.dtype.startswith("key<") else jnp.asarray(x)
