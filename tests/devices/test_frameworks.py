"""Training steps of the common frameworks and optimisers, unchanged: three steps on eight devices equal those of one."""

from __future__ import annotations

import equinox as eqx
import flax.linen
import haiku
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from programs import assert_close, assert_cuts, assert_trains, create, examples, loss, parameters, train

import autopar


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_plain_jax():
    step = assert_trains(train, create(), examples())
    roles = [leaf.role for leaf in step.plan(create(), examples()).inputs]
    assert roles.count("state") == 10 and roles.count("batch") == 2


class LinenModel(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.LayerNorm(param_dtype=jnp.float64)(flax.linen.Dense(32, param_dtype=jnp.float64)(x))
        return flax.linen.Dense(8, param_dtype=jnp.float64)(flax.linen.gelu(x))


def test_flax_linen_with_a_train_state():
    model, batch = LinenModel(), examples()

    def step(state, batch):
        def value(params):
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        found, grads = jax.value_and_grad(value)(state.params)
        return state.apply_gradients(grads=grads), found

    variables = model.init(jax.random.key(0), batch["x"])
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-2))
    step = assert_trains(step, state.replace(step=jnp.int32(0)), batch)
    assert "state.params['Dense_0']['kernel']" in [leaf.path for leaf in step.plan(state.replace(step=jnp.int32(0)), batch).inputs]


def test_a_train_state_as_flax_makes_it_plans_once():
    """Its step counter starts as a Python number and comes back as an array."""
    model, batch = LinenModel(), examples()
    params = model.init(jax.random.key(0), batch["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean((state.apply_fn({"params": p}, batch["x"]) - batch["y"]) ** 2))(state.params)
        return state.apply_gradients(grads=grads), None

    assert_trains(step, state, batch)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs, param_dtype=jnp.float64)
        self.second = nnx.Linear(32, 8, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def test_flax_nnx_split_and_merged():
    graph, params = nnx.split(NnxModel(nnx.Rngs(0)))
    tx = optax.adamw(1e-2)

    def step(state, batch):
        params, opt = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(batch["x"]) - batch["y"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    assert_trains(step, (params, tx.init(params)), examples())


class EqxModel(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    activation: object  # a leaf that is no array
    name: str = eqx.field(static=True, default="model")

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.activation = jax.nn.gelu
        self.first, self.second = eqx.nn.Linear(16, 32, key=a, dtype=jnp.float64), eqx.nn.Linear(32, 8, key=b, dtype=jnp.float64)

    def __call__(self, x):
        return self.second(self.activation(self.first(x)))


def test_equinox_modules_with_leaves_that_are_no_arrays():
    tx, batch = optax.adamw(1e-2), examples()
    model = EqxModel(jax.random.key(0))

    def step(state, batch):
        model, opt = state
        value, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(batch["x"]) - batch["y"]) ** 2))(model)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), opt), value

    state = (model, tx.init(eqx.filter(model, eqx.is_array)))
    ours, theirs = state, state
    parallel, reference = autopar.parallelize(step, "fast-link:8"), eqx.filter_jit(step)
    for _ in range(3):
        ours, found = parallel(ours, batch)
        theirs, expected = reference(theirs, batch)
        assert_close((eqx.filter(ours, eqx.is_array), found), (eqx.filter(theirs, eqx.is_array), expected))
    assert ours[0].activation is jax.nn.gelu and ours[0].name == "model"
    assert_cuts(parallel.plan(state, batch))


def test_an_equinox_model_is_born_sharded():
    tx = optax.sgd(0.1, momentum=0.9)

    def create(key):
        model = EqxModel(key)
        return model, tx.init(eqx.filter(model, eqx.is_array))

    def step(state, batch):
        model, opt = state
        grads = eqx.filter_grad(lambda m: jnp.mean((jax.vmap(m)(batch["x"]) - batch["y"]) ** 2))(model)
        updates, opt = tx.update(grads, opt)
        return (eqx.apply_updates(model, updates), opt), None

    parallel = autopar.parallelize(step, "fast-link:8")
    state = parallel.init(create, jax.random.key(0), batch=examples())
    assert state[0].activation is jax.nn.gelu
    after, _ = parallel(state, examples())
    expected, _ = eqx.filter_jit(step)(create(jax.random.key(0)), examples())
    assert_close(eqx.filter(after, eqx.is_array), eqx.filter(expected, eqx.is_array))
    assert state[0].first.weight.is_deleted()


def test_haiku():
    def network(x):
        return haiku.Linear(8)(jax.nn.relu(haiku.Linear(32)(x)))

    model, tx, batch = haiku.without_apply_rng(haiku.transform(network)), optax.adamw(1e-2), examples()
    params = model.init(jax.random.key(0), batch["x"])

    def step(state, batch):
        params, opt = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, batch["x"]) - batch["y"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    assert_trains(step, (params, tx.init(params)), batch)


OPTIMISERS = {
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw with clipping and a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10))
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-1)}, {"w1": "matrix", "w2": "matrix", "b": "vector"}
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name):
    tx = OPTIMISERS[name]()

    def step(state, batch):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    params = parameters()
    assert_trains(step, (params, tx.init(params)), examples())
