"""Ops that are cut by a method with collectives of its own: planned as compiled, one device's numbers, and chosen where they pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from benchmarks import forced
from benchmarks.programs import Program, program


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def running_totals() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Sums, products and extremes up to here, from both ends, differentiated; the sums inside a loop too."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.cumsum(x @ w, 1) + lax.cumlogsumexp(x, axis=1, reverse=True)
        return jnp.sum(jnp.tanh(y) * lax.cummax(x, axis=1)) + jnp.sum(jnp.cumprod(1 + 0.1 * x, 0))

    def step(w: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        turned, _ = lax.scan(lambda c, _: (jnp.sin(lax.cumsum(c, axis=1)), None), x, None, length=2)
        return w - 0.1 * jax.grad(loss)(w, x), turned, jnp.cumsum(n), lax.cummin(n, reverse=True)

    return step, (normal(0, 24, 24), normal(1, 6, 24), np.arange(24, dtype=np.int32)[::-1] % 7)


def extremes() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The best word of each row, ties and all, and what a lookup makes of it."""

    def step(w: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        best = jnp.argmax(x @ w, -1)
        return best, w.T[best], jnp.argmin(n, 0), jnp.argmax((x @ w).astype(jnp.bfloat16), -1), jnp.argmax(n > 3, 1)

    return step, (normal(0, 12, 24), normal(1, 8, 12), np.random.default_rng(2).integers(0, 5, (24, 8)))


def images() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One picture: overlapping windows, strides, a transposed convolution, an overlapping pool, and all gradients."""

    def conv(x: jax.Array, w: jax.Array, stride: int = 1, **more: Any) -> jax.Array:
        return lax.conv_general_dilated(x, w, (stride, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(conv(x, p["a"]))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 1, 1, 1), "SAME")
        y = jnp.sin(conv(y, p["b"], 2, rhs_dilation=(2, 1)))
        y = lax.conv_transpose(y, p["c"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(y**2) + jnp.sum(lax.reduce_window(y, 0.0, lax.add, (1, 5, 1, 1), (1, 1, 1, 1), "SAME") ** 3)

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, grads), value

    return step, ({"a": normal(0, 3, 3, 2, 3), "b": normal(1, 3, 1, 3, 3), "c": normal(2, 4, 2, 3, 2)}, normal(3, 1, 24, 6, 2))


def unpadded() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Fewer windows than pixels, whose blocks drift apart: a convolution, an overlapping pool, and their gradients."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NHC", "HIO", "NHC"))
        return jnp.sum(lax.reduce_window(y, -jnp.inf, lax.max, (1, 5, 1), (1, 1, 1), "VALID") ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(0, 5, 2, 3), normal(1, 1, 24, 2))


STEPS = {f.__name__: f for f in (running_totals, extremes, images, unpadded)}
METHODS = {"running_totals": "prefix", "extremes": "arg_pair", "images": "halo", "unpadded": "halo"}


@cache
def made(name: str) -> Program:
    with jax.enable_x64(True):
        return program(name, *STEPS[name]())


ON_THREE = [name for name in STEPS if name != "unpadded"]
"""Steps with what three devices can share; the 20 windows of the other are not."""


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, (2, 4)) for name in STEPS), *(pytest.param(name, (3,), marks=pytest.mark.slow) for name in ON_THREE)]
)
def test_random_plans_cut_by_the_method_and_run_as_planned(name, sizes):
    seen = Counter()
    for seed in range(3):
        row = forced.row(made(name), sizes, "random", seed, seen)
        assert row.status == "agree", forced.table([row])
    assert any(method == METHODS[name] for _, method, _ in seen)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_borders_of_narrow_floats_travel_as_they_are_and_serve_both_a_convolution_and_its_gradient(dtype):
    def step(x, w):
        conv = lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
        return jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1))(x, w)

    args = [jnp.asarray(normal(n, *shape), dtype) for n, shape in enumerate(((2, 24, 2), (3, 2, 4)))]
    truth = [np.asarray(x) for x in step(*(np.asarray(x, np.float32) for x in args))]
    subject, seen = program("narrow", step, args, "bfloat16", truth), Counter()
    for seed in range(4):
        row = forced.row(subject, (8,), "random", seed, seen)
        assert row.status == "agree", forced.table([row])
    assert ("conv_general_dilated", "halo") in {(primitive, method) for primitive, method, _ in seen}


def collectives(function: Callable[..., Any], *args: Any) -> list[tuple[str, int, str]]:
    plan = autopar.plan(function, args, "fast-link:8")
    checked = plan.verify(function, args)
    assert checked.numbers.agree and checked.collectives.agree, str(checked)
    return [(c.kind, c.nbytes, c.purpose) for c in plan.collectives]


def test_a_long_running_sum_is_cut_along_itself_for_the_price_of_its_totals():
    x = normal(0, 1, 1 << 16).astype(np.float32)
    assert collectives(lambda x: jnp.sin(jnp.cumsum(jnp.cos(x), 1)), x) == [("all_gather", 4, "gather in cumsum")]


def test_the_best_of_many_words_is_found_without_gathering_them():
    w, x = normal(0, 64, 1 << 14).astype(np.float32), normal(1, 1, 64).astype(np.float32)
    found = collectives(lambda x, w: jnp.argmax(x @ w, -1), x, w)
    assert found == [("all_gather", 4, "gather in argmax")] * 2


def test_one_large_picture_is_cut_along_space_with_borders_of_the_neighbours():
    x, w = normal(0, 1, 1024, 256, 4).astype(np.float32), normal(1, 3, 3, 4, 4).astype(np.float32)

    def layers(x, w):
        for _ in range(2):
            x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return x

    rows = ("permute", 256 * 4 * 4, "shift in conv_general_dilated")
    assert collectives(layers, x, w) == [rows] * 4
