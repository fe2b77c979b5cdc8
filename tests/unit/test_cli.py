"""The `autopar` command: what it prints where, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner, Result

from autopar import errors
from autopar.api import Plan
from autopar.cli import app
from autopar.cli.console import exit_status, finite, sparkline
from autopar.cli.flags import byte_count, options_of, pin
from autopar.cli.target import keyword_arguments, load_target
from autopar.errors import AutoparError, ModelError, TraceError, UsageError
from cost_models.profile import host

STEP = """
import jax
import jax.numpy as jnp


def make(rows=16, batch=8):
    print("the user's own output")

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    return step, (jnp.ones((rows, rows)), jnp.ones((batch, rows)))


def shapes():
    step, args = make()
    return step, jax.eval_shape(lambda *args: args, *args)


def raises():
    raise RuntimeError("there is no data")


def breaks():
    return (lambda x: x @ jnp.ones(3)), (jnp.ones(4),)


def returns_three():
    return 3
"""


def autopar(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def step_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target") / "cli_step.py"
    path.write_text(STEP)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """One plan with collectives and one without, saved as `cut.json` and `whole.json`; both as pages too."""
    folder = tmp_path_factory.mktemp("plans")
    for name, cluster in (("cut", "fast-link:2"), ("whole", "slow-link:2")):
        files = ("--save", str(folder / f"{name}.json"), "--html", str(folder / f"{name}.html"))
        done = autopar("plan", "mlp-tiny", "--cluster", cluster, *files)
        assert done.exit_code == 0, done.stderr
        (folder / f"{name}.txt").write_text(done.stdout)
    return folder


def error_of(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout)["error"]


def test_a_plan_is_printed_saved_and_written_as_a_page(saved):
    table = (saved / "cut.txt").read_text()
    assert table.startswith("Plan for mlp-tiny\n")
    assert "state['params'][0][0]" in table
    assert Plan.load(saved / "cut.json").collectives
    assert not Plan.load(saved / "whole.json").collectives
    page = (saved / "cut.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>Plan for mlp-tiny</title>" in page


def test_json_on_standard_output_is_one_document_and_nothing_else(step_file):
    program = [sys.executable, "-m", "autopar", "plan", f"{step_file}:make", "--cluster", "slow-link:2", "-k", "rows=8", "--json", "-"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 3
    assert document["inputs"][0]["shape"] == [8, 8]
    assert {"predicted", "collectives", "solve", "timings", "mesh_shape"} <= document.keys()
    assert "the user's own output" in done.stderr
    assert "Planning" in done.stderr


def test_a_json_file_leaves_the_table_on_standard_output(tmp_path, step_file):
    done = autopar("plan", f"{step_file}:make", "--cluster", "slow-link:2", "--batch", "4", "--json", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.stderr
    assert "float32[4,16]" in done.stdout
    assert Plan.load(tmp_path / "plan.json").inputs[1].shape == (4, 16)


def test_a_run_compares_every_step_with_one_device(step_file):
    done = autopar("run", f"{step_file}:make", "--cluster", "fast-link:2", "--steps", "2", "--json", "-")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["agree"] is True
    assert set(document["checks"]) == {"numbers", "collectives", "memory", "time"}
    measured = document["measured"]
    assert len(measured["losses"]) == len(measured["seconds"]) == document["steps"] == 2
    assert measured["losses"][1] < measured["losses"][0]
    assert sorted(c["kind"] for c in measured["collectives"]) == sorted(c["kind"] for c in document["collectives"])


def test_a_run_shows_predicted_beside_measured():
    done = autopar("run", "mlp-tiny", "--cluster", "fast-link:2", "--steps", "1")
    assert done.exit_code == 0, done.output
    assert "Predicted beside measured" in done.stdout
    assert "Planned beside compiled collectives" in done.stdout
    assert "ok: what was planned is what ran" in done.stdout


def test_a_run_whose_numbers_differ_exits_with_1(monkeypatch, step_file):
    from autopar.runtime import verify

    monkeypatch.setattr(verify, "wrong_leaves", list)
    done = autopar("run", f"{step_file}:make", "--cluster", "slow-link:2", "--steps", "1", "--json", "-")
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["checks"]["numbers"]["agree"] is False


@pytest.mark.parametrize("flags, cluster", [((), "fast-link:2"), (("--cluster", "slow-link:4"), "slow-link:4")])
def test_a_saved_plan_is_verified_on_simulated_devices_of_its_cluster_or_the_one_given(saved, monkeypatch, flags, cluster):
    simulated = []
    monkeypatch.setattr("autopar.cli.verifying.simulate", simulated.append)
    done = autopar("verify", str(saved / "cut.json"), *flags)
    assert done.exit_code == 0, done.output
    assert simulated == [cluster]


def test_a_plan_is_explained_and_compared(saved):
    whole = autopar("explain", str(saved / "cut.json"))
    assert whole.exit_code == 0
    assert "Where the time goes" in whole.stdout
    leaf = autopar("explain", str(saved / "cut.json"), "state['params'][0][0]")
    assert leaf.stdout.startswith("state['params'][0][0] (state, in)")
    difference = autopar("diff", str(saved / "cut.json"), str(saved / "whole.json"))
    assert difference.exit_code == 0
    assert "fast-link:2 -> slow-link:2" in difference.stdout


def test_clusters_are_listed_with_figures_and_sources():
    table = autopar("clusters")
    assert "h100-sxm" in table.stdout
    one = autopar("clusters", "v5e")
    assert "device.memory_bytes_per_s" in one.stdout
    listed = json.loads(autopar("clusters", "--json", "-").stdout)
    assert all(each["sources"] for each in listed["clusters"])
    assert autopar("clusters", "v5f").exit_code == 2


def test_models_are_listed_and_counted_when_named():
    assert "gpt-2.6b" in autopar("models").stdout
    (counted,) = json.loads(autopar("models", "mlp-tiny", "--json", "-").stdout)["models"]
    assert counted["parameters"] == 48 * 96 + 96 * 96 + 96 * 24 + 96 + 96 + 24
    assert counted["config"]["layers"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "mlp-tyni", "--cluster", "slow-link:2"), "mlp-tiny"),
        (("plan", "mlp-tiny", "--cluster", "slow-lnik:2"), "slow-link"),
        (("plan", "mlp-tiny"), "--cluster"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--solver", "guess"), "'highs' or 'pulp'"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--memory-bytes", "much"), "64KiB"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--pin", "nowhere"), "PATH=SPEC"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--pin", "nowhere=x"), "no parameter path"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "laers=2"), "layers"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "layers"), "name=value"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--batch", "0"), "at least one"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "layers=abc"), "layers must be a whole number of at least 1, not 'abc'"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "layers=-1"), "layers must be a whole number of at least 1, not -1"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "layers=2.5"), "layers must be a whole number"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "dtype=float31"), "there is no dtype 'float31'"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "seed=abc", "-k", "learning_rate=x"), "learning_rate must be a number"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "-k", "abstract=1"), "mlp-tiny cannot be built with abstract=1"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--gap", "-0.1"), "gap must be a number that is not negative"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--gap", "nan"), "gap must be"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--time-limit", "-1"), "time_limit_s must be a positive number"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--axis-names", "a,a"), "axis_names must differ"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--axis-names", ""), "axis_names must be one or more names"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--pin", "*=x,x"), "uses axis x twice"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--json", "absent/z.json"), "--json cannot write absent/z.json"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--save", "absent/z.json"), "cannot be written to absent/z.json"),
        (("plan", "mlp-tiny", "--cluster", "slow-link:2", "--html", "absent/z.html"), "cannot write absent/z.html"),
        (("run", "mlp-tiny", "--cluster", "slow-link:2", "--json", "absent/z.json"), "--json cannot write absent/z.json"),
        (("plan", "nowhere.at_all:make", "--cluster", "slow-link:2"), "no module"),
        (("plan", "nowhere.py:make", "--cluster", "slow-link:2"), "no file"),
        (("plan", "json:lodas", "--cluster", "slow-link:2"), "Did you mean loads"),
        (("run", "mlp-tiny", "--steps", "0"), "--steps"),
        (("explain", "nowhere.json"), "cannot be read"),
        (("models", "gpt-tiney"), "gpt-tiny"),
        (("pln",), "plan"),
    ],
)
def test_a_wrong_word_exits_with_2_and_says_what_would_do(arguments, said):
    done = autopar(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_on_more_devices_than_there_are_is_refused_before_anything_is_measured(monkeypatch):
    here = len(jax.devices())  # they are there already, so no more can be simulated; an earlier command may have simulated fewer
    monkeypatch.setattr(host, "figures", lambda *_: pytest.fail("measured"))
    done = autopar("run", "mlp-tiny", "--cluster", "host:16")
    assert done.exit_code == 2
    assert f"needs 16 devices, but {here} are here" in done.stderr


def test_a_profile_that_lacks_its_tables_exits_with_2(tmp_path):
    (tmp_path / "c.toml").write_text("[other]\nkey = 3\n")
    for command in (("plan", "mlp-tiny"), ("run", "mlp-tiny")):
        done = autopar(*command, "--cluster", str(tmp_path / "c.toml"))
        assert done.exit_code == 2
        assert "c.toml lacks device, topology, title" in done.stderr


def test_a_json_file_that_becomes_unwritable_exits_with_2(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    done = autopar("models", "--json", str(tmp_path / "m.json"))
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr and "Traceback" not in done.stderr


def test_a_plan_file_that_is_none_exits_with_2(saved, tmp_path):
    half = tmp_path / "half.json"
    half.write_text((saved / "cut.json").read_text()[:-100])
    for arguments in (
        ("explain", str(half)),
        ("diff", str(half), str(saved / "cut.json")),
        ("explain", str(saved / "cut.json"), "nothing"),
    ):
        assert autopar(*arguments).exit_code == 2


def test_a_target_that_returns_no_function_exits_with_2(step_file):
    done = autopar("plan", f"{step_file}:returns_three", "--cluster", "slow-link:2")
    assert done.exit_code == 2
    assert "(function, args)" in done.stderr
    assert autopar("plan", f"{step_file}:make", "--cluster", "slow-link:2", "-k", "columns=8").exit_code == 2


def test_shapes_can_be_planned_but_not_run(step_file):
    assert autopar("plan", f"{step_file}:shapes", "--cluster", "slow-link:2").exit_code == 0
    done = autopar("run", f"{step_file}:shapes", "--cluster", "slow-link:2")
    assert done.exit_code == 2
    assert "Return arrays" in done.stderr


def test_what_does_not_fit_exits_with_3_and_says_what_would():
    command = ("plan", "mlp-tiny", "--cluster", "tight-memory:2", "--memory-bytes", "30KiB")
    done = autopar(*command)
    assert done.exit_code == 3
    assert "Live at that peak:" in done.stderr
    found = error_of(autopar(*command, "--json", "-"))
    assert found["type"] == "InfeasibleError"
    assert found["exit_status"] == 3
    assert found["budget_bytes"] == 30 * 1024 < found["peak_bytes"]
    assert found["live"] and found["suggestions"]


def test_a_function_that_raises_exits_with_4_and_its_line(step_file):
    for name, line in (("raises", "there is no data"), ("breaks", "contracting")):
        found = error_of(autopar("plan", f"{step_file}:{name}", "--cluster", "slow-link:2", "--json", "-"))
        assert found["exit_status"] == 4
        assert line in found["message"]
        assert found["where"].startswith(str(step_file))


def test_a_traceback_is_shown_only_when_asked_for(step_file):
    command = ("plan", f"{step_file}:raises", "--cluster", "slow-link:2")
    assert "Traceback" not in autopar(*command).stderr
    asked = autopar(*command, "--debug")
    assert asked.exit_code == 4
    assert "Traceback" in asked.stderr
    assert "in raises" in asked.stderr


def test_every_error_has_an_exit_status():
    found = {e.__name__: exit_status(e("")) for e in vars(errors).values() if isinstance(e, type) and issubclass(e, AutoparError)}
    assert set(found.values()) == {1, 2, 3, 4}
    assert (found["InfeasibleError"], found["ClusterError"], found["TraceError"], found["CheckError"]) == (3, 2, 4, 1)


def test_flags_become_options():
    given = {"memory_bytes": "1.5MiB", "pins": ["state.params['w']=x,-", "*=[x+y]"], "axis_names": "data, model", "gap": 0.01}
    options = options_of(given)
    assert options.memory_bytes == 3 * 2**19
    assert options.pins == {"state.params['w']": ("x", None), "*": (("x", "y"),)}
    assert options.axis_names == ("data", "model")
    assert pin("w=[]") == ("w", ())
    for text in ("", "-1", "5 apples", "1.5.2", "ib"):
        with pytest.raises(UsageError):
            byte_count(text)


def test_a_pin_is_kept(tmp_path):
    pinned = ("--pin", "state['params'][0][0]=-,x", "--axis-names", "x", "--json", "-")
    document = json.loads(autopar("plan", "mlp-tiny", "--cluster", "slow-link:2", *pinned).stdout)
    (leaf,) = (each for each in document["inputs"] if each["path"] == "state['params'][0][0]")
    assert leaf["sharding"]["dims"] == [[], ["x"]]


def test_a_target_is_found_by_module_and_by_file(step_file, monkeypatch):
    assert load_target(f"{step_file}:make", batch=2).args[1].shape == (2, 16)
    monkeypatch.chdir(step_file.parent)
    assert load_target("cli_step:make", keywords={"rows": 4}).args[0].shape == (4, 4)
    with pytest.raises(ModelError, match="Did you mean make"):
        load_target("cli_step:mak")
    with pytest.raises(TraceError, match="no data"):
        load_target("cli_step:raises")


def test_values_of_keywords_are_literals_or_text():
    assert keyword_arguments(["a=1", "b=x", "c=[1, 2]", "d=", "e=a=b"]) == {"a": 1, "b": "x", "c": [1, 2], "d": "", "e": "a=b"}


def test_numbers_that_json_cannot_hold_are_text():
    assert finite({"a": [float("nan"), 1.0], "b": float("-inf")}) == {"a": ["nan", 1.0], "b": "-inf"}
    assert sparkline([]) == ""
    assert sparkline([1.0, float("nan"), 1.0]) == "▁?▁"


@pytest.mark.slow
def test_the_demo_trains_and_agrees():
    program = [sys.executable, "-m", "autopar", "demo", "--steps", "3", "--cluster", "slow-link:8", "--json", "-"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout)["measured"]["losses"]
    assert losses[-1] < losses[0]
