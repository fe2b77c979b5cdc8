"""From functions to graphs: names, literals, dead code, opened calls, constraints, errors of the user's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from autopar.compiler import fingerprint_of
from autopar.errors import TraceError
from autopar.rules import rule_for
from autopar.trace.trace import trace

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def primitives(traced):
    return [op.primitive for op in traced.graph.walk()]


def test_inputs_and_outputs_are_named_by_path():
    graph = trace(lambda state, x: ({"w": state["w"] + 1}, [x.sum(), None]), ({"w": X}, X)).graph
    assert graph.input_names == ("state['w']", "x")
    assert graph.output_names == ("out[0]['w']", "out[1][0]")


def test_nothing_is_run():
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return x

    trace(function, (X,))
    assert not calls


def test_calls_are_opened_and_dead_code_is_dropped():
    @jax.jit
    def inner(x):
        jnp.cos(x)
        return jnp.sin(x)

    assert primitives(trace(lambda x: jax.checkpoint(inner)(x) * 2, (X,))) == ["sin", "mul"]


def test_phases():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    graph = trace(step, (jax.ShapeDtypeStruct((4, 4), jnp.float32), X)).graph
    assert {op.phase for op in graph.ops} == {"forward", "backward", "update"}
    assert graph.ops[-1].phase == "update"


def test_ops_know_the_users_line():
    graph = trace(lambda x: jnp.tanh(x), (X,)).graph
    assert "test_trace.py:" in graph.ops[0].source


def test_closed_over_arrays_become_trailing_inputs():
    table = jnp.arange(4.0)
    traced = trace(lambda x: x * table, (X,))
    assert traced.graph.num_constants == 1 and traced.graph.input_names == ("x", "constant[0]")
    assert traced.program.constants[0] is table


def test_literal_outputs_and_passed_through_inputs():
    traced = trace(lambda x: (x, 3, x), (X,))
    assert not traced.graph.ops and traced.rebuild_output(["a", "b", "c"]) == ("a", "b", "c")


def test_the_users_error_is_the_cause():
    def broken(x):
        return x @ x

    with pytest.raises(TraceError, match=r"`broken` raised TypeError while it was traced with float32\[8,4\]") as error:
        trace(broken, (X,))
    assert isinstance(error.value.__cause__, TypeError)


def test_errors_of_autopars_own_pass_unchanged():
    def refused(x):
        raise TraceError("mine")

    with pytest.raises(TraceError, match="^mine"):
        trace(refused, (X,))


# --- meshes and constraints -----------------------------------------------------------------------------------------------------------

AXES = {"data": 2, "model": 4}


def constrained(x, axis="data"):
    def body(carry, _):
        return jax.lax.with_sharding_constraint(jnp.sin(carry), P(axis)), None

    x, _ = jax.lax.scan(jax.checkpoint(body), x, None, length=3)
    return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.with_sharding_constraint(x, P(axis)) * 2, lambda x: x, x)


def plain(x):
    def body(carry, _):
        return jnp.sin(carry), None

    x, _ = jax.lax.scan(jax.checkpoint(body), x, None, length=3)
    return jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x, x)


def mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


def test_constraints_in_loops_and_branches_are_pins_there():
    traced = trace(constrained, (X,), axes=AXES)
    assert [p for p in primitives(traced) if p != "pin"] == primitives(trace(plain, (X,)))
    assert sorted(traced.graph.regions[op.region].kind for op in traced.graph.ops if op.primitive == "pin") == ["branch", "scan"]
    assert not traced.roles.notes


def test_a_program_is_the_same_under_any_mesh_of_the_callers():
    expected = fingerprint_of(trace(constrained, (X,), axes=AXES))
    for around in (mesh(), jax.make_mesh((8,), ("other",)), Mesh(jax.devices(), ("data",))):
        with jax.set_mesh(around):
            assert fingerprint_of(trace(constrained, (X,), axes=AXES)) == expected
            assert fingerprint_of(trace(jnp.tanh, (X,))) == fingerprint_of(trace(jnp.tanh, (X,), axes=AXES))


def test_the_gradient_of_a_constraint_is_dropped_too():
    traced = trace(jax.grad(lambda x: constrained(x).sum()), (X,), axes=AXES)
    assert "sharding_constraint" not in primitives(traced)


def test_a_constraint_outside_of_loops_is_a_pin_with_its_axes_by_dimension():
    def step(x):
        return jax.lax.with_sharding_constraint(x, P("data", ("model",))) + 1

    (pin, _) = trace(step, (jnp.ones((8, 8)),), axes=AXES).graph.ops
    assert pin.primitive == "pin" and pin.param("spec") == (("data",), ("model",))


def test_constraints_that_name_a_mesh_need_no_axes():
    sharding = NamedSharding(Mesh([jax.devices()[:4]], ("a", "b")), P("b"))
    traced = trace(lambda x: jax.lax.with_sharding_constraint(x, sharding) + 1, (X,))
    assert primitives(traced) == ["pin", "add"]


def test_an_unknown_axis_is_an_error_that_names_the_known_ones():
    with pytest.raises(TraceError, match="(?s)modle.*Mesh axes are data, model"):
        trace(lambda x: constrained(x, "modle"), (X,), axes=AXES)


def test_a_bare_constraint_without_any_mesh_fails_as_in_jax():
    with pytest.raises(TraceError, match="mesh"):
        trace(constrained, (X,))


def by_hand(body, outs):
    return jax.shard_map(body, mesh=Mesh(jax.devices(), ("data",)), in_specs=P("data"), out_specs=outs, check_vma=False)


def test_a_shard_map_of_the_users_own_is_one_op_with_its_specs():
    traced = trace(lambda x: by_hand(lambda x: jax.lax.psum(x, "data"), P())(x) + 1, (X,))
    assert [op.primitive for op in traced.graph.ops] == ["shard_map", "add"]
    region = traced.graph.ops[0]
    assert region.param("axis_sizes") == (("data", 8),)
    assert region.param("in_dims") == ((("data",), ()),) and region.param("out_dims") == (((), ()),)
    assert not any("Device" in str(value) for _, value in region.params)


def test_a_shard_map_where_no_plan_can_take_its_part_is_refused_with_its_line():
    def loud(x):
        return jax.lax.scan(lambda c, _: (by_hand(looking, P("data"))(c), None), x, None, length=2)[0]

    def looking(x):
        jax.debug.print("{x}", x=x.sum())
        return x

    with pytest.raises(TraceError, match=r"`shard_map` at .*test_trace.py:\d+ stands inside a `scan` with effects at .*Take it out"):
        trace(loud, (X,))
    grouped = lambda x: jax.lax.psum(x, "data", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])  # noqa: E731
    with pytest.raises(TraceError, match=r"`psum` at .*test_trace.py:\d+, in the `shard_map` at .*test_trace.py:\d+, is not supported"):
        trace(lambda x: by_hand(grouped, P("data"))(x), (X,))


# --- device_put -----------------------------------------------------------------------------------------------------------------------


def on(*spec):
    return NamedSharding(mesh(), P(*spec))


def test_a_device_put_with_axes_is_a_pin():
    traced = trace(lambda x: jax.device_put(x, on(None, "model")) + 1, (jnp.ones((8, 8)),))
    (pin, _) = traced.graph.ops
    assert pin.primitive == "pin" and pin.param("spec") == ((), ("model",))


def test_a_device_put_of_a_tree_pins_each_leaf():
    traced = trace(lambda a, b: jax.tree.map(jnp.sin, jax.device_put((a, b), (on("data"), on("model")))), (X, X))
    assert primitives(traced) == ["pin", "pin", "sin", "sin"]
    assert [op.param("spec") for op in traced.graph.ops[:2]] == [(("data",), ()), (("model",), ())]


@pytest.mark.parametrize("where", [None, "device", "one device"])
def test_a_device_put_to_a_device_is_the_identity(where):
    device = {None: None, "device": jax.devices()[0], "one device": jax.sharding.SingleDeviceSharding(jax.devices()[1])}[where]
    traced = trace(lambda x: jnp.sin(jax.device_put(x, device)), (X,))
    assert primitives(traced) == ["sin"] and not traced.roles.notes


def test_a_device_put_in_a_loop_is_a_pin_there():
    def step(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(jax.device_put(c, on("data"))), None), x, None, length=3)[0]

    traced = trace(step, (X,))
    assert primitives(traced) == ["loop_carry", "pin", "sin", "loop_exit"]
    assert not traced.roles.notes


def test_a_device_put_in_a_loop_that_stays_closed_is_dropped_and_noted():
    def body(c, _):
        jax.debug.callback(lambda: None)
        return jnp.sin(jax.device_put(c, on("data"))), None

    traced = trace(lambda x: jax.lax.scan(body, x, None, length=3)[0], (X,))
    assert primitives(traced) == ["scan", "debug_callback", "sin"]
    assert len(traced.roles.notes) == 1 and "test_trace.py" in traced.roles.notes[0]


def test_the_gradient_of_a_device_put_keeps_no_device():
    traced = trace(jax.grad(lambda x: jnp.sum(jnp.sin(jax.device_put(x, on("data"))))), (X,))
    assert "device_put" not in primitives(traced)


def test_a_linear_solve_is_its_solve_alone_which_is_cut_along_its_batch():
    def step(a, b):
        return jax.grad(lambda b: jnp.linalg.solve(a, b).sum())(b) + jax.scipy.sparse.linalg.cg(lambda x: 2 * x, b[0], maxiter=3)[0]

    graph = trace(step, (jnp.ones((8, 4, 4)), jnp.ones((8, 4, 1)))).graph
    found = [op.primitive for op in graph.ops]
    assert "custom_linear_solve" not in found
    assert found.count("lu") == 1 and found.count("triangular_solve") == 2 and "while" in {r.kind for r in graph.regions}
    solve = next(op for op in graph.ops if op.primitive == "triangular_solve")
    assert rule_for(solve, graph.aval).factors == ("b0",)
