"""The predicted step as a timeline: it adds up to the prediction, and its memory is the plan's."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from deep_step import deep, deep_arguments
from typer.testing import CliRunner

import autopar
import cost_models
from autopar import PlanError, models
from autopar.cli import app

FAST = cost_models.load_cluster("fast-link:8", measure=False)


def events(plan, kind):
    return [e for e in json.loads(plan.perfetto())["traceEvents"] if e["ph"] == kind]


def tracks(plan):
    return {e["args"]["name"] for e in events(plan, "M") if e["name"] == "thread_name"}


@pytest.fixture(scope="module")
def plan():
    step, args = models.build("mlp-tiny")
    return autopar.manual(step, args, FAST, data=2, tensor=4, zero=1)


def test_the_spans_follow_each_other_and_add_up_to_the_predicted_step(plan):
    spans = events(plan, "X")
    assert sum(e["dur"] for e in spans) == pytest.approx(1e6 * plan.predicted.step_time_s, rel=1e-9)
    for before, after in zip(spans, spans[1:], strict=False):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], rel=1e-9)


def test_every_collective_is_on_the_track_of_its_axes_with_its_seconds(plan):
    shown = {e["args"]["id"]: e for e in events(plan, "X") if "id" in e["args"]}
    assert set(shown) == {c.id for c in plan.collectives}
    for c in plan.collectives:
        event = shown[c.id]
        assert event["cat"] == f"collectives over {'+'.join(c.axes)}" and event["args"]["bytes"] == c.nbytes
        assert event["dur"] == pytest.approx(1e6 * c.seconds)


def test_ops_are_on_the_track_of_their_phase(plan):
    phases = {"forward", "backward", "update"}
    assert phases <= tracks(plan) and {"collectives over data", "collectives over tensor"} <= tracks(plan)
    order = [e["cat"] for e in events(plan, "X") if e["cat"] in phases]
    assert order.index("forward") < order.index("backward") < len(order) - 1 - order[::-1].index("update")


def test_memory_begins_with_the_arguments_and_peaks_where_the_plan_says(plan):
    held = [e["args"]["bytes"] for e in events(plan, "C")]
    assert plan.predicted.argument_bytes <= min(held) <= held[0] < 1.1 * plan.predicted.argument_bytes
    # The programme lets a value stay until the last reader of any of its forms, the timeline until it is converted.
    assert 0.85 * plan.predicted.peak_bytes <= max(held) <= 1.001 * plan.predicted.peak_bytes


def test_what_is_made_again_has_a_track_of_its_own():
    args = deep_arguments()
    plans = [autopar.plan(deep, args, cost_models.load_cluster("h100-sxm:2"), options=autopar.Options(remat=m)) for m in ("none", "full")]
    assert ["made again" in tracks(plan) for plan in plans] == [False, True]
    peaks = [max(e["args"]["bytes"] for e in events(plan, "C")) for plan in plans]
    assert peaks[1] < peaks[0]
    spans = events(plans[1], "X")
    assert sum(e["dur"] for e in spans) == pytest.approx(1e6 * plans[1].predicted.step_time_s, rel=1e-9)


def test_loops_count_as_often_as_they_run():
    def step(w, xs):
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c.sum()), jnp.zeros((64, 64)), xs)

    args = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((5, 64, 64), jnp.float32)
    plan = autopar.plan(step, args, FAST)
    spans = events(plan, "X")
    assert next(e for e in spans if e["name"] == "dot_general")["args"]["times"] == 5
    assert sum(e["dur"] for e in spans) == pytest.approx(1e6 * plan.predicted.step_time_s, rel=1e-9)


def test_a_plan_that_does_not_know_its_program_says_so(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="program"):
        autopar.Plan.load(tmp_path / "plan.json").perfetto()


def test_the_command_writes_a_trace(tmp_path):
    file = tmp_path / "step.json"
    result = CliRunner().invoke(app, ["plan", "mlp-tiny", "--cluster", "fast-link:2", "--trace", str(file)])
    assert result.exit_code == 0
    assert {e["ph"] for e in json.loads(file.read_text())["traceEvents"]} == {"M", "X", "C"}
