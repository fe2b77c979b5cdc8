"""A profile's questions, budget, resuming and file, with a cluster in place of devices; one real sitting on simulated devices."""

import doctest
import json
import tomllib
from dataclasses import replace

import jax
import pytest
from typer.testing import CliRunner

import autopar
import cost_models
from autopar.api.profile import profile, start_cluster
from autopar.cli import app, profiling
from cost_models import ClusterError, load_cluster
from cost_models.collective import KINDS
from cost_models.profile import figures, questions as asked, session

TRUTH = replace(load_cluster("a100-80:1x4"), device=replace(load_cluster("a100-80").device, tiling=None))
WHERE = {"platform": "gpu", "device_kind": "a card", "devices": 4, "processes": 1, "jax": "0", "links": ""}


def sitting(file, **changes):
    plain = session.Session(file, load_cluster("a100-80:1x4"), WHERE, tuple(asked.questions("gpu", (1, 4))))
    return replace(plain, **changes)


class Devices:
    """Answers questions with the true cluster's prices, and counts them; each takes an eighth of a second."""

    def __init__(self, last=None):
        self.asked, self.now, self.last = [], 0.0, last

    def __call__(self, question):
        if len(self.asked) == self.last:
            raise KeyboardInterrupt
        self.asked.append(question)
        self.now += 0.125
        return [figures.predict(question.curve, question.at, TRUTH)] * 3

    def clock(self):
        return self.now


def measure(given, devices, budget=1e9):
    return session.measure(given, devices, budget, lambda *_: None, devices.clock)


@pytest.mark.parametrize("dims", [(8,), (2, 4), (1, 4, 4, 1), (1,)])
def test_every_collective_is_asked_over_every_axis_of_every_mesh(dims):
    curves = {question.curve for question in asked.questions("gpu", dims)}
    axes = {tuple(curve.split(" ")[1:]) for curve in curves if curve.startswith("collective")}
    assert axes == {(kind, f"{size}:{stride}") for kind in KINDS for size, stride in asked.axes(dims)}
    assert {"launch", "memory", "matmul float32", "matmul bfloat16"} <= curves
    assert ("transfer" in curves) == (cost_models.groups.prod(dims) > 1)


def test_the_first_questions_are_the_largest_of_each_curve():
    found = asked.questions("cpu", (8,))
    curves = list(dict.fromkeys(question.curve for question in found))
    assert [question.curve for question in found[: len(curves)]] == curves
    assert len(set(found)) == len(found)


def test_a_second_sitting_asks_only_what_is_missing(tmp_path):
    given, first, second, third = sitting(tmp_path / "a.toml"), Devices(), Devices(), Devices()
    early = measure(given, first, budget=5.0)
    assert early.added == len(first.asked) == 40 and early.missing == len(given.questions) - 40
    late = measure(given, second)
    assert set(first.asked) | set(second.asked) == set(given.questions) and not set(first.asked) & set(second.asked)
    assert late.missing == 0 and late.points == len(given.questions) and late.added == len(second.asked)
    done = measure(given, third)
    assert not third.asked and done.added == 0 and done.cluster == late.cluster


def test_a_sitting_that_is_interrupted_keeps_what_it_has(tmp_path):
    given = sitting(tmp_path / "a.toml")
    with pytest.raises(KeyboardInterrupt):
        measure(given, Devices(last=10))
    rest = Devices()
    measure(given, rest)
    assert len(rest.asked) == len(given.questions) - 10


def test_points_whose_repeats_were_far_apart_are_measured_once_more_in_time_that_is_left(tmp_path):
    class Disturbed(Devices):
        def __call__(self, question):
            first = question not in self.asked
            (seconds, *_) = super().__call__(question)
            disturbed = first and question.curve == "collective all_reduce 4:1"
            return [seconds, 3 * seconds, 4 * seconds, 6 * seconds] if disturbed else [seconds] * 4

    given, devices = sitting(tmp_path / "a.toml"), Disturbed()
    found = measure(given, devices)
    again = [question for question in set(devices.asked) if devices.asked.count(question) > 1]
    assert {question.curve for question in again} == {"collective all_reduce 4:1"} and len(again) == 9
    assert found.points == len(given.questions) and all(each.median_error < 0.06 and each.spread == 0 for each in found.accuracy)


def test_points_are_written_on_the_way(tmp_path):
    given = sitting(tmp_path / "a.toml")
    seen = []

    class Watching(Devices):
        def __call__(self, question):
            seen.append(given.file.exists())
            return super().__call__(question)

    measure(given, Watching(), budget=12.0)
    assert not seen[0] and seen[-1]


def test_a_question_that_fails_is_named_and_left_out(tmp_path):
    class Half(Devices):
        def __call__(self, question):
            if question.curve == "matmul float64":
                raise RuntimeError("no such units\nmore")
            return super().__call__(question)

    found = measure(sitting(tmp_path / "a.toml"), Half())
    assert found.missing == len(found.failed) > 0 and "matmul float64 1x128x128x128: no such units" in " ".join(found.failed)
    assert found.cluster.device.peak("float64") == load_cluster("a100-80").device.peak("float64")


def test_the_file_is_a_cluster_with_points_fits_and_sources(tmp_path):
    file = tmp_path / "a.toml"
    found = measure(sitting(file), Devices())
    assert load_cluster(str(file)) == found.cluster
    tables = tomllib.loads(file.read_text())
    curve = tables["curves"]["collective all_reduce 4:1"]
    assert len(curve["points"]) == 9 and curve["price"]["median_error"] < 0.05 and curve["fit"]["per_unit"] > 0
    assert tables["device"]["memory_bytes_per_s"]["source"] == "measured on 4 x a card"
    assert tables["topology"]["base"]["network"]["bytes_per_s"]["source"] == "not measured: a100-80:1x4"
    assert all(each.median_error < 0.06 for each in found.accuracy)
    assert load_cluster(f"{file}:2x4").num_devices == 8
    assert load_cluster(f"{file}:2x4").topology.dims == (2, 4)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("title = 'x'", "not written by"),
        ("[profile]\nschema = 1\ndevices = 9", "devices 9, here 4"),
        ("not toml", "not valid TOML"),
    ],
)
def test_a_file_that_is_not_this_machines_profile_is_refused_before_anything_is_measured(tmp_path, content, says):
    file, devices = tmp_path / "a.toml", Devices()
    file.write_text(content)
    with pytest.raises(ClusterError, match=says):
        measure(sitting(file), devices)
    assert not devices.asked and file.read_text() == content


def test_points_that_cannot_be_read_are_named(tmp_path):
    file = tmp_path / "a.toml"
    measure(sitting(file), Devices(), budget=0.5)
    file.write_text(file.read_text().replace('["chain", ', '["chain", "soon", '))
    with pytest.raises(ClusterError, match="curve 'launch'"):
        measure(sitting(file), Devices())


def test_no_profile_is_written_where_nothing_was_measured(tmp_path):
    def broken(question):
        raise RuntimeError("no backend")

    for ask, budget, says in ((Devices(), 0.0, "more time"), (broken, 9.0, "no backend")):
        with pytest.raises(ClusterError, match=says):
            session.measure(sitting(tmp_path / "a.toml"), ask, budget, lambda *_: None)
        assert not (tmp_path / "a.toml").exists()


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(autopar.AutoparError, match="one process"):
        profile(tmp_path / "a.toml")


@pytest.mark.parametrize("name", ["a.txt", "missing/a.toml"])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path, name):
    devices = Devices()
    with pytest.raises(ClusterError, match="toml"):
        measure(sitting(tmp_path / name), devices)
    assert not devices.asked


def test_simulated_devices_of_a_profile_share_the_machine_in_any_number(tmp_path):
    truth = load_cluster("host:4", measure=False)

    def ask(question):
        return [figures.predict(question.curve, question.at, truth)] * 3

    given = session.Session(tmp_path / "a.toml", truth, WHERE, tuple(asked.questions("cpu", (4,))))
    session.measure(given, ask, 1e9, lambda *_: None)
    same, twice = load_cluster(str(given.file)), load_cluster(f"{given.file}:8")
    assert twice.device.peak("float32") == pytest.approx(same.device.peak("float32") / 2)
    assert twice.device.memory_bytes == same.device.memory_bytes // 2
    larger = twice.collective_seconds("all_reduce", 1e7, ((4, 1),)) / same.collective_seconds("all_reduce", 1e7, ((4, 1),))
    assert larger == pytest.approx(2.0, rel=0.01)


# On simulated devices


def test_the_command_measures_simulated_devices_and_plans_use_the_profile(tmp_path):
    file = tmp_path / "mine.toml"
    result = CliRunner().invoke(app, ["profile", "--out", str(file), "--budget", "1s", "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["added"] == found["points"] > 0 and found["missing"] > 0 and not found["failed"]
    assert {"curve", "points", "median_error", "worst_error", "spread"} == set(found["curves"][0])
    again = profile(file, budget_s=0.5)
    assert again.points >= found["points"] and again.added == again.points - found["points"]
    assert load_cluster(str(file)).num_devices == 8
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = autopar.plan(lambda w, x: w - (x @ w), (shape, shape), str(file))
    assert plan.mesh.num_devices == 8 and plan.predicted.step_time_s > 0


def test_another_presets_links_complete_a_profile_of_one_device():
    start = start_cluster(jax.devices()[:1], "h100-sxm:2x8")
    assert start.topology == load_cluster("h100-sxm:2x8").topology and start.device.peak("float32") < 1e13


@pytest.mark.parametrize("arguments", [["--budget", "soon"], ["--links", "h1000"]])
def test_wrong_arguments_are_usage_errors(tmp_path, arguments):
    result = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "a.toml"), *arguments])
    assert result.exit_code == 2 and not (tmp_path / "a.toml").exists()


def test_examples_hold():
    assert doctest.testmod(profiling).failed == doctest.testmod(asked).failed == 0
