"""Calls taken apart into traced leaves and what is static, and put together again."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.api.plans import static_options
from autopar.errors import UsageError
from autopar.trace.arguments import FlatFunction, names, split


def function(state, batch, rate=0.1, *rest, mode="train", **more):
    return None


def signature(*args, numbers=(), by_name=(), **kwargs):
    return split(args, kwargs, numbers, by_name)[1]


def test_arrays_numpy_values_python_numbers_and_keys_are_traced():
    leaves = (jnp.ones(3), np.ones(2), np.float32(1), True, 2, 1.5, 1j, jax.random.key(0), jax.ShapeDtypeStruct((4,), jnp.int8))
    traced, found = split(leaves, {})
    assert len(traced) == len(leaves)
    assert [dtype for _, dtype, _ in found.avals][3:] == ["bool", "int32", "float32", "complex64", "key<fry>", "int8"]
    assert [weak for *_, weak in found.avals] == [False, False, False, False, True, True, True, False, False]


def test_what_is_hashable_and_no_array_is_static():
    found = signature({"act": jax.nn.relu, "name": "gpt", "w": jnp.ones(3), "none": None})
    assert [value for _, value in found.statics] == [jax.nn.relu, "gpt"] and len(found.avals) == 1


def test_a_leaf_that_is_neither_names_its_path():
    class Table:
        __hash__ = None

    with pytest.raises(UsageError, match=r"\['opt'\]\[1\].* is a Table: neither an array nor hashable"):
        split(({"opt": [jnp.ones(3), Table()]},), {})


def test_rebuilding_gives_the_call_back():
    args, kwargs = ({"w": jnp.ones(3), "act": jnp.tanh}, 7, "eval"), {"scale": 2.0, "mode": ("a", 1)}
    leaves, found = split(args, kwargs, (1,), ("mode",))
    assert len(leaves) == 2
    rebuilt = found.rebuild(leaves)
    assert rebuilt[0][0]["act"] is jnp.tanh and rebuilt[0][1:] == args[1:] and rebuilt[1] == kwargs
    assert found.rebuild(leaves, with_static=False) == (({"w": leaves[0], "act": jnp.tanh}, "eval"), {"scale": 2.0})


def test_equal_signatures_for_equal_shapes_whatever_the_values():
    assert signature(jnp.ones(3), 1.0) == signature(np.zeros(3, "float32"), 2.5)
    assert hash(signature(jnp.ones(3), 1.0)) == hash(signature(jnp.zeros(3), 3.0))


@pytest.mark.parametrize(
    "other", [(jnp.ones(4), 1.0), (jnp.ones(3, jnp.bfloat16), 1.0), (jnp.ones(3), jnp.float32(1)), ([jnp.ones(3)], 1.0)]
)
def test_another_shape_dtype_weak_type_or_tree_is_another_signature(other):
    assert signature(jnp.ones(3), 1.0) != signature(*other)


def test_static_values_tell_signatures_apart_by_type_too():
    found = [signature(jnp.ones(3), value, numbers=(1,)) for value in (1, 1.0, True, 2, "1")]
    assert len(set(found)) == 5 and found[0] == signature(jnp.zeros(3), 1, numbers=(1,))


def test_a_static_argument_that_is_absent_is_no_other_one():
    """`static_argnums=2` of a call with two arguments leaves both traced."""
    assert len(signature(jnp.ones(3), jnp.ones(2), numbers=(2,)).avals) == 2
    assert len(signature(jnp.ones(3), "last", numbers=(-1,)).avals) == 1


@pytest.mark.parametrize("static", [{"numbers": (1,)}, {"by_name": ("mode",)}])
def test_static_arguments_must_be_hashable(static):
    with pytest.raises(UsageError, match="is static but list is not hashable"):
        signature(jnp.ones(3), [1], mode=[2], **static)


def test_leaves_are_named_by_parameter_and_path():
    _, found = split(({"w": 1.0}, (2.0, 3.0), 0.1, 5.0), {"extra": {"a": 1}})
    assert names(function, found) == ("state['w']", "batch[0]", "batch[1]", "rate", "arg3", "extra['a']")


def test_a_flat_function_rebuilds_what_it_returned():
    _, found = split((jnp.ones(3),), {})
    flat = FlatFunction(lambda x: {"x": x, "name": "out", "none": None, "two": 2}, found)
    shapes = jax.eval_shape(flat, jnp.ones(3))
    assert len(shapes) == 2
    assert flat.rebuild(["two", "x"]) == {"x": "x", "name": "out", "none": None, "two": "two"}


@pytest.mark.parametrize(
    "given, numbers, by_name",
    [
        ({"static_argnums": 1}, (1,), ("batch",)),
        ({"static_argnums": (0, 2)}, (0, 2), ("rate", "state")),
        ({"static_argnums": -1}, (2,), ("rate",)),
        ({"static_argnums": 4}, (4,), ()),
        ({"static_argnames": "rate"}, (2,), ("rate",)),
        ({"static_argnames": ("mode", "other")}, (), ("mode", "other")),
    ],
)
def test_static_numbers_and_names_follow_from_each_other(given, numbers, by_name):
    found = static_options(function, autopar.Options(**given))
    assert (found.static_argnums, found.static_argnames) == (numbers, by_name)


@pytest.mark.parametrize(
    "given, message", [({"static_argnums": 3}, "takes 2 positional arguments: a, b"), ({"static_argnames": "c"}, "'c', which `two`")]
)
def test_static_arguments_that_do_not_exist(given, message):
    def two(a, b):
        return a

    with pytest.raises(UsageError, match=message):
        autopar.parallelize(two, "fast-link:8", **given)
    assert inspect.signature(two).parameters.keys() == {"a", "b"}
