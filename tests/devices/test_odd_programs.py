"""Programs that talk to the host, return odd things, or hold odd dtypes, on eight devices beside one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from programs import FAST, assert_close

import autopar
from autopar import UsageError
from autopar.emit.manual import Emission, emit
from autopar.intraop.connect import connect
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy
from autopar.rules import remove_rule, rule_for
from autopar.runtime.executor import make_mesh
from autopar.trace.trace import trace

X = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 64


def beside(function, *args):
    """The function's result under autopar, and that of one device."""
    return autopar.parallelize(function, FAST)(*args), jax.jit(function)(*args)


def test_a_program_of_arrays_without_elements_runs():
    state, other = jnp.ones((4, 0), jnp.uint32), jnp.ones((0, 1), jnp.uint32)
    found, expected = beside(lambda a, b: (a, a @ b), state, other)
    assert_close(found, expected)


def test_a_logging_effect_happens_once_per_step_with_the_whole_value():
    seen = []

    def step(x):
        y = x @ x
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), y)
        return y

    found = autopar.parallelize(step, FAST)(X)
    jax.effects_barrier()
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0], found, rtol=1e-6)


def test_an_effect_in_a_loop_happens_once_per_iteration_and_its_results_reach_all_devices():
    seen = []

    def step(x, key):
        def body(carry, key):
            jax.debug.callback(lambda v: seen.append(float(v)), carry.sum())
            noisy = carry + jax.random.uniform(key, carry.shape)
            return noisy, (noisy > 1, jnp.int8(3), noisy.astype(jnp.bfloat16), noisy * 1j, key)

        return jax.lax.scan(body, x, jax.random.split(key, 3))

    found = autopar.parallelize(step, FAST)(X, jax.random.key(0))
    jax.effects_barrier()
    assert len(seen) == 3
    assert_close(found, step(X, jax.random.key(0)), 1e-6)


def test_a_host_function_with_side_effects_is_called_once_and_answers_everyone():
    calls = []

    def host(v):
        calls.append(1)
        return np.asarray(v) * -1

    def step(x):
        return io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + x

    found = autopar.parallelize(step, FAST)(X)
    assert_close(found, jnp.zeros_like(X))
    assert len(calls) == 1


def test_ordered_effects_on_several_devices_are_refused_with_their_line():
    def step(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    with pytest.raises(UsageError, match=r"test_odd_programs.py:\d+ keeps the order of its effects"):
        autopar.parallelize(step, FAST)(X)


def test_python_numbers_come_out_weakly_typed_as_from_jit():
    found, expected = beside(lambda x, rate: (x * rate, 3, 2.5, True, jnp.int32(4), rate, rate * 2), X, 0.5)
    assert_close(found, expected)
    assert [x.weak_type for x in found] == [x.weak_type for x in expected]


def test_integers_below_one_byte_go_in_and_out():
    weights = jnp.arange(-8, 8).reshape(2, 8).astype(jnp.int4)
    found, expected = beside(lambda w: (w, w.astype(jnp.float32) @ X), weights)
    assert_close(found, expected, 1e-6)


def test_arrays_without_elements_go_in_and_out():
    found, expected = beside(lambda e, x: (e + 1, jnp.concatenate([x, e]), e.sum(0), e.T @ e, e.reshape(4, 0)), jnp.zeros((0, 8)), X)
    assert_close(found, expected)


def test_a_fourier_transform_runs_beside_a_collective_that_would_rather_have_another_layout():
    traced = trace(jnp.fft.fft, (X * (1 + 1j),))
    graph, mesh = traced.graph, LogicalMesh(("x",), (8,))
    rules = [rule_for(op, graph.aval) for op in graph.ops]
    passing = [Strategy(passes=(("x", 0),)) for _ in graph.ops]
    plan = connect(graph, rules, mesh, passing, [TensorSharding(((), ()))], [TensorSharding(((), ("x",)))], lambda *_: 1.0)
    assert [m.move.kind for m in plan.moves] == ["to_partial", "reduce_scatter"]
    program = emit(Emission(graph, traced.program, rules, plan), make_mesh(mesh))
    (found,) = jax.jit(program)(jnp.int32(0), X * (1 + 1j))
    assert_close(found, jnp.fft.fft(X * (1 + 1j)), 1e-6)


def test_a_metric_may_read_what_only_feeds_the_update():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        count = jnp.sum(x > 0.5).astype(jnp.float32)
        return w - grad * count, (loss, jnp.maximum(count, 3.0))

    found, expected = beside(step, X, X)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.at[3].apply(jnp.sin), x.at[3].apply(jnp.cos)),
        lambda x: jnp.where(jnp.uint8(200) + jnp.uint8(100) < 250, x, -x),
        lambda x: jnp.where(jnp.uint8(10) - jnp.uint8(20) < 0, x, -x),
        lambda x: jnp.where(jnp.ones((), jnp.float32) + jnp.float32(1e-9) == 1, x, -x),
        lambda x: jnp.where(jnp.float32(0.1) + jnp.float32(0.2) == jnp.float32(0.3), x, -x),
        lambda x: jnp.where(jnp.full((8,), 300, jnp.int32).astype(jnp.int8) < 100, x, -x),
        lambda x: jnp.where(jnp.full((8,), 1e-9, jnp.float32).astype(jnp.float16) == 0, x, -x),
    ],
    ids=["apply", "wraps", "below zero", "rounds", "sum", "narrows", "vanishes"],
)
def test_what_is_known_of_constants_holds_in_their_dtype(function):
    assert_close(*beside(function, jnp.arange(1.0, 9.0)))


def test_an_empty_batch_is_planned_without_collectives_and_runs():
    def step(p, b):
        return p - jax.grad(lambda p: jnp.mean((b @ p) ** 2))(p), 0.0

    args = jnp.ones((16, 16)), jnp.ones((0, 16))
    plan = autopar.plan(step, args, "fast-link:8")
    assert not plan.collectives
    assert plan.verify(step, args).agree


def test_a_jitted_function_with_a_rule_stays_closed_and_its_derivative_does_not():
    @jax.jit
    def shown(x):
        return jnp.sin(x)

    autopar.register_rule("jit:shown", "i -> i", local=jnp.cos)
    try:
        x = jnp.arange(8.0)
        assert_close(autopar.parallelize(lambda x: shown(x) * 2, FAST)(x), 2 * jnp.cos(x), 1e-6)
        assert_close(autopar.parallelize(jax.grad(lambda x: shown(x).sum()), FAST)(x), jnp.cos(x), 1e-6)
    finally:
        remove_rule("jit:shown")


def test_an_argument_changed_in_place_is_told():
    def step(state, x):
        state["w"] = state["w"] - x
        return x.sum()

    with pytest.warns(UserWarning, match="changes an argument in place"):
        plan = autopar.plan(step, ({"w": jnp.ones(8)}, jnp.ones(8)), FAST)
    assert any("in place" in note for note in plan.notes)


def test_the_jit_emitter_runs_grouped_convolutions_whole():
    def loss(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return (jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=2) ** 2).sum()

    key = jax.random.key(0)
    args = jax.random.normal(key, (3, 3, 3, 12)), jax.random.normal(key, (8, 8, 8, 6))
    found = autopar.parallelize(jax.value_and_grad(loss), "fast-link:4", emitter="jit")(*args)
    assert_close(found, jax.value_and_grad(loss)(*args), 1e-4)


def test_complex_steps_are_verified_and_one_wrong_leaf_shows():
    step, x = lambda x: ((x * 1j) @ x.T, (x * 1j).sum(0)), jax.random.normal(jax.random.key(0), (24, 48))
    assert autopar.plan(step, (x,), FAST).verify(step, (x,)).numbers.agree

    def train(state, x):
        return {"w": state["w"] * 0.999, "b": jax.lax.erf(state["b"])}, ((x @ state["w"]) ** 2).mean()

    state, batch = {"w": jnp.ones((48, 48)), "b": jnp.full(48, 1e-2)}, x
    autopar.register_rule("erf", "i -> i", local=lambda b, **_: b * 3.0)
    try:
        checked = autopar.plan(train, (state, batch), FAST).verify(train, (state, batch))
    finally:
        remove_rule("erf")
    assert not checked.numbers.agree and "['b']" in checked.numbers.detail
