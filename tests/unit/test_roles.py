"""Which arguments are state: tied to outputs by tree, shape and dtype, and what is said of those that are not quite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.trace.trace import trace


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


STATE = {"w": spec(4, 3), "b": spec(3)}
MOMENTS = (STATE, STATE, spec(dtype="int32"))


def carried(function, *args):
    """(input path, output path) pairs, and the notes."""
    traced = trace(function, args)
    names = traced.graph.input_names, traced.graph.output_names
    return {names[0][i]: names[1][o] for i, o in traced.roles.carried}, traced.roles.notes


def test_a_state_that_comes_back_whole_is_tied_leaf_by_leaf():
    found, notes = carried(lambda state, x: (state, x.sum()), STATE, spec(8, 4))
    assert found == {"state['w']": "out[0]['w']", "state['b']": "out[0]['b']"} and not notes


def test_equal_subtrees_are_tied_in_order():
    """Parameters and both moments have one tree and the same shapes."""
    found, notes = carried(lambda params, opt, x: (params, opt, x.sum()), STATE, MOMENTS, spec(8, 4))
    assert found["params['w']"] == "out[0]['w']"
    assert found["opt[0]['w']"] == "out[1][0]['w']" and found["opt[1]['w']"] == "out[1][1]['w']"
    assert found["opt[2]"] == "out[1][2]" and len(found) == 7 and not notes


def test_the_order_of_outputs_may_differ():
    found, _ = carried(lambda state, x: (x.sum(), {"loss": x.mean()}, state), STATE, spec(8, 4))
    assert found["state['w']"] == "out[2]['w']"


def test_state_as_a_keyword_argument():
    traced = trace(lambda x, *, state: (state, x.sum()), (spec(8, 4),), {"state": STATE})
    assert [traced.graph.input_names[i] for i, _ in traced.roles.carried] == ["state['b']", "state['w']"]


def test_a_step_that_returns_no_state_has_none():
    assert carried(lambda state, x: (x @ state["w"]).sum(), STATE, spec(8, 4)) == ({}, ())


def test_static_leaves_do_not_stand_in_the_way():
    found, notes = carried(lambda state, x: (state, x.sum()), {**STATE, "act": jax.nn.relu, "none": None}, spec(8, 4))
    assert len(found) == 2 and not notes


def test_a_leaf_that_fits_two_outputs_is_not_tied_and_is_reported():
    found, notes = carried(lambda x: {"a": x + 1, "b": x + 2}, spec(8, 4))
    assert not found and "fits 2 outputs equally well" in notes[0]


def test_a_scalar_is_tied_by_its_key_alone():
    assert carried(lambda lr, x: {"loss": x.sum() * lr}, spec(), spec(8, 4))[0] == {}
    assert carried(lambda s, x: ({"n": s["n"] + 1}, x.sum()), {"n": spec()}, spec(8, 4))[0] == {"s['n']": "out[0]['n']"}


def test_state_that_comes_back_in_part_is_reported():
    found, notes = carried(lambda state, x: ({"w": state["w"]}, x.sum()), STATE, spec(8, 4))
    assert found == {"state['w']": "out[0]['w']"}
    assert notes == ("1 of the 2 leaves of argument 0 come back and are state; argument 0['b'] does not",)


@pytest.mark.parametrize("change", [lambda w: w.astype("bfloat16"), lambda w: w[:2]])
def test_state_that_comes_back_in_another_shape_or_dtype_is_reported(change):
    found, notes = carried(lambda state, x: (jax.tree.map(change, state), x.sum()), STATE, spec(8, 4))
    assert not found
    assert "argument 0 comes back with the same tree but other shapes or dtypes (float32[3] goes in," in notes[0]
