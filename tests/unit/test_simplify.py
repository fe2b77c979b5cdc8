"""What a compiler would leave out or merge is not in the graph: the op that remains is the one that is planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.ir.graph import Graph
from autopar.trace.trace import trace

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)
N = jax.ShapeDtypeStruct((4, 6), jnp.int32)


def graph(function, *args) -> Graph:
    return trace(function, args).graph


def primitives(function, *args) -> list[str]:
    return [op.primitive for op in graph(function, *args).ops]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 0.0,
        lambda x: x - jnp.zeros_like(x),
        lambda x: x * jnp.ones((1, 6)),
        lambda x: x / 1,
        lambda x: lax.integer_pow(x, 1),
        lambda x: lax.max(x, -jnp.inf),
        lambda x: jnp.where(jnp.zeros((), bool), 2 * x, x),
        lambda x: lax.select(x > 0, x, x),
        lambda x: x.astype(jnp.float32),
        lambda x: x.T.T,
        lambda x: lax.neg(lax.neg(x)),
        lambda x: x.reshape(2, 12).reshape(4, 6),
        lambda x: x[:, None].sum(1),
        lambda x: lax.rev(x[None], (0,))[0],
        lambda x: lax.pad(x, 1.0, ((0, 0, 0), (0, 0, 0))),
        lambda x: jnp.copy(x),
    ],
)
def test_an_op_that_changes_nothing_is_left_out(function):
    assert primitives(lambda x: jnp.sin(function(x)), X) == ["sin"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1.0,
        lambda x: x - jnp.ones_like(x),
        lambda x: lax.integer_pow(x, 2),
        lambda x: lax.max(x, 0.0),
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        lambda x: x.T,
        lambda x: lax.rev(x, (0,)),
        lambda x: lax.pad(x, 1.0, ((1, -1, 0), (0, 0, 0))),
        lambda x: x.sum(0, keepdims=True),
        lambda x: jnp.where(x > 0, x, 2 * x),
    ],
)
def test_an_op_that_changes_something_stays(function):
    assert len(primitives(lambda x: jnp.sin(function(x)), X)) > 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * x, jnp.square),
        (lambda x: lax.integer_pow(x, 2), jnp.square),
        (lambda x: 2 * x, lambda x: x * 2),
        (lambda x: x.reshape(4, 1, 6), lambda x: lax.broadcast_in_dim(x, (4, 1, 6), (0, 2))),
        (lambda x: x.reshape(24), lambda x: x.reshape(2, 12).reshape(24)),
        (lambda x: x.at[0].add(1.0), lambda x: x.at[0].add(1.0)),
        (lambda x: x.sum(), lambda x: x.sum(0).sum()),
        (lambda x: x.max(1), lambda x: x.reshape(4, 1, 6).max(1).T.max(0)),
        (lambda x: x.reshape(2, 2, 6).sum((0, 2)), lambda x: x.reshape(2, 2, 6).sum(2).T.sum(1)),
    ],
)
def test_what_an_earlier_op_gives_is_not_made_again(one, other):
    once = primitives(lambda x: jnp.sin(one(x)), X)
    twice = primitives(lambda x: (jnp.sin(one(x)), jnp.cos(other(x))), X)
    assert [p for p in twice if p not in ("sin", "cos", "reshape")] == [p for p in once if p not in ("sin", "reshape")]


def test_numbers_of_another_dtype_do_not_stand_for_a_value():
    found = graph(lambda n: (n.astype(jnp.float32), n + 0), N)
    assert [found.aval(o).dtype for o in found.outputs] == ["float32", "int32"]
    assert [op.primitive for op in found.ops] == ["convert_element_type"]


def test_a_cast_to_what_holds_every_number_and_back_is_left_out():
    there_and_back = lambda x, dtype: jnp.sin(x.astype(dtype).astype(x.dtype))  # noqa: E731
    narrow = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)
    assert primitives(lambda x: there_and_back(x, jnp.float32), narrow) == ["sin"]
    assert primitives(lambda x: there_and_back(x, jnp.float16), narrow) == ["convert_element_type", "convert_element_type", "sin"]
    assert primitives(lambda x: there_and_back(x, jnp.bfloat16), X) == ["convert_element_type", "convert_element_type", "sin"]


def test_a_scatter_of_constants_depends_on_no_input():
    found = graph(lambda x: x + jnp.zeros((4, 6)).at[2].add(1.0), X)
    scattered = next(op for op in found.ops if op.primitive == "scatter-add")
    assert scattered.results[0] in found.free


@pytest.mark.parametrize("reduce", [jnp.max, jnp.sum, jnp.transpose], ids=lambda f: f.__name__)
def test_what_is_made_of_nothing_may_be_reduced_and_transposed(reduce):
    found = graph(lambda x: x + reduce(lax.broadcasted_iota(jnp.float32, (4, 6), 1)).sum(), X)
    assert found.ops[-1].primitive == "add"


def test_what_leaves_the_program_keeps_its_weak_type():
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    found = graph(lambda x, w: (x, w.astype(jnp.float32)), X, weak)
    assert [found.aval(o).weak_type for o in found.outputs] == [False, False]


def test_of_a_branch_for_a_platform_that_no_plan_is_for_only_the_other_one_stands():
    function = lambda x, **named: lax.platform_dependent(x, default=jnp.sin, **named)  # noqa: E731
    assert primitives(lambda x: function(x, mosaic=jnp.cos), X) == ["sin"]
    assert "branch_join" in primitives(lambda x: function(x, tpu=jnp.cos), X)
