"""Every optimiser of optax under a random plan: its state is cut, and the numbers stay one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from test_forced_plans import assert_agrees

from benchmarks.programs import program

RATE = 1e-2
BIASES = {"w1": "weight", "b1": "bias", "w2": "weight", "b2": "bias"}
Make = Callable[[], Any]
BY_RATE = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "fromage", "lamb", "lars"),
    *("lion", "nadam", "nadamw", "novograd", "optimistic_adam_v2", "optimistic_gradient_descent", "radam", "rmsprop"),
    *("rprop", "sgd", "sign_sgd", "sm3", "yogi"),
)
OPTIMIZERS: dict[str, Make] = {
    **{name: lambda name=name: getattr(optax, name)(learning_rate=RATE) for name in BY_RATE},
    "polyak_sgd": optax.polyak_sgd,
    "signum": lambda: optax.signum(RATE),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)),
    "global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(RATE)),
    "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(RATE)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "masked": lambda: optax.masked(optax.adamw(RATE), {k: v == "weight" for k, v in BIASES.items()}),
    "by_label": lambda: optax.multi_transform({"weight": optax.adam(RATE), "bias": optax.sgd(RATE)}, BIASES),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "averaged": lambda: optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 3),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(0)), optax.sgd(RATE)),
    "narrow_moment": lambda: optax.adamw(RATE, mu_dtype=jnp.float32),
    "lbfgs": lambda: optax.lbfgs(RATE, linesearch=None),
    "lbfgs_search": lambda: optax.lbfgs(),
    "muon": lambda: contrib.muon(RATE),
    "ademamix": lambda: contrib.ademamix(RATE),
    "prodigy": contrib.prodigy,
    "dadapt": contrib.dadapt_adamw,
    "schedule_free": lambda: contrib.schedule_free_adamw(RATE),
    "on_plateau": lambda: optax.chain(optax.adam(RATE), contrib.reduce_on_plateau(patience=1)),
}
QUICK = ("adafactor", "lamb", "multi_steps", "muon")


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)


def step_with(optimizer: Any) -> Callable[..., Any]:
    update = optax.with_extra_args_support(optimizer).update

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, inner = state
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, inner = update(grads, inner, params, value=value, grad=grads, value_fn=lambda p: loss(p, x, y))
        return (optax.apply_updates(params, updates), inner), value

    return step


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS])
def test_a_random_plan_of_a_step_with_this_optimiser_runs_as_planned(name):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        optimizer = OPTIMIZERS[name]()
        weights = {"w1": random.standard_normal((16, 48)) / 4, "w2": random.standard_normal((48, 8)) / 7}
        params = jax.tree.map(jnp.asarray, weights | {"b1": np.ones(48), "b2": np.ones(8)})
        batch = jnp.asarray(random.standard_normal((24, 16))), jnp.asarray(random.standard_normal((24, 8)))
        subject = program(name, step_with(optimizer), ((params, optimizer.init(params)), *batch))
    assert_agrees(subject, (2, 4), "random")


def test_all_optimisers_of_this_optax_are_listed():
    made = {n for n, f in vars(optax).items() if callable(f) and getattr(f, "__module__", "").endswith("_src.alias")}
    assert made - OPTIMIZERS.keys() - {"optimistic_adam", "adabound"} == set()
