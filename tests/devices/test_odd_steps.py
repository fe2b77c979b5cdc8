"""Steps of the kinds that parallelising tools get wrong, under plans of every kind: one device's numbers, the plan's collectives."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jax
import pytest
from odd_steps import STEPS

from benchmarks import forced
from benchmarks.programs import Program, program


@cache
def made(name: str) -> Program:
    with jax.enable_x64(True):
        step, args = STEPS[name]()
        return program(name, step, args)


def check(name: str, sizes: tuple[int, ...], kind: str, seed: int = 0) -> None:
    row = forced.row(made(name), sizes, kind, seed, Counter())
    assert row.status == "agree", forced.table([row])


QUICK = "repeated_words own_kernel scaled_loss long_narrow_sum small_adapters many_answers decoding masked_mean gradients_alone".split()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in STEPS])
def test_a_random_plan_of_an_odd_step_runs_as_planned(name):
    check(name, (2, 4), "random")


@pytest.mark.slow
@pytest.mark.parametrize("sizes, kind", [((3,), "random"), ((6,), "fast-link")], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_an_odd_step_runs_as_planned_on_other_meshes(name, sizes, kind):
    check(name, sizes, kind, 1)


def test_a_step_of_two_losses_runs_as_planned_with_all_it_can_made_again():
    """The second loss reads what the first one's update gives: its forward comes after a backward."""
    check("two_players", (2,), "remat")
