"""Sharding rules and lowerings: each op, run part by part, must give what it gives whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_examples as examples
import rule_harness as harness
from jax import lax

from autopar.emit.lower import METHODS, lower
from autopar.errors import CheckError, RuleError
from autopar.ir.graph import BOUNDARY, GATE, Aval, Constant, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import Pass
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import WHOLE, Strategy, is_legal, result_sharding
from autopar.rules import OPAQUE, has_rule, primitives, register_rule, remove_rule, rule_for, why_whole
from autopar.rules.notation import instantiate, parse
from autopar.rules.shape import refine

POINTWISE = {examples.unary, examples.binary, examples.pointwise, examples.special}
# Names of other JAX versions, what only sort comparators and uninitialised buffers use, and constraints and
# gates and what stands between loops and the rest (tested where they are made).
UNSEEN = {"copy_p", "empty", "eq_to", "le_to", "log2", "lt_to", "mulhi", "one_minus_square", "pin", "polynomial", "random_gamma_grad"}
UNSEEN |= BOUNDARY | {GATE}


@pytest.fixture(autouse=True)
def sixty_four_bits() -> Iterator[None]:
    """Double precision, compiled without optimisation, which would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_disable_most_optimizations", before)


def family_cases(family: Callable) -> Iterator[tuple[str, harness.Case]]:
    """The family's cases, each kind once; element-wise ops are left to the element-wise families."""
    seen = set()
    for name, function, arguments in family():
        for case in harness.cases(function, *arguments):
            elementwise = not case.rule.methods and all(len(t) == 0 or t == case.rule.results[0] for t in case.rule.operands)
            if case.key not in seen and (family in POINTWISE or not elementwise):
                seen.add(case.key)
                yield name, case


def compare(name: str, case: harness.Case, strategy: Strategy, rng: np.random.Generator) -> None:
    try:
        for found, expected in zip(harness.run(case, strategy, rng), case.results, strict=True):
            harness.assert_same(found, expected)
    except Exception as error:
        raise AssertionError(f"{name}: {case.op.primitive} {case.rule} under {strategy}") from error


@pytest.mark.parametrize("family", examples.FAMILIES, ids=lambda f: f.__name__)
def test_an_op_run_part_by_part_gives_what_it_gives_whole(family: Callable) -> None:
    rng = np.random.default_rng(11)
    for name, case in family_cases(family):
        chosen = harness.covering(case.rule, rng)
        trivial = family in POINTWISE and not case.rule.passes and not case.rule.methods
        for strategy in chosen[-1:] if trivial else chosen:
            compare(name, case, strategy, rng)


@pytest.mark.slow
@pytest.mark.parametrize("family", examples.FAMILIES + examples.SLOW, ids=lambda f: f.__name__)
def test_every_single_cut_and_random_strategies_on_two_axes_give_the_whole_result(family: Callable) -> None:
    rng = np.random.default_rng(12)
    for name, case in family_cases(family):
        for strategy in harness.strategies(case.rule, rng, randoms=12):
            compare(name, case, strategy, rng)


def test_the_examples_bring_up_every_primitive_of_the_table_and_every_method() -> None:
    found, methods = set(), set()
    for family in examples.FAMILIES + examples.SLOW:
        for _, function, arguments in family():
            for op, avals in harness.ops(function, *arguments):
                found.add(op.primitive)
                methods |= {m for _, m in harness.rule_of(op, avals).methods}
    assert set(primitives()) - found - UNSEEN == set()
    assert methods - {"whole"} == METHODS.keys() - {"plain"}


@pytest.mark.parametrize("rows, columns", [(0, 3), (3, 0), (1, 1), (1, 3), (0, 0)])
def test_no_rule_raises_for_sizes_zero_and_one_and_scalars(rows: int, columns: int) -> None:
    x, square, images = jnp.zeros((rows, columns)), jnp.zeros((rows, rows)), jnp.zeros((rows, 4, 4, columns))
    kernel, layout = jnp.zeros((3, 3, columns, 2)), ("NHWC", "HWIO", "NHWC")

    def moves(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return a.reshape(columns, rows), a.reshape(1, rows * columns, 1), jnp.tile(a, (2, 1))[:, :1], jnp.concatenate([a, a], 1)

    def computes(a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sum(jnp.exp(a) * 2.0 + a, axis=0), b @ a, a.T[::-1].cumsum(0), jnp.pad(a, 1).sort(), jnp.linalg.cholesky(b)

    def slides(v: jax.Array) -> tuple[jax.Array, ...]:
        pooled = lax.reduce_window(v, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return lax.conv_general_dilated(v, kernel, (2, 2), "SAME", dimension_numbers=layout), pooled

    found = [*harness.cases(moves, x, square), *harness.cases(computes, x, square), *harness.cases(slides, images)]
    if rows and columns:
        found += harness.cases(jax.grad(lambda a: a[jnp.zeros((0, 2), jnp.int32)].sum() + a[0, 0] * a.max()), x)
    for case in found:
        compare("odd sizes", case, WHOLE, np.random.default_rng(0))


def rule_in(primitive: str, function: Callable, *arguments) -> str:
    """The rule of the first `primitive` that `function` applies, as text."""
    return str(first_rule(primitive, function, *arguments))


def first_rule(primitive: str, function: Callable, *arguments):
    return next(harness.rule_of(op, avals) for op, avals in harness.ops(function, *arguments) if op.primitive == primitive)


def test_a_matmul_reduces_only_its_contracting_dimension() -> None:
    rule = first_rule("dot_general", jnp.matmul, jnp.zeros((4, 6)), jnp.zeros((6, 2)))
    assert str(rule) == "m0 k0, k0 n1 -> m0 n1"
    assert rule.in_operands - rule.in_results == {"k0"} and rule.factors == ("m0", "k0", "n1")
    assert rule.passes == (Pass((0,)), Pass((1,)))


def test_a_reshape_is_the_common_refinement_of_both_shapes() -> None:
    def text(a: tuple[int, ...], b: tuple[int, ...]) -> str:
        return rule_in("reshape", lambda v: lax.reshape(v, b), jnp.zeros(a))

    assert text((4, 6), (24,)) == "f0 f1 -> (f0 f1)"
    assert text((24,), (4, 1, 6)) == "(f0 f1) -> f0 1 f1"
    assert text((4, 6), (8, 3)) == "f0 (f1 f2) -> (f0 f1) f2"
    assert text((4, 3, 2), (6, 2, 2)) == "(f0 f1) f3 f5 -> (f0 f2) f4 f5"


@pytest.mark.parametrize("seed", range(40))
def test_cutting_a_factor_of_a_reshape_cuts_both_sides_into_the_same_elements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    primes = [int(p) for p in rng.choice([2, 2, 2, 3, 3, 5], rng.integers(1, 6))]

    def grouped() -> tuple[int, ...]:
        ends = np.cumsum(rng.multinomial(len(primes), np.ones(3) / 3))
        order = primes if seed % 2 else list(rng.permutation(primes))
        return tuple(int(prod(order[a:b])) for a, b in zip([0, *ends[:-1]], ends, strict=True))

    before, after = grouped(), grouped()
    left, right, sizes, whole = refine(before, after)
    assert all(prod(sizes[f] for f in d) == n for d, n in zip((*left, *right), (*before, *after), strict=True))
    elements = np.arange(prod(before))
    for factor in sizes.keys() - set(whole):
        halves = sizes[factor]
        blocks = [
            [
                cut.take(part, axis)
                for cut, axis in ((view(elements, left, sizes), at(left, factor)), (view(elements, right, sizes), at(right, factor)))
            ]
            for part in range(halves)
        ]
        assert all(np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)) for a, b in blocks)


def view(elements: np.ndarray, dims: list[tuple[str, ...]], sizes: dict[str, int]) -> np.ndarray:
    return elements.reshape([sizes[f] for d in dims for f in d])


def at(dims: list[tuple[str, ...]], factor: str) -> int:
    return [f for d in dims for f in d].index(factor)


def test_a_lookup_is_masked_on_the_indexed_dimension_and_free_on_the_others() -> None:
    rule = first_rule("gather", lambda t, i: t[i], jnp.zeros((8, 4)), jnp.zeros((2, 3), jnp.int32))
    assert str(rule) == "v0 o1, u0 u1 1 -> u0 u1 o1"
    assert rule.method["v0"] == "masked_sum" and rule.factors == ("v0", "o1", "u0", "u1")


def test_the_gradient_of_a_lookup_scatters_into_parts_and_reduces_over_the_batch() -> None:
    gradient = jax.grad(lambda t: t[jnp.zeros((2, 3), jnp.int32)].sum())
    rule = first_rule("scatter-add", gradient, jnp.zeros((8, 4)))
    assert str(rule) == "v0 o1, u0 u1 1, u0 u1 o1 -> v0 o1"
    assert rule.method["v0"] == "scatter" and dict(rule.reductions) == {"u0": "sum", "u1": "sum"}


def test_a_weight_gradient_of_a_convolution_contracts_the_batch() -> None:
    for case in (c for _, f, a in examples.convolutions()[:3] for c in harness.ops(f, *a)):
        op, avals = case
        if op.primitive == "conv_general_dilated" and avals[-1].shape[0] in (2, 3):
            rule = harness.rule_of(op, avals)
            assert any(rule.size[f] == avals[0].shape[0] for f in rule.in_operands - rule.in_results)


def test_a_transposed_convolution_is_cut_without_borders_only_where_each_window_reads_one_pixel() -> None:
    def methods(*padding: tuple[int, int]) -> dict[str, str]:
        convolve = lambda x, w: lax.conv_general_dilated(x, w, (1,), padding, lhs_dilation=(3,))  # noqa: E731
        return first_rule("conv_general_dilated", convolve, jnp.zeros((2, 4, 8)), jnp.zeros((2, 4, 3))).method

    assert methods((2, 2))["p0"] == "plain"
    assert "p0" not in methods((1, 3)) and methods((1, 3))["s0"] == "halo"


def passes(primitive: str, function: Callable, *arguments) -> tuple[Pass, ...]:
    return first_rule(primitive, function, *arguments).passes


def test_partial_sums_go_through_what_is_linear_and_nothing_else() -> None:
    x, i, p = jnp.zeros((4, 2)), jnp.zeros((4, 2), jnp.int32), jnp.zeros((4, 2), bool)
    assert passes("add", jnp.add, x, x) == (Pass((0, 1)),)
    assert passes("add", lambda a: a + 0.0, x) == (Pass((0,)),)
    assert passes("add", lambda a: a + 1.0, x) == ()
    assert passes("mul", lambda a: a * 2.0, x) == (Pass((0,)),)
    assert passes("mul", jnp.multiply, x, x) == (Pass((0,)), Pass((1,)))
    assert passes("div", jnp.divide, x, x) == (Pass((0,)),)
    assert passes("div", lambda a: 2.0 / a, x) == ()
    assert passes("div", lax.div, i, i) == ()
    assert passes("select_n", lax.select, p, x, x)[0] == Pass((1, 2))
    assert passes("pad", lambda a: lax.pad(a, 1.0, ((1, 0, 0), (0, 0, 0))), x) == (Pass((0,), "max"), Pass((0,), "min"))
    assert passes("exp", jnp.exp, x) == ()
    assert passes("max", jnp.maximum, x, x) == (Pass((0, 1), "max"),)


def test_a_conversion_passes_partial_values_only_where_it_is_exact() -> None:
    def kinds(source: str, target: str) -> tuple[Pass, ...]:
        return passes("convert_element_type", lambda a: lax.convert_element_type(a, target), jnp.zeros((4,), source))

    assert Pass((0,)) in kinds("bfloat16", "float32") and Pass((0,)) in kinds("float32", "float64")
    assert kinds("float32", "bfloat16") == kinds("float32", "int32") == kinds("int32", "float32") == kinds("float16", "bfloat16") == ()
    assert kinds("int32", "int64") == kinds("bool", "int32") == ()


def test_a_filling_lookup_passes_partial_sums_only_where_the_fill_survives_a_sum() -> None:
    ids = jnp.zeros((3,), jnp.int32)
    for fill, expected in ((None, (Pass((0,)),)), (0.0, (Pass((0,)),)), (2.0, ())):
        assert passes("gather", lambda t, fill=fill: t.at[ids].get(mode="fill", fill_value=fill), jnp.zeros((8, 4))) == expected


NARROW = {
    "dot_general": (jnp.matmul, (8, 64), (64, 2)),
    "reduce_sum": (lambda a: lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None), (64, 2)),
    "conv_general_dilated": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (2, 8, 4, 4), (2, 8, 3, 3)),
    "add": (jnp.add, (8, 2), (8, 2)),
    "mul": (jnp.multiply, (8, 2), (8, 2)),
    "select_n": (lambda a, b: lax.select(a > b, a, b), (8, 2), (8, 2)),
    "convert_element_type": (lambda a: a.astype(jnp.float32), (8, 2)),
    "concatenate": (lambda a, b: jnp.concatenate([a, b]), (8, 2), (8, 2)),
    "reshape": (lambda a: a.reshape(16), (8, 2)),
    "gather": (lambda a: a.at[jnp.asarray([1, 7, 9, -3])].get(mode="fill"), (8, 2)),
    "scatter-add": (lambda a, b: a.at[jnp.asarray([1, 3, 3, 0])].add(b), (8, 2), (4, 2)),
    "cumsum": (lambda a: lax.cumsum(a, 0), (8, 2)),
    "reduce_window_sum": (lambda a: lax.reduce_window(a, np.zeros((), a.dtype), lax.add, (2, 1), (2, 1), "VALID"), (8, 2)),
    "select_and_scatter_add": (
        jax.grad(lambda a: (lax.reduce_window(a, np.asarray(-np.inf, a.dtype), lax.max, (2, 1), (2, 1), "VALID") ** 2).sum()),
        (8, 2),
    ),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("primitive", NARROW)
def test_a_narrow_partial_sum_is_held_in_float32(primitive: str, dtype: str) -> None:
    function, *shapes = NARROW[primitive]
    rng = np.random.default_rng(5)
    arguments = [jnp.asarray(rng.uniform(-1, 1, s), dtype) for s in shapes]
    case = next(c for c in harness.cases(function, *arguments) if c.op.primitive == primitive)
    held = 0
    for strategy in harness.strategies(case.rule, rng, randoms=2):
        partial = result_sharding(case.rule, strategy, 0).is_sum
        found = harness.run(case, strategy, rng)[0]
        assert found.dtype == (np.float32 if partial else case.results[0].dtype)
        harness.assert_same(found.astype(np.float32), case.results[0].astype(np.float32), 2e-2)
        held += partial
    assert held


def test_a_narrow_partial_sum_stays_narrow_where_it_is_wanted_as_written() -> None:
    arguments = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.bfloat16)
    (case,) = harness.cases(jnp.matmul, *arguments)
    (found,) = harness.run(case, Strategy((("k0", ("x",)),)), np.random.default_rng(0), as_written=True)
    assert found.dtype == jnp.bfloat16


def test_a_sum_held_in_float32_does_not_lose_what_its_parts_cancel() -> None:
    x = jnp.asarray(np.r_[np.full(8, 1000.0), np.full(8, 0.25), np.full(8, -1000.0), np.full(8, 0.5)], jnp.bfloat16)
    (case,) = harness.cases(lambda a: lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None), x)
    (found,) = harness.run(case, Strategy((("i0", ("x", "y")),)), np.random.default_rng(0))
    assert float(found) == 6.0


def test_a_barrier_does_not_make_its_other_results_partial() -> None:
    rule = first_rule("optimization_barrier", lambda a, b: lax.optimization_barrier((a, b)), jnp.zeros((4,)), jnp.zeros((2,)))
    strategy = Strategy(((rule.factors[0], ("x",)),))
    assert result_sharding(rule, strategy, 0) == TensorSharding((("x",),))
    assert result_sharding(rule, strategy, 1) == TensorSharding(((),))


def test_control_flow_and_kernels_run_whole_and_say_why() -> None:
    ((op, avals),) = harness.ops(lambda v: lax.fori_loop(0, 3, lambda _, c: c * 2, v), jnp.zeros((4, 2)))
    assert op.primitive in OPAQUE and not has_rule(op)
    assert harness.rule_of(op, avals).factors == ()
    assert "planned on its own" in why_whole(op.primitive) and "no sharding rule" in why_whole("frobnicate")


def test_a_primitive_without_a_rule_runs_whole() -> None:
    op = Op("frobnicate", (), (0,), (1,))
    avals = (Aval((4, 1), "float32"), Aval((4,), "float32"))
    rule = harness.rule_of(op, avals)
    assert not has_rule(op) and rule.factors == () and str(rule) == "p0_0 1 -> r0_0"


def test_a_rule_that_does_not_fit_names_the_op() -> None:
    op = Op("transpose", (("permutation", (0, 1)),), (0,), (1,), source="model.py:12")
    with pytest.raises(RuleError, match=r"`transpose` at model.py:12 .*float32\[4,2\]"):
        harness.rule_of(op, (Aval((4, 2), "float32"), Aval((2, 4), "float32")))


def test_a_rule_that_is_wrong_for_its_primitive_is_caught_by_the_local_shape() -> None:
    (case,) = harness.cases(lambda a: lax.rev(a, (0,)) if False else jnp.outer(a, a), jnp.zeros((4,)))[-1:]
    wrong = instantiate(parse("a b, c d -> a d"), case.avals_in, case.avals_out)
    bind = lambda params, xs: [jnp.zeros((4, 4))]  # noqa: E731
    parts = [jnp.zeros((2, 1)), jnp.zeros((1, 4))]
    with pytest.raises(CheckError, match="does not fit this primitive"):
        lower(bind, case.op, {}, wrong, Strategy((("a", ("x",)),)), case.avals_in, case.avals_out, parts, harness.place(0))


def test_notation_reads_merged_whole_and_repeated_dimensions() -> None:
    avals = [Aval((2, 3, 4, 8), "float32"), Aval((8,), "float32")]
    rule = instantiate(parse("... (h d) [n], [n] -> ... h [n]"), [avals[0], avals[1]], [Aval((2, 3, 2, 8), "float32")])
    assert str(rule) == "dots0 dots1 (h d) n, n -> dots0 dots1 h n"
    assert rule.size == {"dots0": 2, "dots1": 3, "h": 2, "d": 2, "n": 8}
    assert rule.method["n"] == "whole" and dict(rule.reductions) == {"d": "sum"}
    assert str(instantiate(parse("1 i, _ -> i"), [Aval((1, 4), "int32"), Aval((), "int32")], [Aval((4,), "int32")])) == "1 i,  -> i"


@pytest.mark.parametrize("text", ["i j", "i -> j -> k", "(i -> i", "i] -> i", "i ? -> i", "... ... -> i", "((i)) -> i", "[1] -> i"])
def test_malformed_notation_is_refused(text: str) -> None:
    with pytest.raises(RuleError):
        parse(text)


@pytest.mark.parametrize("text", ["i -> i", "i i -> i", "i j -> j i", "(i k) j -> i k j"])
def test_notation_that_does_not_fit_the_sizes_is_refused(text: str) -> None:
    with pytest.raises(RuleError):
        instantiate(parse(text), [Aval((4, 2), "float32")], [Aval((4, 2), "float32")])


def test_a_jitted_function_can_be_given_a_rule_of_its_own() -> None:
    def normed(x: jax.Array, w: jax.Array) -> jax.Array:
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True)) * w

    x, w = jnp.ones((4, 6)), jnp.ones((6,))
    equation = jax.make_jaxpr(jax.jit(normed))(x, w).jaxpr.eqns[0]
    avals = (Aval((4, 6), "float64"), Aval((6,), "float64"), Aval((4, 6), "float64"))
    op = Op(equation.primitive.name, (("name", "normed"),), (0, 1), (2,))
    register_rule("jit:normed", "... [d], [d] -> ... [d]", when=lambda ins, outs, params: ins[0].ndim == 2, local=normed)
    try:
        rule = harness.rule_of(op, avals)
        assert has_rule(op) and rule.factors == ("dots0",)
        (part,) = lower(None, op, {}, rule, Strategy((("dots0", ("x",)),)), avals[:2], avals[2:], [x[:2], w], harness.place(0))
        np.testing.assert_allclose(part, normed(x, w)[:2])
    finally:
        remove_rule("jit:normed")
    assert not has_rule(op) and harness.rule_of(op, avals).factors == ()


def test_a_rule_for_a_jitted_function_needs_its_local_function() -> None:
    with pytest.raises(RuleError, match="local="):
        register_rule("jit:f", "i -> i")


def test_rules_are_hashable_and_the_same_each_time() -> None:
    op, avals = harness.ops(jnp.matmul, jnp.zeros((4, 6)), jnp.zeros((6, 2)))[0]
    assert harness.rule_of(op, avals) is harness.rule_of(op, avals)
    hash(harness.rule_of(op, avals))


def test_unhashable_parameters_do_not_matter() -> None:
    op = Op("exp", (("accuracy", [1]),), (Constant(Aval((), "float32"), "1.0"),), (0,))
    assert rule_for(op, lambda o: Aval((), "float32")).factors == ()


def test_a_merged_dimension_is_cut_in_order() -> None:
    rule = first_rule("reshape", lambda v: v.reshape(8, 3), jnp.zeros((2, 4, 3)))
    assert str(rule) == "f0 f1 f2 -> (f0 f1) f2"
    legal = {
        (a, b): is_legal(rule, Strategy(tuple((f, (x,)) for f, x in ((a, "x"), (b, "y")) if f)), harness.MESH)
        for a, b in product(("f0", ""), ("f1", ""))
    }
    assert legal == {("f0", "f1"): True, ("f0", ""): True, ("", "f1"): False, ("", ""): True}


def test_a_region_by_hand_is_cut_by_the_axes_of_its_own_names_and_sizes_or_not_at_all() -> None:
    params = {"axis_sizes": (("x", 4), ("y", 2)), "in_dims": ((("x",), ("y",)),), "out_dims": (((), ("y", "x")),), "acts": False}
    op = Op("shard_map", tuple(params.items()), (0,), (1,))
    rule = harness.rule_of(op, (Aval((8, 8), "float32"), Aval((8, 8), "float32")))
    both = Strategy((("x", ("x",)), ("y", ("y",))))
    assert str(rule) == "(x 0.0) (y 0.1) -> 1.0 (y x)"
    assert is_legal(rule, both, LogicalMesh(("y", "x"), (2, 4)))
    assert not is_legal(rule, both, LogicalMesh(("x", "y"), (2, 2)))
    assert not is_legal(rule, Strategy((("x", ("x",)),)), LogicalMesh(("x", "y"), (4, 2)))
    assert not is_legal(rule, Strategy((("x", ("z",)), ("y", ("y",)))), LogicalMesh(("z", "y"), (4, 2)))
    assert result_sharding(rule, both, 0) == TensorSharding(((), ("y", "x")))


def test_the_lowering_table_is_frozen_in_the_methods_of_the_rules() -> None:
    op, avals = harness.ops(lambda: lax.iota(jnp.int32, 8))[0]
    rule = replace(harness.rule_of(op, avals), methods=(("i0", "unheard"),))
    with pytest.raises(CheckError, match="no lowering"):
        lower(lambda p, x: [], op, {"shape": (8,)}, rule, Strategy((("i0", ("x",)),)), (), avals, [], harness.place(0))
