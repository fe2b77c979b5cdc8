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
from autopar.rules import rule_for
from autopar.runtime.executor import make_mesh
from autopar.trace.trace import trace

X = jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 64


def beside(function, *args):
    """The function's result under autopar, and that of one device."""
    return autopar.parallelize(function, FAST)(*args), jax.jit(function)(*args)


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
