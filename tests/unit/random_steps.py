"""Steps of random programs, one maker per family of primitives: what it reads, what it calls, how large and how exact its results are.

A maker takes a pool, picks or adds operands and returns a step, or None where none fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from random_values import FLOATS, INTEGERS, KEY, Pool, Step, Value, rounded, spec

Maker = Callable[[Pool], Step | None]
NUMBERS = (*FLOATS, *FLOATS, *INTEGERS, "complex64")
ORDERED = (*FLOATS, *FLOATS, *INTEGERS)
MODES = ("clip", "fill", "promise_in_bounds", "drop")
_FULL = 2.0**32
"""Larger than any integer."""


def step(
    p: Pool, label: str, function: Callable, operands: Sequence[int], bound: float, error: float = 0.0, smooth: int = 0
) -> Step | None:
    """A step whose results are all of this size and error."""
    found = jax.tree.leaves(jax.eval_shape(function, *(spec(p.values[i]) for i in operands)))
    results = [rounded(r.shape, r.dtype, bound, error if jnp.issubdtype(r.dtype, jnp.inexact) else 0.0, smooth) for r in found]
    return Step(label, function, tuple(operands), tuple(r for r in results if r is not None)) if None not in results else None


def backward(p: Pool, made: Step | None) -> Step | None:
    """The step, or its gradient where it is linear in each operand, or moves elements about: at most all products are added up."""
    if made is None or not made.results[0].is_inexact or not p.flag():
        return made
    operands = [p.values[i] for i in made.operands]
    wrt = [n for n, v in enumerate(operands) if v.is_inexact and v.dtype == made.results[0].dtype]
    if not wrt:
        return made

    def gradient(*xs: Any) -> list[Any]:
        def of(*some: Any) -> Any:
            every = list(xs)
            for n, x in zip(wrt, some, strict=True):
                every[n] = x
            return made.function(*every)

        y, pull = jax.vjp(of, *(xs[n] for n in wrt))
        return list(pull(y))

    largest = max(1.0, *(v.bound for v in operands if v.is_inexact))
    terms = max(made.results[0].size, *(v.size for v in operands), 1)
    result = made.results[0]
    errors = sum(v.error for v in operands if v.is_inexact)
    error = terms * (result.error * largest + errors * result.bound) if result.error or errors else 0.0
    smooth = terms if error else 0
    return step(p, f"gradient of {made.label}", gradient, made.operands, terms * result.bound * largest, error, smooth) or made


# Element by element


def unary(p: Pool) -> Step | None:
    i = p.pick(dtypes=NUMBERS)
    v = p.values[i]
    b, e = v.bound, v.error
    options: dict[str, tuple[Callable, float, float]] = {
        "neg": (jnp.negative, b, e),
        "square": (jnp.square, b * b, 2 * b * e + e * e),
        "cube": (lambda x: lax.integer_pow(x, 3), b**3, 3 * b * b * e),
        "double": (lambda x: x * 2, 2 * b, 2 * e),
        "add zero": (lambda x: x + 0, b, e),
        "one minus": (lambda x: 1 - x, b + 1, e),
        "copy": (jnp.copy, b, e),
        "name": (lambda x: checkpoint_name(x, "here"), b, e),
        "barrier": (lambda x: lax.optimization_barrier((x, x))[1], b, e),
        "stop_gradient": (lax.stop_gradient, b, e),
    }
    if v.dtype == "complex64":
        options |= {"real": (jnp.real, b, e), "imag": (jnp.imag, b, e), "conj": (jnp.conj, b, e)}
    else:
        clamp = lambda x: lax.clamp(jnp.zeros((), x.dtype), x, jnp.ones((), x.dtype))  # noqa: E731
        options |= {"abs": (jnp.abs, b, e), "clamp": (clamp, 1, e), "relu": (lambda x: jnp.maximum(x, 0), b, e)}
    if v.is_float and v.is_exact:
        options |= {"sign": (jnp.sign, 1, 0), "floor": (jnp.floor, b, 0), "round": (jnp.round, b, 0), "is_finite": (jnp.isfinite, 1, 0)}
    if v.dtype in INTEGERS:
        options |= {"population_count": (lax.population_count, 32, 0), "clz": (lax.clz, 32, 0), "not": (jnp.invert, _FULL, 0)}
    name = p.choose(options)
    function, bound, error = options[name]
    return step(p, name, function, [i], bound, error)


_SMOOTH: dict[str, tuple[Callable, float, Callable[[float], float]]] = {
    "tanh": (jnp.tanh, 1, lambda b: 1),
    "sin": (jnp.sin, 1, lambda b: 1),
    "cos": (jnp.cos, 1, lambda b: 1),
    "logistic": (jax.nn.sigmoid, 1, lambda b: 1),
    "erf": (lax.erf, 1.2, lambda b: 1),
    "atan": (jnp.arctan, 1, lambda b: 2),
    "exp": (lambda x: jnp.exp(-jnp.abs(x)), 1, lambda b: 1),
    "log1p": (lambda x: jnp.log1p(jnp.abs(x)), 1, lambda b: b),
    "sqrt": (lambda x: jnp.sqrt(jnp.abs(x) + 1), 1, lambda b: b + 1),
    "rsqrt": (lambda x: lax.rsqrt(jnp.abs(x) + 1), 1, lambda b: 1),
    "cbrt": (lambda x: jnp.cbrt(jnp.abs(x) + 1), 1, lambda b: b + 1),
    "gelu": (jax.nn.gelu, 1.2, lambda b: b),
    "softplus": (jax.nn.softplus, 1, lambda b: b + 1),
    "third": (lambda x: x / 3, 1, lambda b: b),
}
"""What it is, the largest slope, the largest result."""


def smooth(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.bound < 1e3, dtypes=FLOATS)
    name = p.choose(_SMOOTH)
    function, slope, bound = _SMOOTH[name]
    v = p.values[i]
    return step(p, name, function, [i], bound(v.bound), slope * v.error, smooth=12)


def _second(p: Pool, i: int) -> int:
    """An operand beside value i: the same, one like it, or one that is broadcast to it."""
    v = p.values[i]
    how = p.choose(("like", "same", "row", "ones"))
    shapes = {"row": v.shape[-1:], "ones": tuple(1 if p.flag() else n for n in v.shape)}
    return i if how == "same" else p.like(i, shapes.get(how))


def binary(p: Pool) -> Step | None:
    i = p.pick(dtypes=NUMBERS)
    j = _second(p, i)
    i, j = (i, j) if p.flag() else (j, i)
    a, c = p.values[i], p.values[j]
    total, either = a.error + c.error, max(a.bound, c.bound)
    options: dict[str, tuple[Callable, float, float, int]] = {
        "add": (jnp.add, a.bound + c.bound, total, 0),
        "sub": (jnp.subtract, a.bound + c.bound, total, 0),
        "mul": (jnp.multiply, a.bound * c.bound, a.error * c.bound + c.error * a.bound + a.error * c.error, 0),
    }
    if a.dtype != "complex64":
        options |= {"max": (jnp.maximum, either, total, 0), "min": (jnp.minimum, either, total, 0)}
    if a.is_float:
        error = a.error + a.bound * c.error
        options |= {"div": (lambda x, y: x / (jnp.abs(y) + 1), a.bound, error, 4)}
    if a.dtype in INTEGERS:
        names = "rem div bitwise_and bitwise_or bitwise_xor shift_left shift_right_logical shift_right_arithmetic".split()
        options |= {n: (_integer(n), _FULL, 0, 0) for n in names}
    name = p.choose(options)
    function, bound, error, roundings = options[name]
    return step(p, name, function, [i, j], bound, error, roundings)


def _integer(name: str) -> Callable:
    bits = 7 if name.startswith("shift") else None
    return lambda x, y: getattr(lax, name)(*jnp.broadcast_arrays(x, (y & bits) if bits else y if name.startswith("bit") else y | 1))


def compare(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.is_exact, dtypes=ORDERED)
    j = _second(p, i)
    if not p.values[j].is_exact:
        return None
    name = p.choose(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"))
    return step(p, name, getattr(jnp, name), [i, j], 1)


def logic(p: Pool) -> Step | None:
    i = p.pick(dtypes=("bool",))
    name = p.choose(("logical_and", "logical_or", "logical_xor", "logical_not"))
    return step(p, name, getattr(jnp, name), [i] if name.endswith("not") else [i, _second(p, i)], 1)


def select(p: Pool) -> Step | None:
    i = p.pick()
    j = p.like(i)
    v, w = p.values[i], p.values[j]
    predicate = p.leaf((), "bool") if p.flag() else p.pick(lambda u: u.shape == v.shape, (v.ndim,), ("bool",))
    if p.values[predicate].shape not in ((), v.shape):
        predicate = p.leaf(v.shape, "bool")
    if p.flag() and v.is_number:
        return step(p, "select or zero", lambda c, x: jnp.where(c, x, 0), [predicate, i], v.bound, v.error)
    return step(p, "select", lambda c, x, y: lax.select_n(c, x, y), [predicate, i, j], max(v.bound, w.bound), max(v.error, w.error))


def convert(p: Pool) -> Step | None:
    i = p.pick()
    v = p.values[i]
    targets = {"bool": v.is_exact, "int32": v.is_exact and not v.dtype.startswith("complex") and (not v.is_float or v.bound < 2**30)}
    targets |= dict.fromkeys(("int8", "uint32"), v.dtype in (*INTEGERS, "bool"))
    targets |= dict.fromkeys(FLOATS, v.dtype != "complex64") | {"complex64": True}
    dtype = p.choose(d for d, fits in targets.items() if fits)
    bound = _FULL if v.dtype in INTEGERS and v.bound > 100 or v.dtype == "uint32" else v.bound
    return step(p, f"convert to {dtype}", lambda x: x.astype(dtype), [i], bound, v.error)


# Over dimensions


def _power(bound: float, n: int) -> float:
    """The largest product of n numbers up to this."""
    return max(1.0, bound) ** n if n * math.log2(max(2.0, bound)) < 1000 else math.inf


def _axes(p: Pool, v: Value) -> tuple[int, ...]:
    return tuple(d for d in range(v.ndim) if p.flag())


def reduce(p: Pool) -> Step | None:
    i = p.pick(ndim=(1, 2, 2, 3), dtypes=(*NUMBERS, "bool", "bool"))
    v = p.values[i]
    axes = _axes(p, v)
    n = prod(v.shape[d] for d in axes)
    if v.dtype == "bool":
        name = p.choose(("any", "all"))
        return step(p, name, partial(getattr(jnp, name), axis=axes), [i], 1)
    options: dict[str, tuple[float, float, int]] = {"sum": (n * v.bound, n * v.error, n if v.error else 0)}
    if v.is_exact and n <= 12:
        options["prod"] = (_power(v.bound, n), 0, 0)
    if n and v.dtype != "complex64":
        options |= dict.fromkeys(("max", "min"), (v.bound, v.error, 0))
    if n and v.is_float:
        options |= {"mean": (v.bound, v.error, n)}
    name = p.choose(options)
    return backward(p, step(p, name, partial(getattr(jnp, name), axis=axes), [i], *options[name])) if name == "sum" else step(
        p, name, partial(getattr(jnp, name), axis=axes), [i], *options[name]
    )


def arg_reduce(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.is_exact and 0 not in v.shape, (1, 2, 3), ORDERED)
    axis, name = p.choose(range(p.values[i].ndim)), p.choose(("argmax", "argmin"))
    return step(p, name, partial(getattr(jnp, name), axis=axis), [i], 8)


def cumulative(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2, 3), ORDERED)
    v = p.values[i]
    axis, reverse = p.choose(range(v.ndim)), p.flag()
    n = v.shape[axis]
    options = {"cumsum": (n * v.bound, n * v.error, n if v.error else 0), "cummax": (v.bound, v.error, 0), "cummin": (v.bound, v.error, 0)}
    if v.is_exact:
        options["cumprod"] = (_power(v.bound, n), 0, 0)
    if v.is_float:
        options["cumlogsumexp"] = (v.bound + 3, v.error, 12 * n)
    name = p.choose(options)
    made = step(p, name, partial(getattr(lax, name), axis=axis, reverse=reverse), [i], *options[name])
    return backward(p, made) if name == "cumsum" else made


def softmax(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape and v.bound < 30, (1, 2, 3), FLOATS)
    v = p.values[i]
    axis = p.choose(range(v.ndim))
    name = p.choose(("softmax", "log_softmax", "logsumexp"))
    return step(p, name, partial(getattr(jax.nn, name), axis=axis), [i], 2 * v.bound + 3, 2 * v.error, smooth=12 + 2 * v.shape[axis])


def order(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.ndim and 0 not in v.shape, (1, 2, 3), ORDERED)
    v = p.values[i]
    axis = p.choose(range(v.ndim))
    options: dict[str, Callable] = {"sort": lambda x: lax.sort(x, dimension=axis)}
    if v.is_exact:
        options |= {
            "argsort": lambda x: jnp.argsort(x, axis=axis, stable=True),
            "top_k": lambda x: lax.top_k(x, 1 + x.shape[-1] // 2),
            "sort by": lambda x: lax.sort((x, jnp.flip(x, axis)), dimension=axis, num_keys=1, is_stable=True),
        }
    name = p.choose(options)
    return step(p, name, options[name], [i], max(v.bound, 8), v.error)


_PRODUCTS = "mk,kn->mn km,kn->nm mk,k->m bmk,bkn->bmn mk,mk->m bmk,kn->bmn k,k-> m,n->mn bmk,bnk->bmn bmk,bmn->kn".split()


def product(p: Pool) -> Step | None:
    form = p.choose(_PRODUCTS)
    left, right, out = form.replace("->", ",").split(",")
    i = p.pick(ndim=(len(left),), dtypes=NUMBERS)
    v = p.values[i]
    sizes = dict(zip(left, v.shape, strict=True)) | {k: p.choose((1, 2, 3, 4, 6)) for k in right if k not in left}
    j = p.like(i, [sizes[k] for k in right])
    w = p.values[j]
    n = prod(sizes[k] for k in sizes if k not in out)
    wide = v.dtype in ("bfloat16", "float16") and p.flag()
    function = partial(jnp.einsum, form, preferred_element_type=jnp.float32 if wide else None)
    error = n * (v.error * w.bound + w.error * v.bound + v.error * w.error)
    return backward(p, step(p, form, function, [i, j], n * v.bound * w.bound, error, n if error else 0))


def _pads(p: Pool, window: int) -> tuple[int, int]:
    return p.choose(range(window)), p.choose(range(window))


def convolution(p: Pool) -> Step | None:
    """One or two dimensions of space, strided, padded and dilated at will, in groups or not."""
    space = p.choose((1, 1, 2))
    batch, groups, each, out = p.choose((2, 4)), p.choose((1, 1, 2)), p.choose((1, 2)), p.choose((1, 2))
    i = p.leaf((batch, *(p.choose((4, 6, 8)) for _ in range(space)), groups * each), p.choose(FLOATS))
    v = p.values[i]
    j = p.leaf((*(p.choose((1, 2, 3)) for _ in range(space)), each, groups * out), v.dtype)
    w = p.values[j]
    spread, wide = (tuple(p.choose((1, 1, 2)) for _ in range(space)) for _ in range(2))
    named = max(spread) == 1 and p.flag()
    function = partial(
        lax.conv_general_dilated,
        window_strides=tuple(p.choose((1, 1, 2, 3)) for _ in range(space)),
        padding=p.choose(("SAME", "VALID")) if named else [_pads(p, w.shape[d]) for d in range(space)],
        lhs_dilation=spread,
        rhs_dilation=wide,
        dimension_numbers=("NHC", "HIO", "NHC") if space == 1 else ("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    n = each * prod(w.shape[:space])
    return backward(p, step(p, "convolution", function, [i, j], n * v.bound * w.bound))


def window(p: Pool) -> Step | None:
    i = p.pick(lambda v: all(n > 2 for n in v.shape), (1, 2), ORDERED)
    v = p.values[i]
    if any(n < 3 for n in v.shape):
        return None
    sizes = tuple(p.choose((1, 2, 3)) for _ in v.shape)
    strides = tuple(p.choose((1, 2, 3)) for _ in v.shape)
    padding = [_pads(p, n) for n in sizes] if p.flag() else p.choose(("SAME", "VALID"))
    n = prod(sizes)
    options = {"add": (n * v.bound, n * v.error, n if v.error else 0), "max": (v.bound, v.error, 0), "min": (v.bound, v.error, 0)}
    name = p.choose(options)
    low, high = (-np.inf, np.inf) if v.is_float else (np.iinfo(v.dtype).min, np.iinfo(v.dtype).max)
    start = np.asarray({"add": 0, "max": low, "min": high}[name], jnp.dtype(v.dtype))
    function = lambda x: lax.reduce_window(x, start, getattr(lax, name), sizes, strides, padding)  # noqa: E731
    made = step(p, f"window {name} {sizes} {strides} {padding}", function, [i], *options[name])
    return backward(p, made) if v.is_exact else made


# Shapes


def _moved(p: Pool, label: str, function: Callable, operands: Sequence[int]) -> Step | None:
    """A step that moves elements about, and its gradient."""
    values = [p.values[i] for i in operands]
    return backward(p, step(p, label, function, operands, max(v.bound for v in values), max(v.error for v in values)))


def _regrouped(p: Pool, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements: prime factors in order, or not, grouped at random."""
    primes = [q for n in shape for q in {4: (2, 2), 6: (2, 3), 8: (2, 2, 2), 9: (3, 3)}.get(n, (n,))]
    primes = p.draw(st.permutations(primes)) if p.flag() else primes
    shape, rest = (), primes
    while rest:
        n = p.choose(range(1, len(rest) + 1))
        shape, rest = (*shape, prod(rest[:n])), rest[n:]
    return (*shape, *((1,) * p.choose((0, 0, 1))))


def reshape(p: Pool) -> Step | None:
    i = p.pick()
    shape = _regrouped(p, p.values[i].shape)
    return _moved(p, f"reshape to {shape}", lambda x: x.reshape(shape), [i])


def arrange(p: Pool) -> Step | None:
    i = p.pick(ndim=(1, 2, 2, 3))
    v = p.values[i]
    axis, axes = p.choose(range(v.ndim)), p.draw(st.permutations(range(v.ndim)))
    reps = tuple(p.choose((1, 2, 3)) for _ in v.shape)
    options: dict[str, Callable] = {
        "transpose": lambda x: x.transpose(axes),
        "rev": lambda x: jnp.flip(x, axis),
        "expand": lambda x: jnp.expand_dims(x, axis),
        "broadcast": lambda x: jnp.broadcast_to(x, (3 if v.shape[0] % 2 else 4, *v.shape)),
        "roll": lambda x: jnp.roll(x, 1, axis),
        "tile": lambda x: jnp.tile(x, reps),
        "repeat": lambda x: jnp.repeat(x, 2, axis),
    }
    if 1 in v.shape:
        options["squeeze"] = lambda x: jnp.squeeze(x, v.shape.index(1))
        options["widen"] = lambda x: jnp.broadcast_to(x, [2 if n == 1 else n for n in v.shape])
    name = p.choose(options)
    made = step(p, name, options[name], [i], v.bound, v.error)
    return made if name in ("tile", "repeat", "broadcast", "widen") else backward(p, made)


def join(p: Pool) -> Step | None:
    i = p.pick(ndim=(1, 2, 2, 3))
    j = i if p.flag() else p.like(i)
    axis = p.choose(range(p.values[i].ndim))
    name = p.choose(("concatenate", "stack"))
    return _moved(p, name, lambda x, y: getattr(jnp, name)([x, y, x], axis=axis), [i, j])


def divide(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.shape[0] > 1, (1, 2, 2, 3))
    v = p.values[i]
    axis = p.choose(d for d in range(v.ndim) if v.shape[d] > 0) if v.size else 0
    at = p.choose(range(1, max(2, v.shape[axis])))
    if v.shape[axis] < 2:
        return None
    return step(p, f"split at {at}", lambda x: jnp.split(x, [at], axis), [i], v.bound, v.error)


def pad(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2))
    v = p.values[i]
    config = [(p.choose((-1, 0, 0, 1)), p.choose((0, 0, 2)), p.choose((0, 0, 1))) for _ in v.shape]
    if any(n + low + high < 0 for n, (low, high, _) in zip(v.shape, config, strict=True)):
        return None
    value = p.choose((0, 1))
    with_value = lambda x: lax.pad(x, jnp.asarray(value, x.dtype), config)  # noqa: E731
    return backward(p, step(p, f"pad {config}", with_value, [i], max(1, v.bound), v.error))


def cut_out(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2, 3))
    v = p.values[i]
    if 0 in v.shape:
        return None
    starts = [p.choose((0, 0, *range(n))) for n in v.shape]
    ends = [n if p.flag() else p.choose(range(s, n + 1)) for s, n in zip(starts, v.shape, strict=True)]
    strides = [p.choose((1, 1, 2)) for _ in v.shape]
    return _moved(p, f"slice {starts} {ends} {strides}", lambda x: lax.slice(x, starts, ends, strides), [i])


def dynamic(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2, 3))
    v = p.values[i]
    if 0 in v.shape:
        return None
    axis = p.choose(range(v.ndim))
    n = p.choose(range(1, v.shape[axis] + 1))
    at = p.pick(lambda u: u.shape == (), (0,), ("int32",))
    if p.flag():
        return _moved(p, f"dynamic slice of {n}", lambda x, k: lax.dynamic_slice_in_dim(x, k, n, axis), [i, at])
    j = p.like(i, [n if d == axis else m for d, m in enumerate(v.shape)])
    return _moved(p, f"dynamic update of {n}", lambda x, u, k: lax.dynamic_update_slice_in_dim(x, u, k, axis), [i, j, at])


# By index


def look_up(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2, 3))
    v = p.values[i]
    if 0 in v.shape:
        return None
    index = p.pick(ndim=(0, 1, 1, 2), dtypes=("int32",))
    axis, mode = p.choose(range(v.ndim)), p.choose(MODES[:2])
    fill = p.choose((0, 1)) if v.is_number and mode == "fill" else None
    return _moved(p, f"take {mode}", lambda x, k: jnp.take(x, k + 1, axis, mode=mode, fill_value=fill), [i, index])


def look_up_more(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (2, 3))
    v = p.values[i]
    if 0 in v.shape:
        return None
    name = p.choose(("two indices", "along", "windows", "one hot"))
    if name == "two indices":
        index = p.pick(ndim=(1,), dtypes=("int32",))
        mode = p.choose(MODES[:2])
        return _moved(p, f"{name}, {mode}", lambda x, k: x.at[k, k + 1].get(mode=mode, fill_value=0), [i, index])
    if name == "along":
        index = p.leaf((*v.shape[:-1], p.choose((1, 2, 4))), "int32")
        return _moved(p, name, lambda x, k: jnp.take_along_axis(x, k, -1, mode="clip"), [i, index])
    if name == "windows":
        n, index = p.choose(range(1, v.shape[-1] + 1)), p.leaf(v.shape[:1], "int32")
        rows = jax.vmap(lambda r, k: lax.dynamic_slice_in_dim(r, k, n, r.ndim - 1))
        return _moved(p, f"{name} of {n}", rows, [i, index])
    return step(p, name, lambda k: jax.nn.one_hot(k, 4), [p.pick(dtypes=("int32",))], 1)


def scatter(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2), NUMBERS)
    v = p.values[i]
    if 0 in v.shape:
        return None
    index = p.pick(ndim=(0, 1, 1), dtypes=("int32",))
    j = p.like(i, (*p.values[index].shape, *v.shape[1:]))
    w, n = p.values[j], max(1, p.values[index].size)
    mode, either = p.choose(("clip", "drop")), (max(v.bound, w.bound), max(v.error, w.error), 0)
    options = {"add": (v.bound + n * w.bound, v.error + n * w.error, n if v.error or w.error else 0)}
    options["subtract"] = options["add"]
    if n == 1:  # of several equal indices any may win
        options["set"] = either
    if v.dtype != "complex64":
        options |= {"max": either, "min": either}
    if v.is_exact and w.is_exact:
        options["multiply"] = (v.bound * _power(w.bound, n), 0, 0)
    name = p.choose(options)
    unique = lambda x, k, u: getattr(x.at[k], name)(u, mode=mode)  # noqa: E731
    made = step(p, f"scatter {name}, {mode}", unique, [i, index, j], *options[name])
    return backward(p, made) if name in ("add", "subtract", "set") else made


# The rest


def random(p: Pool) -> Step | None:
    i = p.pick(ndim=(0,), dtypes=(KEY,))
    shape = tuple(p.choose((1, 2, 3, 4, 6)) for _ in range(p.choose((1, 2))))
    options: dict[str, tuple[Callable, float]] = {
        "bits": (lambda k: jax.random.bits(k, shape), _FULL),
        "split": (lambda k: jax.random.split(k, 3)[1], 1),
        "fold_in": (lambda k: jax.random.fold_in(k, 7), 1),
        "bernoulli": (lambda k: jax.random.bernoulli(k, 0.5, shape), 1),
        "randint": (lambda k: jax.random.randint(k, shape, -2, 5), 5),
        "permutation": (lambda k: jax.random.permutation(k, 6), 6),
        "key data": (jax.random.key_data, _FULL),
        "keys": (lambda k: jax.random.split(k, 4), 1),
        "clone": (jax.random.clone, 1),
    }
    name = p.choose((*options, "uniform", "normal"))
    if name in options:
        return step(p, name, options[name][0], [i], options[name][1])
    return step(p, name, lambda k: getattr(jax.random, name)(k, shape), [i], 6, smooth=12)


def fft(p: Pool) -> Step | None:
    i = p.pick(lambda v: 0 not in v.shape, (1, 2), ("complex64", "float32"))
    v = p.values[i]
    n = max(1, v.shape[-1])
    if 0 in v.shape:
        return None
    name = p.choose(("fft", "ifft") if v.dtype == "complex64" else ("rfft",))
    return step(p, name, getattr(jnp.fft, name), [i], n * v.bound, n * v.error, smooth=4 * n)


def constant(p: Pool) -> Step | None:
    options: dict[str, Callable] = {
        "arange": lambda: jnp.arange(6),
        "zeros": lambda: jnp.zeros((4, 2)),
        "iota": lambda: lax.broadcasted_iota(jnp.float32, (4, 6), 1),
        "tri": lambda: jnp.tri(4, dtype=bool),
        "table": lambda: jnp.asarray(np.arange(12, dtype=np.float32).reshape(2, 6)),
        "scalar": lambda: jnp.asarray(2.0),
    }
    name = p.choose(options)
    return step(p, name, options[name], [], 12)


SIMPLE: tuple[Maker, ...] = (
    *(unary, smooth, binary, binary, compare, logic, select, convert, random, constant),
    *(reduce, reduce, arg_reduce, cumulative, softmax, order, product, product, convolution, window, fft),
    *(reshape, reshape, arrange, arrange, join, divide, pad, cut_out, dynamic, look_up, look_up, look_up_more, scatter),
)


# Loops and branches


def _inner(p: Pool, values: Sequence[Value], count: int) -> Pool:
    """A body of up to `count` steps over these values."""
    inner = Pool(p.draw, list(values), list(range(len(values))))
    for _ in range(count):
        inner.add(p.choose(SIMPLE)(inner))
    return inner


def _free(v: Value) -> Value:
    """A carried value: integers wrap round the loop, whatever they begin with."""
    return Value(v.shape, v.dtype, _FULL if v.dtype in INTEGERS else v.bound)


def _back(inner: Pool, v: Value) -> Callable[[dict[int, Any]], Any]:
    """The next carried value: something of its aval, not larger than it."""
    same = [i for i, u in enumerate(inner.values) if (u.shape, u.dtype) == (v.shape, v.dtype) and u.is_exact]
    i = inner.choose(reversed(same))
    if v.is_float and inner.values[i].bound > v.bound:
        return lambda env: jnp.clip(env[i], -v.bound, v.bound)
    return (lambda env: env[i]) if v.dtype != "complex64" else (lambda env: env[0])


def _outer(p: Pool, inner: Pool, given: int) -> list[int]:
    """What a body reads beside what it was given becomes arguments of the program."""
    return [p.leaf(inner.values[i].shape, inner.values[i].dtype) for i in inner.leaves[given:]]


def scan(p: Pool) -> Step | None:
    i = p.pick(lambda v: v.is_exact)
    n, reverse = p.choose((1, 2, 3)), p.flag()
    j = p.leaf((n, *(p.choose((1, 2, 4)) for _ in range(p.choose((1, 2))))), p.choose((*FLOATS, "int32")))
    c, x = p.values[i], p.values[j]
    if not c.is_exact:
        return None
    adding = p.flag() and c.is_number and c.dtype != "uint32"
    seen = Value(x.shape[1:], x.dtype, x.bound)
    inner = _inner(p, [Value((), "bool", 1) if adding else _free(c), seen], 3)
    others = _outer(p, inner, 2)
    out = p.choose(reversed(range(len(inner.values))))
    same = [k for k, u in enumerate(inner.values) if (u.shape, u.dtype) == (c.shape, c.dtype) and u.is_exact and k]
    if adding and not same:
        return None
    added = p.choose(reversed(same)) if adding else 0
    back = _back(inner, c) if not adding else None

    def body(carry: Any, xs: Any, rest: Sequence[Any]) -> Any:
        env = inner.run([jnp.asarray(True) if adding else carry, xs, *rest])
        return (carry + env[added] if back is None else back(env)), env[out]

    def function(carry: Any, xs: Any, *rest: Any) -> Any:
        return lax.scan(lambda a, b: body(a, b, rest), carry, xs, reverse=reverse)

    bound = c.bound + n * inner.values[added].bound if adding else _free(c).bound
    kept, made = rounded(c.shape, c.dtype if c.dtype != KEY else jax.random.key(0).dtype, bound), inner.values[out]
    if kept is None or not kept.is_exact:
        return None
    return Step("scan", function, (i, j, *others), (kept, Value((n, *made.shape), made.dtype, made.bound, made.error)))


def loop(p: Pool) -> Step | None:
    """As often as a value says."""
    i, count = p.pick(lambda v: v.is_exact), p.pick(lambda v: v.shape == (), (0,), ("int32",))
    c = p.values[i]
    if not c.is_exact:
        return None
    inner = _inner(p, [_free(c)], 3)
    others, back = _outer(p, inner, 1), _back(inner, c)

    def function(carry: Any, times: Any, *rest: Any) -> Any:
        return lax.fori_loop(0, times % 3, lambda _, a: back(inner.run([a, *rest])), carry)

    return Step("while", function, (i, count, *others), (_free(c),))


def branch(p: Pool) -> Step | None:
    i, which = p.pick(), p.pick(lambda v: v.shape == (), (0,), ("int32",))
    v = p.values[i]
    bodies = [_inner(p, [v], 2) for _ in range(2)]
    chosen = [p.choose([k for k, u in enumerate(b.values) if (u.shape, u.dtype) == (v.shape, v.dtype)][::-1]) for b in bodies]
    others = [_outer(p, b, 1) for b in bodies]
    results = [b.values[k] for b, k in zip(bodies, chosen, strict=True)]

    def function(number: Any, x: Any, *rest: Any) -> Any:
        parts = rest[: len(others[0])], rest[len(others[0]) :]
        branches = [lambda a, n=n: bodies[n].run([a, *parts[n]])[chosen[n]] for n in (0, 1)]
        return lax.switch(number, branches, x)

    result = Value(v.shape, v.dtype, max(r.bound for r in results), max(r.error for r in results))
    return Step("switch", function, (which, i, *others[0], *others[1]), (result,))


MAKERS: tuple[Maker, ...] = (*SIMPLE, scan, scan, loop, branch)
