"""Measured steps beside a plan, and what they say of the prediction."""

from dataclasses import replace

import pytest

import autopar
from autopar import models
from autopar.api.drift import beside, load_measured, save_measured
from autopar.errors import PlanError
from autopar.report.drift import Measured, drift_lines


@pytest.fixture(scope="module")
def plan():
    step, args = models.build("mlp-tiny")
    made = autopar.manual(step, args, "h100-sxm:8", data=8).data
    return replace(made, predicted=replace(made.predicted, step_time_s=1.0, compute_s=0.8, exposed_communication_s=0.2, temp_bytes=1000))


def test_a_step_as_predicted_needs_no_explanation(plan):
    lines = list(drift_lines(plan, Measured((9.0, 1.01, 1.02))))
    assert len(lines) == 1 and "times" in lines[0]


def test_a_slow_step_says_how_far_each_part_would_have_to_be_off(plan):
    text = "\n".join(drift_lines(plan, Measured((9.0, 1.4, 1.4), 2000)))
    assert "compute alone would explain it at 1.50 times" in text
    assert "communication alone would explain it at 3.00 times" in text
    assert "2.00 times" in text


def test_a_fast_step_is_not_blamed_on_what_is_smaller_than_the_difference(plan):
    assert "communication alone cannot explain it" in "\n".join(drift_lines(plan, Measured((9.0, 0.7))))


def test_measurements_lie_beside_their_plan(tmp_path):
    path = tmp_path / "plan.json"
    assert load_measured(path) is None
    save_measured(Measured((2.0, 1.0), 5, "cpu"), path)
    assert beside(path).name == "plan.measured.json" and load_measured(path) == Measured((2.0, 1.0), 5, "cpu")


def test_a_file_with_something_else_is_refused_by_name(tmp_path):
    beside(tmp_path / "plan.json").write_text('{"step_s": []}')
    with pytest.raises(PlanError, match="plan.measured.json"):
        load_measured(tmp_path / "plan.json")
