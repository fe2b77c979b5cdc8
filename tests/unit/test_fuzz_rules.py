"""Random single ops, cut as their rules say and run part by part, give what they give whole: any shapes, parameters and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest
import rule_harness as harness
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from jax import lax
from random_steps import SIMPLE, convolution, step, window
from random_values import FLOATS, Pool, Step, array, spec
from test_rules import UNSEEN

from autopar.rules import primitives

TOLERANCE = {"float32": 1e-4, "complex64": 1e-4, "bfloat16": 4e-2, "float16": 1e-2}
UNARY = """abs acos asin asinh atan atanh cbrt ceil clz cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p
    logistic neg rsqrt sign sin sinh sqrt square tan tanh round bessel_i0e bessel_i1e acosh population_count""".split()
BINARY = "atan2 div eq ge gt le lt max min ne nextafter pow rem igamma igammac zeta polygamma".split()
WHOLE = {"clz", "population_count"}


def apply(name: str, x: Any, y: Any) -> Any:
    """An element-wise primitive by its name, on numbers between 0.1 and 0.6, or above 1."""
    above = 1 if name in ("acosh", "zeta", "polygamma") else 0
    x, y = (v.astype(jnp.int32) if name in WHOLE else (jnp.abs(v) + 1) / 8 + above for v in (x, y))
    return getattr(lax, name)(x) if name in UNARY else getattr(lax, name)(x, y)


def named(p: Pool) -> Step | None:
    name, i = p.choose((*UNARY, *BINARY)), p.pick(dtypes=("float32",))
    return step(p, name, lambda x, y: apply(name, x, y), [i, p.like(i)], 1)


def all_named(p: Pool) -> Step | None:
    i = p.pick(dtypes=("float32",), fits=lambda v: v.size > 1)
    shifts = [getattr(lax, f"shift_{n}") for n in ("left", "right_logical", "right_arithmetic")]

    def function(x: Any, y: Any) -> list[Any]:
        found, whole, both = [apply(name, x, y) for name in (*UNARY, *BINARY)], x.astype(jnp.int32), lax.complex(x, y)
        return [*found, *(shift(whole, whole & 7) for shift in shifts), lax.real(both), lax.imag(both), lax.conj(both)]

    return step(p, "all", function, [i, p.like(i)], 1)


def seldom(p: Pool) -> Step | None:
    """What no other maker makes."""
    i, j = p.leaf([p.choose((1, 2, 4, 6)) for _ in range(p.choose((1, 2)))], "float32"), p.leaf((4, 2), "uint32")
    stacked = p.leaf((p.choose((1, 2, 4)), 3, 2), "float32")
    incomplete = lambda x: lax.igamma(jnp.abs(x) + 1, jnp.full_like(x, 0.5)).sum()  # noqa: E731
    rows, sizes = p.leaf((6, 3), p.choose(FLOATS)), jnp.asarray([1, 3, 2], jnp.int32)
    weights = p.leaf((3, 3, p.choose((2, 4))), p.values[rows].dtype)
    options: dict[str, tuple[Callable, tuple[int, ...]]] = {
        "complex": (lambda x: lax.complex(x, x), (i,)),
        "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 7), (i,)),
        "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), (i,)),
        "bitcast narrower": (lambda x: lax.bitcast_convert_type(x, jnp.int16), (i,)),
        "betainc": (lambda x: jax.scipy.special.betainc(jnp.abs(x) + 1, jnp.abs(x) + 1, jnp.full_like(x, 0.3)), (i,)),
        "igamma's gradient": (jax.grad(incomplete), (i,)),
        "custom reduction": (lambda x: lax.reduce(x, np.float32(0), _joined, (0,)), (i,)),
        "custom windows": (lambda x: lax.reduce_window(x, np.float32(0), _joined, (2, 2, 1), (1, 1, 1), "SAME"), (stacked,)),
        "xor": (lambda x: lax.reduce_xor_p.bind(x, axes=(p.values[j].ndim - 1,)), (j,)),
        "or": (lambda x: lax.reduce_or_p.bind(x, axes=(0,)), (j,)),
        "and": (lambda x: lax.reduce_and_p.bind(x, axes=(0,)), (j,)),
        "approx_max_k": (lambda x: lax.approx_max_k(x, 1), (i,)),
        "hash": (lambda x: jax.extend.random.threefry2x32_p.bind(x, x, x + 1, x), (j,)),
        "tile": (lambda x: lax.tile(x, (2,) * x.ndim) if hasattr(lax, "tile") else jnp.tile(x, 2), (i,)),
        "unstack": (lambda x: jnp.unstack(x, axis=1), (stacked,)),
        "tangents of windows": (lambda x: jax.jvp(_highest, (x,), (x,)), (stacked,)),
        "ragged": (lambda x, w: lax.ragged_dot(x, w, sizes), (rows, weights)),
        "ragged gradient": (jax.grad(lambda x, w: lax.ragged_dot(x, w, sizes).sum().astype(jnp.float32), (0, 1)), (rows, weights)),
        "batch groups": (_batch_groups(p.choose((1, 2))), (p.leaf((4, 6, 4), "float32"), p.leaf((3, 4, 4), "float32"))),
        "seeds": (jax.vmap(jax.random.key), (p.leaf((4,), "int32"),)),
        "wrap": (lambda x: jax.random.wrap_key_data(x), (j,)),
    }
    name = p.choose(options)
    function, operands = options[name]
    return Step(name, function, operands, ())


def _joined(a: Any, b: Any) -> Any:
    return a * b + a + b


def _highest(x: Any) -> Any:
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME")


def _batch_groups(stride: int) -> Callable:
    numbers = ("NHC", "HIO", "NHC")
    return lambda x, w: lax.conv_general_dilated(x, w, (stride,), "SAME", dimension_numbers=numbers, batch_group_count=2)


def matrix(p: Pool) -> Step | None:
    """Linear algebra over random batches. The compiler takes long over it."""
    batch, n = [p.choose((1, 2, 3, 4)) for _ in range(p.choose((1, 2)))], p.choose((2, 3))
    i, j = p.leaf((*batch, n, n), "float32"), p.leaf((*batch, n), "float32")
    positive = lambda x: x @ x.mT + 9 * jnp.eye(n)  # noqa: E731
    solve = jax.lax.linalg.triangular_solve
    options: dict[str, tuple[Callable, tuple[int, ...]]] = {
        "cholesky": (lambda x: jax.lax.linalg.cholesky(positive(x)), (i,)),
        "lu": (lambda x: jax.lax.linalg.lu(positive(x)), (i,)),
        "qr": (lambda x: jax.lax.linalg.qr(positive(x), full_matrices=False), (i,)),
        "householder": (lambda x, t: jax.lax.linalg.householder_product(x, t), (i, j)),
        "svd": (lambda x: jnp.linalg.svd(positive(x), compute_uv=False), (i,)),
        "geqrf": (lambda x: jnp.linalg.qr(positive(x), mode="raw"), (i,)),
        "eigh": (lambda x: jnp.linalg.eigvalsh(positive(x)), (i,)),
        "solve": (lambda x, y: solve(positive(x), y[..., None], left_side=True, lower=True), (i, j)),
        "solve right": (lambda x, y: solve(positive(x), y[..., None, :], left_side=False, lower=False), (i, j)),
        "tridiagonal": (lambda x: jax.lax.linalg.tridiagonal(positive(x)), (i,)),
        "tridiagonal solve": (lambda y: jax.lax.linalg.tridiagonal_solve(y, y + 9, y, y[..., None]), (j,)),
        "pivots": (lambda y: jax.lax.linalg.lu_pivots_to_permutation(jnp.abs(y).astype(jnp.int32), 4), (j,)),
        "hessenberg": (lambda x: jax.lax.linalg.hessenberg(positive(x)), (i,)),
        "schur": (lambda x: jax.lax.linalg.schur(positive(x)), (i,)),
        "eig": (lambda x: jax.lax.linalg.eig(positive(x), compute_left_eigenvectors=False, compute_right_eigenvectors=False), (i,)),
        "gamma": (lambda y: jax.vmap(jax.random.gamma)(jax.random.split(jax.random.key(0), y.size), jnp.abs(y.ravel()) + 1), (j,)),
    }
    name = p.choose(options)
    function, operands = options[name]
    return Step(name, function, operands, ())


@st.composite
def ops(draw: Any, makers: tuple[Callable, ...]) -> tuple[Pool, Step]:
    pool = Pool(draw)
    made = None
    while made is None:
        made = draw(st.sampled_from(makers))(pool)
    return pool, made


def run(pool: Pool, made: Step, number: int) -> None:
    """Every op of the step that can be cut, under one strategy each, more where the rule has a method of its own."""
    rng = np.random.default_rng(number)
    arguments = [array(pool.values[i], number + i) for i in made.operands]
    for case in harness.cases(made.function, *arguments):
        found = harness.strategies(case.rule, rng, 2)
        special = [s for s in found if any(case.rule.method[f] != "plain" for f, _ in s.cuts)]
        for strategy in {found[int(rng.integers(len(found)))], *special[:1]} if found else ():
            try:
                for a, e in zip(harness.run(case, strategy, rng), case.results, strict=True):
                    harness.assert_same(a, e, TOLERANCE.get(case.avals_in[0].dtype if case.avals_in else "", 1e-4))
            except Exception as error:
                raise AssertionError(f"{made.label}: {case.op} {case.avals} {case.rule} under {strategy}") from error


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.large_base_example]
SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=QUIET, phases=(Phase.generate, Phase.shrink))
OFTEN = (*SIMPLE, named, named, seldom)
EVERY = (*dict.fromkeys(SIMPLE), all_named, seldom, matrix)
MORE = {all_named: 3, seldom: 60, matrix: 40, convolution: 60, window: 40}
"""How many examples of kinds that hold many primitives."""


@pytest.fixture(autouse=True)
def unoptimised():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@settings(SETTINGS, max_examples=120)
@given(ops(OFTEN), st.integers(0, 99))
def test_a_random_op_run_part_by_part_gives_what_it_gives_whole(op, number):
    run(*op, number)


@pytest.mark.slow
@pytest.mark.parametrize("maker", EVERY, ids=lambda m: m.__name__)
def test_random_ops_of_each_kind_run_part_by_part_give_what_they_give_whole(maker):
    @settings(SETTINGS, max_examples=MORE.get(maker, 14))
    @given(ops((maker,)), st.integers(0, 99))
    def each(op, number):
        run(*op, number)

    each()


@pytest.mark.slow
def test_random_ops_bring_up_every_primitive_with_a_rule():
    seen: set[str] = set()

    wanted = set(primitives()) - UNSEEN - {"shard_map"}

    @settings(SETTINGS, max_examples=30, phases=[Phase.generate])
    @given(st.data())
    def bring_up(data):
        for maker in EVERY:
            pool = Pool(data.draw)
            made = maker(pool)
            if made is not None:
                seen.update(op.primitive for op, _ in harness.ops(made.function, *(spec(pool.values[i]) for i in made.operands)))

    for n in range(20):
        if wanted - seen:
            seed(n)(bring_up)()
    assert wanted - seen == set()
