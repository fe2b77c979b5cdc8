"""Scans over layers in pieces: which are found, what the rewritten step computes, and where leaves in parts lie. No devices."""

from __future__ import annotations

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.emit.localise import localise
from autopar.interop.home import home_of, spread_over
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Part
from autopar.ir.sharding import TensorSharding
from autopar.trace.parts import even_borders
from autopar.trace.trace import trace
from autopar.trace.unstack import unstack

R = np.random.default_rng(0)
W, X = 0.3 * R.standard_normal((6, 4, 4)), R.standard_normal((5, 4))


def in_parts(function, args, weights=(0,), pieces=3):
    traced = trace(function, args)
    return unstack(traced, lambda length: even_borders(length, pieces), weights, localise)


def run(traced, leaves):
    """What a rewritten step gives for the leaves of the first one, its parts joined."""
    pieces = traced.pieces
    given = [*leaves, *[None] * sum(len(p.positions) - 1 for p in pieces.inputs.values())]
    for k, p in pieces.inputs.items():
        for position, (begin, end) in zip(p.positions, p.spans, strict=True):
            given[position] = np.take(leaves[k], range(begin, end), p.dimension)
    found = jex.jaxpr_as_fun(traced.closed)(*given)
    for k, p in pieces.outputs.items():
        found[k] = jnp.concatenate([found[position] for position in p.positions], p.dimension)
    return found[: len(found) - sum(len(p.positions) - 1 for p in pieces.outputs.values())]


def layered(w, x, **how):
    return jax.lax.scan(lambda h, q: (jnp.tanh(h @ q), jnp.sum(h)), x, w, **how)


def reduced(w, x):
    h, _ = layered(w, x)
    flat = jnp.reshape(w, (-1, 4))
    return h, jnp.max(w), jnp.min(w, (0, 1)), jnp.all(w > 0), flat * 2, jnp.sum(flat * flat), jnp.einsum("lij,lij->", w, w)


def mixed(w, x):
    """Layers meet other layers: sorted, multiplied with each other, turned around, and picked out."""
    h, each = layered(w, x)
    return h, jnp.sort(each), jnp.einsum("lij,mij->lm", w, w), w[::-1] + w, each[-1], jnp.cumsum(w, 0), jnp.argmax(w, 0)


def nested(w, x):
    h, _ = jax.lax.scan(lambda h, q: (layered(q, h)[0], None), x, jnp.reshape(w, (3, 2, 4, 4)))
    return h


def called(w, x):
    """Within jitted functions and custom derivatives."""
    double = jax.jit(lambda w: jax.nn.relu(2 * w) + jax.jit(jnp.sin)(w))
    return jax.value_and_grad(lambda w: jnp.sum(jax.jit(layered)(double(w), x)[0]))(w)


def backward(w, x):
    return jax.grad(lambda w, x: jnp.sum(layered(w, x, reverse=True, unroll=2)[0] ** 2), (0, 1))(w, x)


def summed(w, x):
    """A running sum that each layer gives out, too: later layers see what earlier ones have added."""

    def loss(w, x):
        def layer(carry, q):
            h, s = carry
            h = jnp.tanh(h @ q)
            s = s + h
            return (h, s), s

        (h, s), each = jax.lax.scan(layer, (x, jnp.zeros_like(x)), w)
        return jnp.sum(each**3) + jnp.sum(h * s), each

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)


def timed(w, x):
    """Time goes on from layer to layer, and layers read it."""

    def loss(w, x):
        def layer(carry, q):
            h, t = carry
            t = t + 0.1
            return (h + jnp.tanh(t * h @ q), t), None

        h, t = jax.lax.scan(layer, (x, x[0, 0]), w)[0]
        return jnp.sum(h**2) * t

    return jax.value_and_grad(loss, (0, 1))(w, x)


def batched(w, x):
    """Newton-Schulz on all layers at once, as Muon does it."""
    for _ in range(2):
        w = 1.5 * w - 0.5 * w @ jnp.swapaxes(w, 1, 2) @ w
    return layered(w, x)


@pytest.mark.parametrize("function", [layered, reduced, mixed, called, backward, summed, timed, batched])
@pytest.mark.parametrize("pieces", [4])
def test_a_step_in_pieces_computes_what_it_did(function, pieces):
    with jax.enable_x64(True):
        found = in_parts(function, (W, X), pieces=pieces)
        assert list(found.pieces.inputs) == [0] and found.pieces.borders == (even_borders(6, pieces),)
        for a, e in zip(run(found, [W, X]), jax.tree.leaves(function(W, X)), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-12, atol=1e-14)


def test_of_nested_scans_the_outer_one_is_cut_if_it_reads_the_weights():
    found = in_parts(nested, (W.reshape(3, 2, 4, 4), X))
    assert found.pieces.borders == ((0, 1, 2, 3),)


def test_each_part_goes_its_own_way():
    """Casts, scales and norms of a stacked weight read one part each."""

    def step(w, x):
        return layered(jnp.exp(w) * 0.1, x)[0], jnp.sum(w**2)

    graph = in_parts(step, (W, X), pieces=3).graph
    assert not any(op.primitive in ("concatenate", "slice") for op in graph.ops)
    assert [graph.avals[v].shape for v in graph.inputs] == [(2, 4, 4), (5, 4), (2, 4, 4), (2, 4, 4)]
    assert graph.input_names == ("w[0:2]", "x", "w[2:4]", "w[4:6]")


def test_a_scan_over_time_is_none_over_layers():
    def step(p, x):
        return jax.lax.scan(lambda h, e: (jnp.tanh(h @ p["w"] + e[0] + e[1]), None), x[0], (p["where"], x))[0]

    p = {"w": R.standard_normal((4, 4)), "where": R.standard_normal((6, 1))}
    assert not in_parts(step, (p, R.standard_normal((6, 3, 4))), weights=(0, 1)).pieces.borders


@pytest.mark.parametrize(
    ("around", "why"),
    [
        (jax.checkpoint, "inside of a `jax.checkpoint`. Checkpoint the layer inside of the scan instead"),
        (lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 0, f, f, w, x), "`cond`"),
    ],
)
def test_a_scan_inside_of_something_else_stays_whole_and_says_so(around, why):
    found = in_parts(lambda w, x: jax.grad(lambda w: jnp.sum(around(lambda w, x: layered(w, x)[0])(w, x)))(w), (W, X))
    assert not found.pieces.borders and len(found.pieces.notes) == 1
    assert why in found.pieces.notes[0] and "test_unstack.py" in found.pieces.notes[0]


def part(stage, begin, end, *dims):
    return Part(stage, 0, begin, end, TensorSharding(dims))


def test_equal_parts_in_turn_are_an_array_over_their_stages():
    home = home_of([part(0, 0, 2, (), ("x",)), part(1, 2, 4, (), ("x",))], (0, 1))
    assert home is not None and home.groups == (0, 1) and home.sharding == TensorSharding((("stage",), ("x",)))
    home = home_of([part(3, 0, 2, ("x",)), part(1, 2, 4, ("x",))], (0, 1, 2, 3))
    assert home is not None and home.groups == (3, 1) and home.sharding == TensorSharding((("stage", "x"),))


@pytest.mark.parametrize(
    ("parts", "group_of"),
    [
        ([part(0, 0, 3, ()), part(1, 3, 4, ())], (0, 1)),
        ([part(0, 0, 2, ("x",)), part(1, 2, 4, ())], (0, 1)),
        ([part(0, 0, 1, ()), part(1, 1, 2, ()), part(2, 2, 3, ()), part(3, 3, 4, ())], (0, 1, 0, 1)),
    ],
)
def test_unequal_parts_and_several_on_one_device_are_none(parts, group_of):
    assert home_of(parts, group_of) is None


def test_what_no_array_holds_so_is_cut_over_all_that_divides():
    mesh = LogicalMesh(("stage", "x"), (2, 4))
    assert spread_over((5, 8, 6), mesh) == TensorSharding(((), ("stage", "x"), ()))
    assert spread_over((5, 2, 6), mesh) == TensorSharding(((), ("stage",), ()))
    assert spread_over((5,), mesh) == TensorSharding(((),))
