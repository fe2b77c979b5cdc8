"""`@autopar.rule`: functions of one's own, cut as their notation says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import FAST, assert_close

import autopar
from autopar import RuleError
from autopar.rules.registry import _USER_RULES, remove_rule


@pytest.fixture(autouse=True)
def forgotten():
    """Rules of a test end with it."""
    before = set(_USER_RULES)
    yield
    for name in set(_USER_RULES) - before:
        remove_rule(name)


def attend(q, k, v):
    """Scores and mix."""
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v


def arguments():
    return tuple(jax.random.normal(key, (8, 4, 16, 8)) for key in jax.random.split(jax.random.key(0), 3))


def test_a_decorated_function_is_one_op_that_is_cut_as_its_rule_says():
    attention = autopar.rule("b h q [d], b h [k] [d], b h [k] [d] -> b h q [d]")(attend)
    step = autopar.parallelize(lambda q, k, v: attention(q, k, v) * 2, FAST)
    assert_close(step(*arguments()), 2 * attend(*arguments()), 1e-5)
    plan = step.plan(*arguments())
    assert [leaf.sharding.dims[3] for leaf in plan.inputs] == [(), (), ()] and not plan.whole
    assert any(leaf.sharding.axes for leaf in plan.inputs)


def test_it_is_still_the_function_that_it_was():
    attention = autopar.rule("b h q [d], b h [k] [d], b h [k] [d] -> b h q [d]")(attend)
    assert attention.__name__ == "attend" and attention.__doc__ == "Scores and mix."
    assert_close(attention(*arguments()), attend(*arguments()), 1e-5)


def test_what_runs_on_local_parts_may_be_given():
    shown = autopar.rule("i -> i", local=jnp.cos)(jax.jit(jnp.sin))
    x = jnp.arange(8.0)
    assert_close(autopar.parallelize(lambda x: shown(x) * 2, FAST)(x), 2 * jnp.cos(x), 1e-6)


def test_functions_of_one_name_keep_their_own_rules():
    def make(sign):
        def same(x):
            return sign * x

        return autopar.rule("i -> i")(same)

    plus, minus = make(1), make(-1)
    x = jnp.arange(8.0)
    assert_close(autopar.parallelize(lambda x: plus(x) + 3 * minus(x), FAST)(x), -2 * x, 1e-6)


def test_derivatives_are_planned_by_what_is_inside_or_by_rules_of_their_own():
    square = autopar.rule("i -> i")(lambda x: x**2)
    backward = autopar.rule("i, i -> i")(lambda x, g: 2 * x * g)
    custom = jax.custom_vjp(lambda x: square(x))
    custom.defvjp(lambda x: (square(x), x), lambda x, g: (backward(x, g),))
    x = jnp.arange(8.0)
    for f in (square, custom):
        assert_close(autopar.parallelize(jax.grad(lambda x, f=f: f(x).sum()), FAST)(x), 2 * x, 1e-6)


@pytest.mark.parametrize("spec", ["i - > j", "(i", "i, j"])
def test_a_malformed_rule_is_refused_where_it_is_written(spec):
    with pytest.raises(RuleError):
        autopar.rule(spec)(lambda x: x)


def test_a_rule_without_its_notation_says_how_it_is_written():
    with pytest.raises(RuleError, match=r"@autopar\.rule\("):

        @autopar.rule
        def f(x):
            return x


def test_a_derivative_that_fits_the_rule_by_chance_is_not_taken_for_the_function():
    weighted = autopar.rule("i, i -> i")(lambda x, y: jnp.sin(x) + 3 * y**2)
    x = jnp.linspace(0.0, 1.0, 8)
    found = autopar.parallelize(jax.grad(lambda x, y: weighted(x, y).sum(), argnums=1), FAST)(x, x)
    assert_close(found, 6 * x, 1e-6)
