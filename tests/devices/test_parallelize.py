"""`parallelize` as users call it: meshes, arguments, shapes, donation, plan files."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from programs import FAST, assert_close, assert_cuts, assert_trains, create, examples, parameters, train

import autopar
import autopar.api.step
import autopar.compiler
import cost_models
from autopar import InfeasibleError, MeshError, Options, PlanError, StateError, UsageError
from autopar.runtime.verify import compiled_memory
from autopar.trace.trace import trace

AXES = ("data", "model")
LOAD = cost_models.load_cluster


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch):
    """The devices here count as `fast-link`, so that nothing is measured and tiny programs are cut."""
    monkeypatch.setattr(cost_models, "load_cluster", lambda text, measure=True: LOAD(text.replace("host:", "fast-link:"), measure=False))


@pytest.fixture
def plans(monkeypatch):
    """A list that grows by one with every plan that is solved for a parallel step."""
    made, real = [], autopar.api.step.compile_plan

    def counted(compilation):
        made.append(compilation)
        return real(compilation)

    monkeypatch.setattr(autopar.api.step, "compile_plan", counted)
    return made


@pytest.fixture
def unsolvable(monkeypatch):
    """Solving anything fails the test."""

    def solve(*args, **kwargs):
        raise AssertionError("the solver was called")

    monkeypatch.setattr(autopar.compiler.steps, "choose", solve)


def mesh_of(kind, sizes=(2, 4)):
    count = sizes[0] * sizes[1]
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES, axis_types=(kind,) * 2)


def one_device(steps=1, batch=None):
    state, metrics = create(), None
    for _ in range(steps):
        state, metrics = jax.jit(train)(state, examples() if batch is None else batch)
    return state, metrics


# --- ways to call ---------------------------------------------------------------------------------------------------------------------


@autopar.parallelize
def decorated_bare(state, batch):
    """What it says."""
    return train(state, batch)


@autopar.parallelize(mesh=FAST, donate=False)
def decorated_with_options(state, batch):
    return train(state, batch)


@pytest.mark.parametrize("step", [decorated_bare, decorated_with_options])
def test_as_a_decorator(step):
    assert_close(step(create(), examples()), one_device())
    assert_cuts(step.plan(create(), examples()))


def test_the_step_keeps_the_functions_name_and_docstring():
    assert decorated_bare.__name__ == "decorated_bare" and decorated_bare.__doc__ == "What it says."
    assert decorated_with_options.options.donate is False


def test_of_a_jitted_function_and_of_a_partial():
    scaled = partial(lambda scale, state, batch: train(state, jax.tree.map(lambda x: x * scale, batch)), 1.0)
    for function in (jax.jit(train), scaled):
        assert_close(autopar.parallelize(function, FAST)(create(), examples()), one_device())


def test_as_a_method():
    class Trainer:
        rate = 0.5

        @autopar.parallelize(mesh=FAST)
        def step(self, weights, x):
            return weights - self.rate * (x.T @ (x @ weights)), None

    weights, x = jnp.ones((16, 8)), examples()["x"]
    assert_close(Trainer().step(weights, x)[0], weights - 0.5 * (x.T @ (x @ weights)))


# --- meshes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["fast-link:8", "fast-link:4", None])
def test_clusters_by_name_and_all_devices(mesh):
    step = assert_trains(train, create(), examples(), mesh=mesh)
    assert step.plan(create(), examples()).mesh.num_devices == (4 if mesh == "fast-link:4" else 8)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_lie_on_the_mesh_that_was_given(kind, sizes):
    mesh = mesh_of(kind, sizes)
    step = assert_trains(train, create(), examples(), mesh=mesh)
    state, metrics = step(create(), examples())
    assert step.plan(state, examples()).mesh_shape == dict(zip(AXES, sizes, strict=True))
    for leaf in jax.tree.leaves((state, metrics)):
        assert leaf.sharding.mesh == mesh
    after, _ = step(state, examples())
    assert_close(after, one_device(2)[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_devices_in_the_users_order():
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), AXES)
    state, _ = autopar.parallelize(train, mesh)(create(), examples())
    assert_close(state, one_device()[0])
    assert list(state[0]["w1"].sharding.mesh.devices.flat) == jax.devices()[::-1]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_that_is_sharded_already(kind):
    mesh = mesh_of(kind)

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, P(*(None,) * (x.ndim - 1), "model") if x.ndim else P()))

    given = jax.tree.map(put, create())
    batch = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))), examples())
    step = autopar.parallelize(train, mesh)
    state, _ = step(given, batch)
    state, _ = step(state, batch)
    assert_close(state, one_device(2)[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((given, batch)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_specs_and_mesh_serve_plain_jit(kind):
    plan = autopar.plan(train, (create(), examples()), mesh_of(kind))
    mesh = plan.make_mesh()
    shardings = [jax.tree.map(lambda s: NamedSharding(mesh, s), specs) for specs in (plan.in_specs, plan.out_specs)]
    jitted = jax.jit(train, in_shardings=shardings[0], out_shardings=shardings[1])
    state, metrics = jitted(create(), examples())
    assert_close((state, metrics), one_device())
    assert len(state[0]["w1"].sharding.device_set) == 8 and not state[0]["w1"].is_fully_replicated


# --- the caller's own mesh and constraints --------------------------------------------------------------------------------------------


def constrained(state, batch):
    """The step with constraints of the user's own, in a loop too."""
    hidden = jax.lax.with_sharding_constraint(batch["x"], P("data", "model"))
    hidden, _ = jax.lax.scan(lambda h, _: (jax.lax.with_sharding_constraint(h * 1.0, P(None, "data")), None), hidden, None, length=2)
    return train(state, {**batch, "x": hidden})


@pytest.mark.parametrize("around", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constraints_inside_the_step(kind, around):
    mesh = mesh_of(kind)
    step = autopar.parallelize(constrained, mesh)
    if around is None:
        state, metrics = step(create(), examples())
    else:
        with jax.set_mesh(mesh_of(around)):
            state, metrics = step(create(), examples())
    assert_close((state, metrics), one_device())
    plan = step.plan(create(), examples())
    assert_cuts(plan)
    assert not plan.notes


def test_a_constraint_is_kept_by_the_plan():
    def step(w, x):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P("model", None))
        return w + hidden.sum(), hidden

    weights, rows = jnp.ones((16, 16)), jnp.ones((32, 16))
    mesh = mesh_of(AxisType.Auto)
    plan = autopar.plan(step, (weights, rows), mesh)
    ops = trace(step, (weights, rows), axes=dict(mesh.shape)).graph.ops
    (pin,) = [i for i, op in enumerate(ops) if op.primitive == "pin"]
    assert dict(plan.sharding.strategies[pin].cuts) == {"i0": ("model",)}
    assert_close(autopar.parallelize(step, mesh)(weights, rows), (weights + jnp.tanh(rows @ weights).sum(), jnp.tanh(rows @ weights)))


def test_a_constraint_that_names_its_own_mesh():
    mesh = mesh_of(AxisType.Auto)

    def step(state, batch):
        return train(state, {**batch, "x": jax.lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, P("data")))})

    for where in (mesh, "fast-link:8"):
        assert_close(autopar.parallelize(step, where)(create(), examples()), one_device())


def test_a_device_put_inside_the_step_runs_as_planned():
    mesh = mesh_of(AxisType.Auto)

    def step(state, batch):
        rows = jax.device_put(batch["x"], NamedSharding(mesh, P("data")))
        return train(jax.device_put(state, jax.devices()[0]), {**batch, "x": rows})

    for where in (mesh, FAST):
        assert_close(autopar.parallelize(step, where)(create(), examples()), one_device())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_device_put_in_a_loop_and_on_an_explicit_mesh(kind):
    there = NamedSharding(mesh_of(kind), P("data"))

    def step(x):
        x = jax.device_put(jnp.sin(x), there)
        return jax.lax.fori_loop(0, 2, lambda _, x: jax.device_put(jnp.sin(x), there), x)

    rows = jnp.arange(32.0).reshape(8, 4)
    for where in (mesh_of(kind), FAST):
        assert_close(autopar.parallelize(step, where)(rows), jnp.sin(jnp.sin(jnp.sin(rows))))


def test_constraints_on_a_searched_mesh_use_axis_names():
    assert_close(autopar.parallelize(constrained, FAST, axis_names=AXES)(create(), examples()), one_device())


def test_a_step_runs_under_another_mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        step = autopar.parallelize(train, FAST)
        made = step.init(create, batch=examples())
        assert_close(step(made, examples()), one_device())


@pytest.mark.parametrize("own_mesh", [False, True])
@pytest.mark.parametrize("kind", ["disable_jit", "disallow", "disallow_explicit"])
def test_a_step_runs_compiled_under_the_callers_settings(kind, own_mesh):
    state, batch, where = create(), jax.tree.map(np.asarray, examples()), mesh_of(AxisType.Explicit) if own_mesh else FAST
    plan = autopar.plan(train, (state, batch), where)
    with jax.disable_jit() if kind == "disable_jit" else jax.transfer_guard(kind):
        step = autopar.parallelize(train, where)
        found = step(state, batch)
        made = step.init(create, batch=batch)
        assert step.plan(state, batch).fingerprint == plan.fingerprint
    assert_close(found, one_device())
    assert_close(step(made, batch), one_device())


# --- arguments ------------------------------------------------------------------------------------------------------------------------


def powered(weights, x, power, *, scale=1.0, flag=False):
    return weights + scale * (x.T @ x**power) @ weights, x.sum() if flag else None


@pytest.mark.parametrize(
    "static", [{"static_argnums": 2}, {"static_argnames": ("power",)}, {"static_argnums": (2,), "static_argnames": "flag"}]
)
def test_static_arguments(static, plans):
    step, weights, x = autopar.parallelize(powered, FAST, **static), jnp.ones((16, 16)), examples()["x"]
    for power in (1, 2):
        expected = weights + (x.T @ x**power) @ weights
        assert_close(step(weights, x, power)[0], expected)
        assert_close(step(weights, x, power=power)[0], expected)
    assert_close(step(weights, x, 2)[0], weights + (x.T @ x**2) @ weights)
    assert len(plans) == 2  # one for each value, however it is passed


def test_a_static_keyword_decides_what_comes_out():
    step, weights, x = autopar.parallelize(powered, FAST, static_argnames=("power", "flag")), jnp.ones((16, 16)), examples()["x"]
    assert step(weights, x, 1)[1] is None
    assert_close(step(weights, x, 1, flag=True)[1], x.sum())


def test_one_and_one_point_nought_are_different_static_arguments():
    step = autopar.parallelize(lambda x, n: x * n, FAST, static_argnums=1)
    x = jnp.arange(16)
    assert step(x, 1).dtype == jnp.int64 and step(x, 1.0).dtype == jnp.float64


def test_a_changed_python_scalar_never_plans_again(plans):
    step, weights, x = autopar.parallelize(powered, FAST), jnp.ones((16, 16)), jnp.abs(examples()["x"])
    for power, scale in ((2.0, 0.1), (3.0, 0.2), (0.5, -0.3)):
        assert_close(step(weights, x, power, scale=scale)[0], weights + scale * (x.T @ x**power) @ weights)
    assert len(plans) == 1


def test_python_numbers_as_state_plan_once(plans):
    step = autopar.parallelize(lambda state, x: ((state[0] + 1, state[1] * 0.5, state[2] + x.T @ x), None), FAST)
    state = (0, 1.0, jnp.zeros((16, 16)))
    for n in range(3):
        state, _ = step(state, examples()["x"])
        assert (int(state[0]), float(state[1])) == (n + 1, 0.5 ** (n + 1))
    assert state[0].weak_type and len(plans) == 1


def test_state_that_is_weakly_typed_once_plans_once(plans):
    """`jnp.full(n, 0.1)` is weakly typed, what the first step returns is not."""
    step = autopar.parallelize(train, FAST)
    params, opt = create()
    state = ({**params, "b": jnp.full(32, 0.01)}, opt)
    for _ in range(2):
        state, _ = step(state, examples())
    assert_close(state, one_device(2)[0])
    assert len(plans) == 1


def test_weak_types_come_out_as_from_jit():
    def function(x, rate):
        return x * rate, rate * 2, rate * jnp.float32(2), x.astype(jnp.float32) * rate

    x = examples()["x"]
    found, expected = autopar.parallelize(function, FAST)(x, 3), jax.jit(function)(x, 3)
    assert_close(found, expected)
    assert [leaf.weak_type for leaf in found] == [leaf.weak_type for leaf in expected]


def test_none_keys_and_static_leaves_pass_through():
    def step(state, batch):
        key, used = jax.random.split(state["key"])
        weights = state["weights"] + batch["x"].T @ jax.random.normal(used, (16, 8))
        return {**state, "key": key, "weights": weights, "act": state["act"]}, {"none": batch["mask"], "name": "metrics"}

    state = {"key": jax.random.key(7), "weights": jnp.zeros((16, 8)), "act": jax.nn.relu, "nothing": None, "kind": "model"}
    batch = {"x": examples()["x"], "mask": None}
    parallel, ours, theirs = autopar.parallelize(step, FAST), state, state
    for _ in range(3):
        ours, metrics = parallel(ours, batch)
        theirs, _ = step(theirs, batch)
        assert_close({k: ours[k] for k in ("key", "weights")}, {k: theirs[k] for k in ("key", "weights")})
    assert ours["act"] is jax.nn.relu and ours["kind"] == "model" and ours["nothing"] is None
    assert metrics == {"none": None, "name": "metrics"}
    assert_cuts(parallel.plan(state, batch))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_as_state_are_donated_too(impl):
    step = autopar.parallelize(lambda key, x: (jax.random.split(key)[0], x + jax.random.uniform(key, (16, 16))), FAST)
    first = jax.random.key(0, impl=impl)
    second, found = step(first, examples()["x"])
    assert_close(found, examples()["x"] + jax.random.uniform(first, (16, 16)))
    step(second, examples()["x"])
    assert second.is_deleted() and not first.is_deleted()


@pytest.mark.parametrize("mesh", [FAST, mesh_of(AxisType.Explicit)])
def test_float0_leaves_come_out_as_from_jit(mesh):
    def step(x, i):
        return jax.grad(lambda x, i: jnp.sum(x * i) ** 2, argnums=(0, 1), allow_int=True)(x, i)

    x, i = examples()["x"], jnp.arange(16)
    (dx, di), (expected, other) = autopar.parallelize(step, mesh)(x, i), jax.jit(step)(x, i)
    assert_close(dx, expected)
    assert di.dtype == jax.dtypes.float0 and di.shape == other.shape


def test_numpy_arguments_are_neither_kept_nor_changed():
    step, state, batch = autopar.parallelize(train, FAST), jax.tree.map(np.asarray, create()), jax.tree.map(np.array, examples())
    before = jax.tree.map(np.copy, state)
    after, _ = step(state, batch)
    for leaf in batch.values():
        leaf[:] = np.nan  # a buffer that the input pipeline uses again
    assert_close(after, one_device()[0])
    step(after, examples())
    assert_close(state, before, 0)


@pytest.mark.parametrize("function", [lambda s, b: (s, b["x"].sum()), train])
def test_an_empty_batch_gives_what_jit_gives(function):
    state, empty = create(), jax.tree.map(lambda x: x[:0], examples())
    found, expected = autopar.parallelize(function, FAST)(state, empty), jax.jit(function)(state, empty)
    assert_close(found, expected)


# --- shapes, placement, init ----------------------------------------------------------------------------------------------------------


def placement(plan):
    return {leaf.path: leaf.sharding for leaf in plan.inputs if leaf.role == "state"}


def test_another_batch_shape_gets_its_own_program_with_the_state_where_it_is(plans):
    step, state = autopar.parallelize(train, FAST), create()
    for n in (16, 4, 7, 16):
        state, metrics = step(state, examples(n))
    theirs = create()
    for n in (16, 4, 7, 16):
        theirs, expected = jax.jit(train)(theirs, examples(n))
    assert_close((state, metrics), (theirs, expected))
    assert len(plans) == 3
    assert placement(step.plan(state, examples(4))) == placement(step.plan(state, examples(7))) == placement(step.plan(state, examples(16)))
    assert step.plan(state, examples(7)).mesh == step.plan(state, examples(16)).mesh


def test_replan_moves_the_state(plans):
    step = autopar.parallelize(train, mesh_of(AxisType.Auto), pins={"state[0]['w1']": P("data")})
    state, _ = step(create(), examples())
    assert state[0]["w1"].addressable_shards[0].data.shape == (8, 32)
    step.options = Options(pins={"state[0]['w1']": P(None, "model")})
    step.replan()
    state, _ = step(state, examples())
    assert state[0]["w1"].addressable_shards[0].data.shape == (16, 8)
    assert_close(state, one_device(2)[0])
    assert len(plans) == 2


def test_replan_of_a_given_plan_keeps_its_cluster(saved, monkeypatch, plans):
    step = autopar.parallelize(train, plan=saved)
    state, _ = step(create(), examples())
    monkeypatch.setattr(cost_models, "load_cluster", None)  # nothing else is looked up
    step.replan()
    state, _ = step(state, examples())
    assert_close(state, one_device(2)[0])
    assert len(plans) == 1 and step.plan(state, examples()).cluster["name"] == "fast-link:8"


def test_a_shape_that_does_not_fit_around_the_placed_state_says_so():
    step = autopar.parallelize(train, FAST, memory_bytes=60_000)
    state, _ = step(create(), examples())
    with pytest.raises(InfeasibleError, match="step.replan") as raised:
        step(state, examples(64_000))
    assert raised.value.peak_bytes > 60_000 and "replan" in raised.value.suggestions[-1]
    after, _ = step(state, examples())  # nothing was lost
    assert_close(after, one_device(2)[0])


def test_init_makes_the_state_where_it_belongs(plans):
    step = autopar.parallelize(train, FAST)
    batch = jax.eval_shape(examples)
    state = step.init(create, 3, batch=batch)
    planned = placement(step.plan(state, examples()))
    for (path, leaf), sharding in zip(jax.tree_util.tree_flatten_with_path(state)[0], planned.values(), strict=True):
        shape = sharding.local_shape(leaf.shape, step.plan(state, batch).mesh)
        assert {s.data.shape for s in leaf.addressable_shards} == {shape}, path
    assert_close(state, create(3))
    after, _ = step(state, examples())
    assert_close(after, jax.jit(train)(create(3), examples())[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))  # ours, so given away
    assert len(plans) == 1


def test_init_on_an_explicit_mesh():
    mesh = mesh_of(AxisType.Explicit)
    step = autopar.parallelize(train, mesh)
    state = step.init(create, batch=examples())
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
    assert_close(step(state, examples()), one_device())


def test_init_without_a_batch_once_there_is_a_plan():
    step = autopar.parallelize(train, FAST)
    with pytest.raises(UsageError, match="no plan yet, so init needs a batch"):
        step.init(create)
    step.plan(create(), examples())
    assert_close(step(step.init(create), examples()), one_device())
    with pytest.raises(UsageError, match="no plan for such a state"):
        step.init(parameters)


def test_init_of_a_step_that_takes_state_and_batch_apart():
    def step(params, opt, x, y, scale=1.0):
        (params, opt), metrics = train((params, opt), {"x": x * scale, "y": y})
        return params, opt, metrics

    parallel, batch = autopar.parallelize(step, FAST), examples()
    params, opt = parallel.init(create, batch=(batch["x"], batch["y"]))
    assert_close(parallel(params, opt, batch["x"], batch["y"])[:2], one_device()[0])
    assert params["w1"].is_deleted()
    assert_close(parallel.init(create, 5), create(5))


def test_init_with_a_batch_that_is_a_pair():
    def step(state, batch):
        return train(state, {"x": batch[0], "y": batch[1]})

    parallel, pair = autopar.parallelize(step, FAST), (examples()["x"], examples()["y"])
    assert_close(parallel(parallel.init(create, batch=pair), pair), one_device())


def test_lower_and_compile_as_with_jit():
    step, state, batch = autopar.parallelize(train, FAST), jax.eval_shape(create), jax.eval_shape(examples)
    lowered = step.lower(state, batch)
    assert "stablehlo" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 0
    assert compiled.cost_analysis() is not None
    assert_close(compiled(create(), examples()), one_device())
    with pytest.raises(UsageError, match="compiled for another"):
        compiled(create(), examples(4))


# --- donation -------------------------------------------------------------------------------------------------------------------------


def test_state_that_comes_back_is_given_away():
    step, given = autopar.parallelize(train, FAST), create()
    first, _ = step(given, examples())
    second, metrics = step(first, examples())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((given, second, metrics)))
    assert_close(second, one_device(2)[0])
    program = next(iter(step._programs.values()))
    assert compiled_memory(program.executable)["alias"] >= program.plan.predicted.argument_bytes / 2
    assert_close(given, create(), 0)


def test_what_is_no_state_is_never_given_away():
    step = autopar.parallelize(lambda state, m: ({"w": state["w"] + m.sum()}, {"a": m * 1.0, "b": m * 2.0}), FAST)
    state, metrics = step({"w": jnp.ones((8, 8))}, jnp.ones((8, 4)))
    step(state, metrics["a"])
    assert not metrics["a"].is_deleted() and state["w"].is_deleted()
    assert any("fits 2 outputs equally well" in note for note in step.plan(state, metrics["b"]).notes)


def test_donated_state_is_refused_before_the_call():
    step = autopar.parallelize(train, FAST)
    first, _ = step(create(), examples())
    second, _ = step(first, examples())
    with pytest.raises(StateError, match=r"`state\[0\]\['b'\]` was donated to an earlier step"):
        step(first, examples())
    with pytest.raises(StateError, match=r"`state\[0\]\['w1'\]`"):
        step(({**second[0], "w1": first[0]["w1"]}, second[1]), examples())
    after, _ = step(second, examples())  # nothing was lost on the way
    assert_close(after, one_device(3)[0])


def test_donate_false_keeps_everything():
    step = autopar.parallelize(train, FAST, donate=False)
    first, _ = step(create(), examples())
    second, _ = step(first, examples())
    again, _ = step(first, examples())
    assert_close(second, again, 0)
    assert step.lower(first, examples()).compile().memory_analysis().alias_size_in_bytes == 0


@pytest.mark.parametrize("mesh", [FAST, mesh_of(AxisType.Explicit)])
def test_an_array_that_is_state_twice_is_split(mesh):
    def step(state, batch):
        return {"a": state["a"] + batch, "b": state["b"] * 2}, state["a"].sum()

    parallel, x = autopar.parallelize(step, mesh), examples()["x"]
    state, _ = parallel({"a": x, "b": x}, x)
    state = {"a": state["a"], "b": state["a"]}
    after, _ = parallel(state, x)
    assert_close(after, {"a": 3 * x, "b": 4 * x})
    after, _ = parallel({"a": after["a"], "b": after["b"]}, after["a"])  # state and batch at once
    assert_close(after, {"a": 6 * x, "b": 8 * x})


def test_an_array_that_is_state_and_batch_survives():
    parallel, x = autopar.parallelize(lambda state, x: ({"w": state["w"] + x}, None), FAST), examples()["x"]
    state, _ = parallel({"w": x}, x)
    after, _ = parallel(state, state["w"])
    assert_close(after["w"], 4 * x)
    assert_close(state["w"], 2 * x)


# --- pins and emitters ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(None, "model"), (None, "model"), ((), ("model",))])
def test_pins_are_kept(spec):
    step = autopar.parallelize(train, mesh_of(AxisType.Auto), pins={"state[0]['w?']": spec, "batch['x']": P("data")})
    plan = step.plan(create(), examples())
    found = {leaf.path: leaf.sharding.dims for leaf in (*plan.inputs, *plan.outputs)}
    for path in ("state[0]['w1']", "state[0]['w2']", "out[0][0]['w1']", "out[0][0]['w2']"):
        assert found[path] == ((), ("model",))
    assert found["batch['x']"] == (("data",), ())


def test_pinned_steps_give_the_same_numbers():
    pins = {"state[0]['w1']": P("data", "model"), "state[0]['w2']": P("model"), "batch['x']": P("data")}
    assert_trains(train, create(), examples(), mesh=mesh_of(AxisType.Auto), pins=pins)


def test_pins_of_optimizer_state_are_kept():
    plan = autopar.plan(train, (create(), examples()), mesh_of(AxisType.Auto), options=Options(pins={"*.mu['w1']": P(None, "model")}))
    assert placement(plan)["state[1][0].mu['w1']"].dims == ((), ("model",))


def test_the_jit_emitter_gives_the_same_numbers_and_placement():
    ours, theirs = (autopar.parallelize(train, mesh_of(AxisType.Explicit), emitter=e) for e in ("jit", "shard_map"))
    (a, _), (b, _) = ours(create(), examples()), theirs(create(), examples())
    assert_close(a, b)
    assert [x.sharding for x in jax.tree.leaves(a)] == [x.sharding for x in jax.tree.leaves(b)]
    a, _ = ours(a, examples())
    assert_close(a, one_device(2)[0])


# --- plan files -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    autopar.plan(train, (jax.eval_shape(create), jax.eval_shape(examples)), mesh_of(AxisType.Explicit)).save(path)
    return path


def test_a_saved_plan_comes_back_equal(saved):
    loaded = autopar.Plan.load(saved)
    assert loaded.to_dict() == json.loads(saved.read_text())
    assert loaded.in_specs["batch['x']"] == autopar.plan(train, (create(), examples()), mesh_of(AxisType.Auto)).in_specs[1]["x"]
    assert loaded.table() and loaded.explain() and loaded.html()


@pytest.mark.parametrize("mesh", [None, "fast-link:8", mesh_of(AxisType.Explicit)])
def test_a_saved_plan_runs_without_solving(saved, unsolvable, mesh):
    step = autopar.parallelize(train, mesh, plan=str(saved))
    state = step.init(create, batch=examples())
    state, _ = step(state, examples())
    state, _ = step(state, examples())
    assert_close(state, one_device(2)[0])
    assert step.plan(state, examples()).data == autopar.Plan.load(saved).data


def test_another_shape_under_a_saved_plan_keeps_its_placement(saved, plans):
    step = autopar.parallelize(train, plan=saved)
    state, _ = step(create(), examples())
    state, _ = step(state, examples(8))
    assert len(plans) == 1
    assert placement(step.plan(state, examples(8))) == placement(step.plan(state, examples()))


def test_a_plan_object_can_be_given(saved, unsolvable):
    step = autopar.parallelize(train, plan=autopar.Plan.load(saved))
    assert_close(step(create(), examples()), one_device())


def test_a_plan_of_another_program_is_refused(saved):
    with pytest.raises(PlanError, match=r"batch\['x'\]: \(\(16, 16\), 'float64'\) in the plan, \(\(4, 16\), 'float64'\) here"):
        autopar.parallelize(train, plan=saved)(create(), examples(4))
    with pytest.raises(PlanError, match="other operations"):
        autopar.parallelize(lambda state, batch: train(state, {**batch, "x": batch["x"] * 2}), plan=saved)(create(), examples())


def test_a_plan_for_another_mesh_is_refused(saved):
    with pytest.raises(PlanError, match=r"the plan is for a mesh of \(data=2 model=4\).*\(data=2 model=2\)"):
        autopar.parallelize(train, mesh_of(AxisType.Auto, (2, 2)), plan=saved)(create(), examples())


def test_a_plan_for_more_devices_than_here_says_the_way_out(tmp_path):
    plan = autopar.plan(train, (create(), examples()), "fast-link:16")
    plan.save(tmp_path / "plan.json")
    step = autopar.parallelize(train, plan=tmp_path / "plan.json")
    assert step.plan(create(), examples()).data == plan.data  # planning needs no devices
    for run in (lambda: step(create(), examples()), plan.make_mesh, lambda: step.lower(create(), examples())):
        with pytest.raises(MeshError, match="needs 16 devices.*8 are here.*jax_num_cpu_devices', 16"):
            run()
