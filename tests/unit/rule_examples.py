"""Small functions that bring up every primitive with a rule, named, with arguments made under 64-bit mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec as P

_RNG = np.random.default_rng(7)


def real(*shape: int) -> jax.Array:
    """Values between 0.2 and 0.8: in the domain of nearly all functions."""
    return jnp.asarray(_RNG.uniform(0.2, 0.8, shape))


def whole(*shape: int, high: int = 5) -> jax.Array:
    return jnp.asarray(_RNG.integers(0, high, shape), jnp.int32)


def imaginary(*shape: int) -> jax.Array:
    return real(*shape) + 1j * real(*shape)


def unary() -> list[tuple[str, Callable, tuple]]:
    names = """abs acos asin asinh atan atanh cbrt ceil cos cosh erf erfc exp exp2 expm1 floor
        is_finite log log1p logistic neg rsqrt sign sin sinh sqrt square stop_gradient tan tanh round""".split()
    x = real(4, 1, 2)
    found = [(n, getattr(lax, n), (x,)) for n in names]
    found += [("acosh", lax.acosh, (x + 1,)), ("integer_pow", lambda v: lax.integer_pow(v, 3), (x,))]
    return found


def special() -> list[tuple[str, Callable, tuple]]:
    x = real(4, 2)
    names = "digamma erf_inv lgamma bessel_i0e bessel_i1e".split()
    keys = jax.random.split(jax.random.key(3), 4)
    return [
        *((n, getattr(lax, n), (x,)) for n in names),
        *((n, getattr(lax, n), (x + 1, real(4, 2))) for n in ("igamma", "igammac", "zeta", "polygamma")),
        ("incomplete beta", lambda a: jax.scipy.special.betainc(a, a, a), (x,)),
        ("incomplete gamma's gradient", jax.grad(lambda a: lax.igamma(a, 0.5).sum()), (x,)),
        ("gamma", jax.vmap(lambda k, a: jax.random.gamma(k, a)), (keys, real(4))),
        ("gamma's gradient", jax.grad(lambda a: jax.random.gamma(jax.random.key(1), a).sum()), (real(4),)),
    ]


def binary() -> list[tuple[str, Callable, tuple]]:
    names = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub".split()
    a, b = real(4, 2), real(4, 2)
    found = [(n, getattr(lax, n), (a, b)) for n in names]
    i, j, p, q = whole(4, 2), whole(4, 2) + 1, whole(4, 2) > 2, whole(4, 2) > 2
    for n in ("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"):
        found.append((n, getattr(lax, n), (i, j)))
    for n in ("add", "mul", "div", "max", "sub", "rem"):
        found.append((f"{n} of integers", getattr(lax, n), (i, j)))
    for n in ("bitwise_and", "bitwise_or"):
        found.append((f"{n} of bools", getattr(lax, n), (p, q)))
    found += [("mulhi", lax.mulhi, (i, j))] if hasattr(lax, "mulhi") else []
    found += [("not", lax.bitwise_not, (p,)), ("population_count", lax.population_count, (i,)), ("clz", lax.clz, (i,))]
    return found


def pointwise() -> list[tuple[str, Callable, tuple]]:
    x, y, p = real(4, 2), real(4, 2), whole(4, 2) > 2
    return [
        ("broadcast of size one", lambda a, b: lax.mul_p.bind(a, b), (real(4, 1), real(1, 2))),
        ("add a literal zero", lambda a: a + 0.0, (x,)),
        ("add a literal", lambda a: a + 2.0, (x,)),
        ("relu", lambda a: lax.max(a, 0.5), (x,)),
        ("literal times", lambda a: 2.0 * a, (x,)),
        ("divide by a literal", lambda a: a / 2.0, (x,)),
        ("literal divided", lambda a: 2.0 / a, (x,)),
        ("select", lambda c, a, b: lax.select(c, a, b), (p, x, y)),
        ("select by a scalar", lambda c, a, b: lax.select_n(c, a, b), (jnp.asarray(True), x, y)),
        ("select zero", lambda c, a: lax.select(c, a, jnp.zeros_like(a)), (p, x)),
        ("select bools", lambda c, a, b: lax.select(c, a, b), (p, p, ~p)),
        ("clamp", lambda a: lax.clamp(0.3, a, 0.6), (x,)),
        ("clamp by arrays", lambda a, b: lax.clamp(b, a, b + 0.1), (x, y)),
        ("convert", lambda a: (a.astype(jnp.float32), a.astype(jnp.int32), a.astype(jnp.complex128)), (x,)),
        ("convert wider", lambda a: a.astype(jnp.float64), (x.astype(jnp.float32),)),
        ("convert an integer", lambda a: a.astype(jnp.float64), (whole(4, 2),)),
        ("bitcast", lambda a: lax.bitcast_convert_type(a, jnp.int64), (x,)),
        ("bitcast narrower", lambda a: lax.bitcast_convert_type(a, jnp.int32), (x,)),
        ("bitcast wider", lambda a: lax.bitcast_convert_type(a, jnp.int64), (whole(4, 2),)),
        ("complex", lambda a, b: lax.complex(a, b), (x, y)),
        ("parts", lambda a: (lax.real(a), lax.imag(a), lax.conj(a)), (imaginary(4, 2),)),
        ("reduce_precision", lambda a: lax.reduce_precision(a, 5, 10), (x,)),
        ("copy", jnp.copy, (x,)),
        ("barrier", lambda a, b, c: lax.optimization_barrier((a, b, c)), (x, real(2, 3), whole(4))),
        ("checkpoint name", lambda a: checkpoint_name(a, "here"), (x,)),
        ("fan out", jax.grad(lambda a: (a * a + jnp.sin(a) * a).sum()), (x,)),
    ]


def products() -> list[tuple[str, Callable, tuple]]:
    ragged = lax.ragged_dot
    return [
        ("matmul", jnp.matmul, (real(4, 6), real(6, 2))),
        ("batched matmul", lambda a, b: jnp.einsum("bhqk,bkhd->bqhd", a, b), (real(2, 2, 4, 2), real(2, 2, 2, 4))),
        ("two contractions", lambda a, b: jnp.tensordot(a, b, 2), (real(4, 2, 4), real(2, 4, 2))),
        ("integers", jnp.matmul, (whole(4, 6), whole(6, 2))),
        (
            "narrow integers",
            lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
            (whole(4, 6).astype(jnp.int8),) * 1 + (whole(6, 2).astype(jnp.int8),),
        ),
        ("complex matmul", jnp.matmul, (imaginary(4, 6), imaginary(6, 2))),
        ("outer", jnp.outer, (real(4), real(2))),
        ("matmul gradient", jax.grad(lambda a, b: (jnp.tanh(a @ b) ** 2).sum(), (0, 1)), (real(4, 6), real(6, 2))),
        ("ragged", ragged, (real(4, 6), real(3, 6, 2), jnp.asarray([1, 2, 1], jnp.int32))),
        ("ragged gradient", jax.grad(lambda a, b: ragged(a, b, jnp.asarray([1, 3], jnp.int32)).sum(), (0, 1)), (real(4, 6), real(2, 6, 2))),
    ]


def _conv(x: Any, w: Any, stride: int = 1, padding: str = "SAME", **more: Any) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


def _conv_grad(*shapes: tuple[int, ...], **more: Any) -> tuple[Callable, tuple]:
    return jax.grad(lambda x, w: (_conv(x, w, **more) ** 2).sum(), (0, 1)), tuple(real(*s) for s in shapes)


def convolutions() -> list[tuple[str, Callable, tuple]]:
    return [
        ("conv", *_conv_grad((4, 4, 4, 2), (3, 3, 2, 4))),
        ("strided conv", *_conv_grad((4, 6, 6, 2), (3, 3, 2, 4), stride=2)),
        ("transposed conv", *_conv_grad((2, 4, 4, 2), (3, 3, 2, 2), padding=((1, 2), (2, 1)), lhs_dilation=(2, 2))),
        ("patches", *_conv_grad((2, 8, 4, 2), (4, 2, 2, 4), stride=4, padding="VALID")[:1], (real(2, 8, 8, 2), real(4, 4, 2, 4))),
        ("grouped conv", *_conv_grad((2, 4, 4, 8), (3, 3, 4, 8), feature_group_count=2)),
        ("batch groups", lambda x, w: _conv(x, w, batch_group_count=2), (real(4, 4, 4, 2), real(3, 3, 2, 8))),
    ]


def more_convolutions() -> list[tuple[str, Callable, tuple]]:
    return [
        ("dilated conv", *_conv_grad((2, 6, 6, 2), (2, 2, 2, 2), rhs_dilation=(2, 2))),
        ("pixel conv", *_conv_grad((4, 2, 4, 2), (1, 1, 2, 4))),
        ("strided patches", jax.grad(lambda x, w: (_conv(x, w, 4, "VALID") ** 2).sum(), (0, 1)), (real(2, 16, 8, 2), real(4, 4, 2, 4))),
        ("unpadded conv", *_conv_grad((2, 10, 8, 2), (3, 5, 2, 2), padding="VALID")),
        ("unpadded strided conv", *_conv_grad((2, 10, 12, 2), (4, 3, 2, 2), stride=3, padding=((0, 1), (1, 0)))),
        ("unpadded dilated conv", *_conv_grad((2, 10, 6, 2), (2, 2, 2, 2), rhs_dilation=(2, 2), padding="VALID")),
        ("full kernel", *_conv_grad((2, 4, 2, 2), (4, 2, 2, 4), padding="VALID")),
        ("depthwise conv", *_conv_grad((2, 4, 4, 4), (3, 3, 1, 8), feature_group_count=4)),
        ("channels first", lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (real(2, 4, 4, 4), real(4, 4, 3, 3))),
    ]


def reductions() -> list[tuple[str, Callable, tuple]]:
    x, i, p = real(4, 2, 6), whole(4, 2, 6), whole(4, 2, 6) > 1
    ties = jnp.asarray([[1, 5], [5, 2], [3, 5], [5, 5], [0, 1], [0, 0], [2, 0], [5, 1]], jnp.int32)
    odd = jnp.asarray([[1, -jnp.inf], [jnp.inf, -jnp.inf], [2, jnp.nan], [jnp.nan, 3]] * 2, jnp.float32)
    found: list[tuple[str, Callable, tuple]] = [
        (n, lambda a, n=n: getattr(jnp, n)(a, axis=(0, 2)), (x,)) for n in ("sum", "max", "min", "prod")
    ]
    found += [(f"{n} of integers", lambda a, n=n: getattr(jnp, n)(a, axis=1), (i,)) for n in ("sum", "max")]
    found += [("all", lambda a: jnp.all(a, 0), (p,)), ("any", lambda a: jnp.any(a, (0, 1)), (p,))]
    found += [
        ("or of integers", lambda a: lax.reduce_or_p.bind(a, axes=(0,)), (i,)),
        ("xor", lambda a: lax.reduce_xor_p.bind(a, axes=(0,)), (i,)),
    ]
    found += [(n, lambda a, n=n: getattr(jnp, n)(a, axis=1), (x,)) for n in ("argmax", "argmin")]
    found += [("nothing reduced", lambda a: lax.reduce_sum_p.bind(a, axes=(), out_sharding=None), (x,))]
    for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        found.append((n, lambda a, n=n: getattr(lax, n)(a, axis=1), (x,)))
        found.append((f"{n} from the end", lambda a, n=n: getattr(lax, n)(a, axis=0, reverse=True), (odd,)))
    found += [(f"{n} of integers", lambda a, n=n: getattr(lax, n)(a, axis=0), (ties,)) for n in ("cumsum", "cumprod", "cummax", "cummin")]
    found += [(f"{n} of what is odd", lambda a, n=n: getattr(jnp, n)(a, axis=0), (odd,)) for n in ("argmax", "argmin")]
    found += [(f"{n} with ties", lambda a, n=n: getattr(jnp, n)(a, axis=0), (ties,)) for n in ("argmax", "argmin")]
    found += [
        ("softmax", jax.grad(lambda a: (jax.nn.softmax(a) ** 2).sum()), (real(4, 6),)),
        ("custom reduction", lambda a: lax.reduce(a, 0.0, lambda u, v: u * v + u + v, (1,)), (x,)),
        ("sort", lambda a: jnp.sort(a, axis=1), (x,)),
        ("sort together", lambda a, b: lax.sort((a, b), dimension=0, num_keys=2), (whole(4, 2), real(4, 2))),
        ("top_k", lambda a: lax.top_k(a, 3), (x,)),
        ("approx_max_k", lambda a: lax.approx_max_k(a, 2), (x,)),
    ]
    return found


def _pool(x: Any, init: Any, op: Callable, padding: str = "VALID") -> jax.Array:
    return lax.reduce_window(x, init, op, (1, 2, 2, 1), (1, 2, 2, 1), padding)


def _overlapping(x: Any, init: Any, op: Callable) -> jax.Array:
    return lax.reduce_window(x, init, op, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _unpadded(x: Any, init: Any, op: Callable) -> jax.Array:
    return lax.reduce_window(x, init, op, (1, 3, 2, 1), (1, 1, 2, 1), "VALID")


def _apart(x: Any, init: Any, op: Callable) -> jax.Array:
    """Windows that leave gaps, and end before the image does."""
    return lax.reduce_window(x, init, op, (1, 1, 2, 1), (1, 2, 3, 1), ((0, 0), (0, 0), (1, 0), (0, 0)))


def windows() -> list[tuple[str, Callable, tuple]]:
    x = real(4, 4, 4, 2)
    return [
        ("max pool", jax.grad(lambda a: (_pool(a, -jnp.inf, lax.max) ** 2).sum()), (x,)),
        ("min pool", lambda a: _pool(a, jnp.inf, lax.min), (x,)),
        ("mean pool", jax.grad(lambda a: (_pool(a, 0.0, lax.add, "SAME") ** 2).sum()), (real(4, 3, 5, 2),)),
        ("unpadded max pool", jax.grad(lambda a: (_unpadded(a, -jnp.inf, lax.max) ** 2).sum()), (real(2, 10, 8, 2),)),
        ("unpadded mean pool", jax.grad(lambda a: (_unpadded(a, 0.0, lax.add) ** 2).sum()), (real(2, 10, 8, 2),)),
        ("max pool with gaps", jax.grad(lambda a: (_apart(a, -jnp.inf, lax.max) ** 2).sum()), (real(2, 8, 12, 2),)),
        ("custom pool", lambda a: _pool(a, 0.0, lambda u, v: u * v + u + v), (x,)),
        ("overlapping max pool", jax.grad(lambda a: (_overlapping(a, -jnp.inf, lax.max) ** 2).sum()), (real(2, 8, 8, 2),)),
        ("overlapping mean pool", jax.grad(lambda a: (_overlapping(a, 0.0, lax.add) ** 2).sum()), (real(2, 8, 8, 2),)),
        ("wide windows", lambda a: lax.reduce_window(a, jnp.inf, lax.min, (1, 5), (1, 1), "SAME", None, (1, 2)), (whole(4, 8) * 1.0,)),
        ("max of integers", lambda a: lax.reduce_window(a, jnp.int32(-(2**31)), lax.max, (3, 1), (1, 1), ((2, 0), (0, 0))), (whole(8, 2),)),
        ("max pool tangents", lambda a: jax.jvp(lambda v: _pool(v, -jnp.inf, lax.max), (a,), (a,)), (x,)),
    ]


def shapes() -> list[tuple[str, Callable, tuple]]:
    x = real(4, 6)
    reshapes = [((4, 6), (2, 2, 6)), ((4, 6), (24,)), ((24,), (4, 3, 2)), ((4, 3), (6, 2)), ((4, 6), (8, 3)), ((2, 4, 3), (8, 1, 3))]
    reshapes += [((6, 4), (4, 6)), ((1, 4, 1), (4,)), ((4, 2, 4), (2, 4, 4)), ((8, 3, 4), (4, 6, 4)), ((1,), ())]
    found: list[tuple[str, Callable, tuple]] = [(f"reshape {a} to {b}", lambda v, b=b: lax.reshape(v, b), (real(*a),)) for a, b in reshapes]
    return found + [
        ("reshape bools", lambda v: lax.reshape(v, (2, 2, 3)), (whole(4, 3) > 1,)),
        ("transpose", lambda v: v.transpose(2, 0, 1), (real(2, 4, 2),)),
        ("broadcast", lambda v: lax.broadcast_in_dim(v, (4, 2, 6), (0, 2)), (real(4, 1),)),
        ("broadcast a scalar", lambda v: lax.broadcast_in_dim(v, (4, 2), ()), (real(),)),
        ("zeros", lambda: jnp.zeros((4, 2)), ()),
        ("squeeze", lambda v: lax.squeeze(v, (1,)), (real(4, 1, 2),)),
        ("rev", lambda v: lax.rev(v, (1,)), (x,)),
        ("concatenate", lambda a, b: jnp.concatenate([a, b], 1), (real(4, 2), real(4, 6))),
        ("stack", lambda a, b: jnp.stack([a, b], 1), (x, x + 1)),
        ("unstack", lambda a: jnp.unstack(a, axis=1), (x,)),
        ("split", lambda v: lax.split(v, (2, 4), 1), (x,)),
        ("pad with zero", lambda v: lax.pad(v, 0.0, ((0, 0, 0), (1, 2, 1))), (x,)),
        ("pad with one", lambda v: lax.pad(v, 1.0, ((1, -1, 0), (0, 0, 0))), (x,)),
        ("pad with a value", lambda v, p: lax.pad(v, p, ((0, 0, 0), (1, 0, 0))), (x, real())),
        ("tile", lambda v: jnp.tile(v, (2, 4)), (real(4, 2),)),
        ("iota", lambda: (lax.iota(jnp.int32, 8), lax.broadcasted_iota(jnp.float64, (4, 8), 1), jnp.arange(4.0)), ()),
        ("large iota in a narrow float", lambda: lax.iota(jnp.float16, 4096), ()),
    ]


def lookups() -> list[tuple[str, Callable, tuple]]:
    """Indices out of bounds on both sides are among them."""
    table, ids = real(8, 4), jnp.asarray([[0, 7, 3], [9, -20, 5]], jnp.int32)
    found: list[tuple[str, Callable, tuple]] = []
    for mode in ("clip", "fill", "promise_in_bounds"):
        found.append((f"embedding, {mode}", jax.grad(lambda t, i, m=mode: (t.at[i].get(mode=m) ** 2).sum()), (table, ids)))
        found.append((f"embedding, {mode}, batch of four", lambda t, i, m=mode: t.at[i].get(mode=m), (whole(8, 4), whole(4, 2, high=12))))
        found.append(
            (f"two indices, {mode}", lambda t, i, j, m=mode: t.at[i, j].get(mode=m), (real(4, 8, 2), whole(4, high=6), whole(4, high=10)))
        )
        found.append((f"scatter, {mode}", lambda t, i, u, m=mode: t.at[i].set(u, mode=m), (table, jnp.asarray([1, 6, 9, 3]), real(4, 4))))
        found.append(
            (f"scatter-add, {mode}", lambda t, i, u, m=mode: t.at[i].add(u, mode=m), (table, jnp.asarray([1, 6, 9, 1]), real(4, 4)))
        )
    x, along = real(4, 8), whole(4, 2, high=8)
    return found + [
        ("fill value", lambda t, i: t.at[i].get(mode="fill", fill_value=3), (whole(8, 4), whole(4, 2, high=12))),
        ("fill zero", lambda t, i: t.at[i].get(mode="fill", fill_value=0), (table, whole(4, 2, high=12))),
        ("lookup of bools", lambda t, i: t.at[i].get(mode="fill"), (whole(8, 4) > 2, whole(4, high=12))),
        ("small unsigned indices", lambda t, i: t.at[i].get(mode="fill"), (table, whole(4, high=12).astype(jnp.uint8))),
        ("take along axis", jax.grad(lambda a, i: (jnp.take_along_axis(a, i, 1) ** 2).sum()), (x, along)),
        ("window", lambda a, i: jax.vmap(lambda s: lax.dynamic_slice(a, (s, jnp.int32(0)), (2, 4)))(i), (table, whole(4, high=6))),
        ("batched dynamic slice", lambda a, i: jax.vmap(lambda r, s: lax.dynamic_slice(r, (s,), (3,)))(a, i), (x, whole(4, high=6))),
        (
            "single element window",
            lambda a, i: jax.vmap(lambda s: lax.dynamic_slice(a, (s, jnp.int32(0)), (1, 4)))(i),
            (table, whole(4, high=6)),
        ),
        (
            "batched update",
            lambda a, u, i: jax.vmap(lambda r, v, s: lax.dynamic_update_slice(r, v, (s,)))(a, u, i),
            (x, real(4, 2), whole(4, high=6)),
        ),
        ("scatter-mul", lambda t, i, u: t.at[i].multiply(u), (table, jnp.asarray([1, 6, 2, 1]), real(4, 4))),
        ("scatter-max", lambda t, i, u: t.at[i].max(u), (table, jnp.asarray([1, 6, 2, 1]), real(4, 4))),
        ("scatter-min", lambda t, i, u: t.at[i].min(u), (table, jnp.asarray([1, 6, 2, 1]), real(4, 4))),
        ("scatter-sub", lambda t, i, u: t.at[i].subtract(u), (table, jnp.asarray([1, 6, 2, 1]), real(4, 4))),
        ("scatter-add of integers", lambda t, i, u: t.at[i].add(u), (whole(8, 4), whole(4, high=8), whole(4, 4))),
        ("scatter elements", lambda t, i, j, u: t.at[i, j].add(u), (table, whole(4, high=8), whole(4, high=4), real(4))),
        ("scatter columns", lambda t, i, u: t.at[:, i].add(u), (table, whole(2, high=4), real(8, 2))),
        ("slice", lambda a: a[:, 2:6], (x,)),
        ("strided slice", lambda a: a[1::2, :], (x,)),
        ("dynamic_slice", lambda a, i: lax.dynamic_slice(a, (i, 0), (2, 8)), (x, jnp.asarray(1))),
        ("dynamic_update_slice", lambda a, u, i: lax.dynamic_update_slice(a, u, (0, i)), (x, real(4, 2), jnp.asarray(3))),
    ]


def randoms() -> list[tuple[str, Callable, tuple]]:
    keys = jax.random.split(jax.random.key(3), 4)
    return [
        ("seed", jax.vmap(jax.random.key), (whole(4),)),
        ("split", jax.vmap(lambda k: jax.random.split(k, 2)), (keys,)),
        ("fold_in", jax.vmap(jax.random.fold_in), (keys, whole(4))),
        ("bits", jax.vmap(lambda k: jax.random.bits(k, (2, 3))), (keys,)),
        ("one key's bits", lambda k: jax.random.bits(k, (4, 2)), (keys[0],)),
        ("raw keys", lambda k: jax.random.wrap_key_data(jax.random.key_data(k)), (keys,)),
        ("clone", jax.random.clone, (keys,)),
        ("hash", jax.extend.random.threefry2x32_p.bind, tuple(whole(4, 2).astype(jnp.uint32) for _ in range(4))),
        ("dropout", lambda k: jax.random.bernoulli(k, 0.5, (4, 2)), (keys[0],)),
        ("lookup of keys", lambda k, i: k[i], (keys, whole(4, high=4))),
    ]


def matrices() -> list[tuple[str, Callable, tuple]]:
    a = real(2, 4, 4)
    spd = a @ a.swapaxes(1, 2) + 2 * jnp.eye(4)
    return [
        ("cholesky", jnp.linalg.cholesky, (spd,)),
        ("lu", jax.lax.linalg.lu, (spd,)),
        ("qr", lambda v: jax.lax.linalg.qr(v, full_matrices=False), (spd,)),
        ("svd", lambda v: jnp.linalg.svd(v, compute_uv=False), (a,)),
        ("eigh", lambda v: jnp.linalg.eigvalsh(v), (spd,)),
        ("eig", lambda v: jax.lax.linalg.eig(v, compute_left_eigenvectors=False, compute_right_eigenvectors=False), (spd,)),
        ("triangular solve", lambda v, b: jax.lax.linalg.triangular_solve(v, b, left_side=True, lower=True), (spd, real(2, 4, 2))),
        ("householder", lambda v, t: jax.lax.linalg.householder_product(v, t), (a, real(2, 4))),
        ("geqrf", lambda v: jnp.linalg.qr(v, mode="raw"), (spd,)),
        ("pivots", lambda v: jax.lax.linalg.lu_pivots_to_permutation(v, 4), (jnp.asarray([[1, 2], [3, 3]], jnp.int32),)),
        ("hessenberg", jax.lax.linalg.hessenberg, (a,)),
        ("schur", jax.lax.linalg.schur, (spd,)),
        ("tridiagonal", lambda v: jax.lax.linalg.tridiagonal(v), (spd,)),
        ("tridiagonal solve", jax.lax.linalg.tridiagonal_solve, (real(2, 4), real(2, 4) + 2, real(2, 4), real(2, 4, 1))),
        ("fft", jnp.fft.fft, (imaginary(4, 2, 3),)),
        ("rfft2", jnp.fft.rfft2, (real(4, 2, 4),)),
        ("irfft", lambda v: jnp.fft.irfft(v, 6), (imaginary(4, 2, 4),)),
    ]


def manual() -> list[tuple[str, Callable, tuple]]:
    mesh, options = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")), {"check_vma": False}
    rows = lambda a, b: (lax.psum(a @ b, "x"), lax.all_gather(a, "x", axis=1, tiled=True) + lax.psum(lax.axis_index("y"), "y"))  # noqa: E731
    part = lambda a: lax.psum_scatter(lax.psum_scatter(a * lax.axis_index("x"), "x", tiled=True), "y", tiled=True)  # noqa: E731
    by_hand = jax.shard_map(rows, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=(P(), P()), **options)
    scattered = jax.shard_map(part, mesh=mesh, in_specs=P(None, "x"), out_specs=P(("x", "y")), **options)
    return [("by hand", by_hand, (real(4, 6), real(6, 2))), ("scattered", scattered, (real(4, 6),))]


FAMILIES = (unary, binary, pointwise, products, convolutions, reductions, windows, shapes, lookups, randoms, manual)
SLOW = (special, more_convolutions, matrices)  # the compiler takes seconds over each
