"""Named parallelism on eight devices: the planned collectives are the compiled ones, the numbers those of one device."""

from __future__ import annotations

import jax
import pytest
from programs import FAST, TX, create, examples, train

import autopar
from autopar import models


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "named",
    [
        {"data": 8, "zero": 1},
        {"data": 8, "zero": 3},
        {"data": 2, "tensor": 4, "zero": 2},
        pytest.param({"data": 8, "zero": 0}, marks=pytest.mark.slow),
        pytest.param({"data": 8, "zero": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_perceptron_under_named_parallelism_trains_as_on_one_device(float64, named):
    args = (create(), examples())
    plan = autopar.manual(train, args, FAST, **named)
    report = plan.verify(train, args, steps=2)
    assert report.agree, report
    assert plan.collectives


def test_a_perceptrons_moments_lie_in_parts_on_the_devices(float64):
    args = (create(), examples())
    plan = autopar.manual(train, args, FAST, data=8, zero=1)
    placed = jax.device_put(TX.init(args[0][0]), jax.tree.map(lambda s: jax.NamedSharding(plan.make_mesh(), s), plan.in_specs[0][1]))
    assert placed[0].mu["w1"].addressable_shards[0].data.size == args[0][0]["w1"].size // 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gpt-tiny", {"data": 2, "tensor": 4, "zero": 1}),
        ("gpt-tiny", {"data": 2, "tensor": 4, "sequence_parallel": True, "zero": 3, "remat": "full"}),
        ("gpt-tiny", {"context": 2, "tensor": 4}),
        ("moe-tiny", {"data": 2, "expert": 4, "zero": 2}),
    ],
    ids=str,
)
def test_zoo_models_under_named_parallelism_train_as_on_one_device(name, named):
    step, args = models.build(name, abstract=False, layers=1)
    plan = autopar.manual(step, args, FAST, **named)
    report = plan.verify(step, args, steps=2)
    assert report.numbers.agree and report.collectives.agree, report
