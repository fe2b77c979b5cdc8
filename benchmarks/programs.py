"""Small training steps to force plans on, and what one device makes of them.

How near a plan must come depends on the dtype: a float64 step with adamw and clipping leaf by leaf at 1e-9; float32 gradients and an SGD
step leaf by leaf at 1e-5 of the leaf's norm; bfloat16 gradients, taken together, within twice the error that one device makes
against float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar import models, rules as rule_table
from autopar.intraop.remat import Variants
from autopar.intraop.shape import shape_of
from autopar.ir.graph import Graph
from autopar.ir.rule import ShardingRule
from autopar.runtime.program import in_microbatches
from autopar.runtime.verify import alone
from autopar.trace.arguments import split
from autopar.trace.trace import Traced, trace

BARS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2.0}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Code that is generated fast and runs slowly. The passes that may touch collectives are the same."""

# One layer of each: most of the time goes into compiling.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "mlp-tiny": {},
    "gpt-tiny": {"layers": 1},
    "llama-tiny": {"layers": 1},
    "moe-tiny": {"layers": 1},
    "wresnet-tiny": {"stages": (1,), "image": 8},
    "vit-tiny": {"layers": 1, "image": 12},
    "unet-tiny": {},
    "t5-tiny": {"layers": 1},
}
_LEARNING_RATE = 0.05
Leaves = Sequence[Any]


def keeps_gradients() -> optax.GradientTransformation:
    """SGD whose state is the gradient itself, so that both can be compared."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -_LEARNING_RATE * g, grads), grads),
    )


_GRADIENTS = keeps_gradients()


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step with its arguments, and by step the outputs of one device.

    `floors[n][k]` is the least size that output k of step n is compared with. It is 0, except where rounding the state alone moves the
    output about as far as the bar allows: a gradient that is zero but for rounding, and what adam makes of it. `truth` are, for
    bfloat16, the outputs of the first step in float64.
    """

    name: str
    dtype: str
    traced: Traced
    rules: tuple[ShardingRule, ...]
    leaves: Leaves
    expected: tuple[Leaves, ...]
    floors: tuple[tuple[float, ...], ...]
    truth: Leaves = ()

    @property
    def bar(self) -> float:
        return BARS[self.dtype]

    @property
    def mode(self) -> AbstractContextManager:
        """64-bit mode where the program needs it."""
        return jax.enable_x64(self.dtype == "float64")

    def error(self, step: int, outputs: Leaves) -> tuple[float, str]:
        """How far the outputs of a step are off, in the measure of the dtype's bar, and the worst leaf."""
        if self.dtype == "bfloat16":
            return self._ratio(outputs), "all gradients"
        order = np.inf if self.dtype == "float64" else 2
        rows = zip(self.traced.graph.output_names, outputs, self.expected[step], self.floors[step], strict=True)
        found = [(_relative(a, e, floor, order), name) for name, a, e, floor in rows]
        return max(found, default=(0.0, ""))

    def _ratio(self, outputs: Leaves) -> float:
        """Error against float64 over that of one device."""
        ours = theirs = 0.0
        for a, e, t in zip(outputs, self.expected[0], self.truth, strict=True):
            if jnp.issubdtype(e.dtype, jnp.inexact):
                ours += _norm(_numbers(a) - _numbers(t), 2) ** 2
                theirs += _norm(_numbers(e) - _numbers(t), 2) ** 2
        return float((ours / theirs) ** 0.5)


def zoo(name: str, dtype: str = "float64", **overrides: Any) -> Program:
    """A model of the zoo, by default as small as in `SMALL`, with adamw or, in narrow dtypes, its gradients laid open."""
    shape = {"optimizer": "adamw" if dtype == "float64" else _GRADIENTS, **SMALL.get(name, {}), **overrides}
    with jax.enable_x64(dtype == "float64"):
        held = "float64" if dtype == "float64" else "float32"
        step, args = models.build(name, abstract=False, dtype=dtype, param_dtype=held, **shape)
    truth = _truth(name, shape, args) if dtype == "bfloat16" else ()
    return program(name, step, args, dtype, truth)


def program(name: str, step: Callable[..., Any], args: Sequence[Any], dtype: str = "float64", truth: Leaves = ()) -> Program:
    """Any step, traced and run on one device."""
    with jax.enable_x64(dtype == "float64"):
        traced = trace(step, args)
        rules = _rules(traced.graph)
        leaves, _ = split(args, {})
        run = _compiled(traced, leaves)
        steps = 3 if dtype == "float64" else 1
        expected = _steps(traced, run, leaves, steps)
        shaken = _steps(traced, run, _shaken(traced, leaves), steps)
    order = np.inf if dtype == "float64" else 2
    bar = BARS[dtype]
    floors = tuple(tuple(_floor(a, b, order, bar) for a, b in zip(x, y, strict=True)) for x, y in zip(expected, shaken, strict=True))
    return Program(name, dtype, traced, rules, leaves, expected, floors, truth)


def repeated(subject: Program, mode: str = "full") -> Program:
    """The program with what `Options.remat` calls `mode` made again after forward; one device's numbers stay."""
    variants = Variants(subject.traced.graph, lambda graph: shape_of(graph, _rules(graph), subject.traced.roles.carried), mode)
    graph = variants.shape(variants.asked).graph
    return replace(subject, traced=replace(subject.traced, graph=graph), rules=_rules(graph))


def divided(subject: Program, count: int) -> Program:
    """The program that runs the step as `count` microbatches; one device's numbers, for the whole batch, stay."""
    traced = in_microbatches(subject.traced, count)
    return replace(subject, traced=traced, rules=_rules(traced.graph))


def _rules(graph: Graph) -> tuple[ShardingRule, ...]:
    return tuple(rule_table.rule_for(op, graph.aval) for op in graph.ops)


def _truth(name: str, shape: Mapping[str, Any], args: Any) -> Leaves:
    """What the step gives in float64 from the same numbers."""
    with jax.enable_x64(True):
        step, specs = models.build(name, dtype="float64", param_dtype="float64", **shape)
        traced = trace(step, specs)
        leaves = [x.astype(s.dtype) for x, s in zip(jax.tree.leaves(args), jax.tree.leaves(specs), strict=True)]
        return _steps(traced, _compiled(traced, leaves), leaves, 1)[0]


def flat(traced: Traced) -> Callable[..., list[Any]]:
    """The user's own function on flat leaves."""

    def function(*leaves: Any) -> list[Any]:
        args, kwargs = traced.signature.rebuild(leaves)
        out = jax.tree.leaves(traced.function(*args, **kwargs))
        return [out[i] for i in traced.out_positions]

    return function


def _compiled(traced: Traced, leaves: Leaves) -> Callable[..., list[Any]]:
    return jax.jit(flat(traced)).lower(*leaves).compile(compiler_options=QUICK)


def fed_back(traced: Traced, leaves: Leaves, outputs: Leaves) -> list[Any]:
    """The next step's arguments."""
    found = list(leaves)
    for i, k in traced.roles.carried:
        found[i] = outputs[k]
    return found


def _steps(traced: Traced, run: Callable[..., list[Any]], leaves: Leaves, count: int) -> tuple[Leaves, ...]:
    found: list[Leaves] = []
    for _ in range(count):
        found.append([alone(x) for x in run(*leaves)])
        leaves = fed_back(traced, leaves, found[-1])
    return tuple(found)


def _shaken(traced: Traced, leaves: Leaves) -> list[Any]:
    """The arguments with the last bits of the floating state turned at random."""
    random = np.random.default_rng(0)
    carried = {i for i, _ in traced.roles.carried}
    found = list(leaves)
    for i in carried or range(len(leaves)):
        x = leaves[i]
        if jnp.issubdtype(x.dtype, jnp.floating):
            signs = random.choice([-1.0, 1.0], x.shape)
            found[i] = (x * (1 + 2 * float(jnp.finfo(x.dtype).eps) * signs)).astype(x.dtype)
    return found


def _numbers(leaf: Any) -> np.ndarray:
    """A leaf as float64, or as it is where it is not floating."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    wide = np.complex128 if np.iscomplexobj(array) else np.float64
    return array.astype(wide) if jnp.issubdtype(leaf.dtype, jnp.inexact) else array


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a - b` where both are finite, and else nothing."""
    return np.subtract(a, b, out=np.zeros_like(a), where=np.isfinite(a) & np.isfinite(b))


def _norm(x: np.ndarray, order: float) -> float:
    return float(np.linalg.norm(np.ravel(x), order)) if x.size else 0.0


def _floor(a: Any, shaken: Any, order: float, bar: float) -> float:
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    noise = _norm(_difference(_numbers(a), _numbers(shaken)), order)
    return 20 * noise / bar if 10 * noise > bar * _norm(_numbers(a), order) else 0.0


def _relative(actual: Any, expected: Any, floor: float, order: float) -> float:
    """`|a - e| / (|e| + floor)`; what is not floating must be equal. Both infinite or NaN is equal."""
    a, e = _numbers(actual), _numbers(expected)
    if (a.shape, actual.dtype) != (e.shape, expected.dtype):
        return float("inf")
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, e) else float("inf")
    finite = np.isfinite(e)
    if not np.array_equal(a[~finite], e[~finite], equal_nan=True) or not np.all(np.isfinite(a[finite])):
        return float("inf")
    difference, size = _norm(_difference(a, e), order), _norm(np.where(finite, e, 0), order) + floor
    return difference / size if difference else 0.0
