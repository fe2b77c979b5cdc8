"""`python -m benchmarks.cases`: what counts as agreement, what passes, and that no case takes another's row with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import case, cases, common
from benchmarks.cases import Job, Row

META = {"rtol": 1e-5, "atol": 1e-6}
CASE = """
import os, jax, jax.numpy as jnp
META = dict(meshes=[[1], [2]], rtol=1e-5, atol=1e-6, batch_args=[1])
def make():
    {before}
    return lambda w, x: ({{"w": w - 0.1 * x.mean(0)}}, x.sum()), (jnp.ones(4), jnp.ones((8, 4)))
def check(args, out):
    {check}
"""


def write(folder, name, before="pass", check="assert out[1] == 32", **replaced):
    text = CASE.format(before=before, check=check)
    for old, new in replaced.items():
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("plan", cases.PLANS)
def test_a_step_that_agrees_with_one_device_passes(tmp_path, plan):
    row = case.run(Job(write(tmp_path, "01_fine"), (2, 2), plan=plan))
    assert (row.status, row.passed, row.case, row.mesh, row.reason) == ("agree", True, "01_fine", "2x2", "")
    assert row.worst is not None and row.worst <= 1


def test_a_step_whose_own_check_fails_differs(tmp_path):
    row = case.run(Job(write(tmp_path, "01_check", check="assert out[1] == 31, 'the sum is wrong'"), (1,)))
    assert (row.status, row.passed) == ("differ", False)
    assert "the sum is wrong" in row.reason


def test_stages_and_microbatches_agree_or_are_refused_in_words(tmp_path):
    path = write(tmp_path, "01_fine")
    rows = [case.run(Job(path, (2,), stages=2)), case.run(Job(path, (2,), microbatches=2)), case.run(Job(path, (2,), stages=3))]
    assert all(r.status in ("refused", "agree") and r.passed for r in rows), rows
    assert "2 devices do not divide into 3 stages" in rows[2].reason


def test_a_refusal_passes_only_where_the_case_allows_it(tmp_path):
    before = "raise __import__('autopar').UsageError('no such thing')"
    assert not case.run(Job(write(tmp_path, "01_strict", before), (1,))).passed
    lenient = case.run(Job(write(tmp_path, "02_lenient", before, **{"rtol=": "refusal_ok=True, rtol="}), (1,)))
    assert (lenient.status, lenient.passed) == ("refused", True)


def test_a_budget_below_what_must_be_there_may_be_refused_and_one_above_may_not(tmp_path):
    small, large = ({"rtol=": f"memory_budget_bytes={n}, rtol="} for n in (100, 100_000))
    row = case.run(Job(write(tmp_path, "01_small", **small), (1,)))
    assert (row.status, row.passed) == ("refused", True) and row.reason.startswith("InfeasibleError")
    assert case.run(Job(write(tmp_path, "02_large", **large), (1,))).status == "agree"


def test_any_other_exception_is_an_error_with_its_message(tmp_path):
    row = case.run(Job(write(tmp_path, "01_broken", "raise KeyError('weights')"), (1,)))
    assert (row.status, row.reason, row.passed) == ("error", "KeyError: 'weights'", False)


def test_state_that_is_donated_is_fed_back_for_a_second_step(tmp_path, monkeypatch):
    fed = []

    def feed(args, i, out):
        fed.append(i)
        return [out[0]["w"], *args[1:]]

    monkeypatch.setattr(case, "fed_back", feed)
    row = case.run(Job(write(tmp_path, "01_donated", **{"rtol=": "donate=[0], rtol="}), (2,)))
    assert row.status == "agree"
    assert fed == [0, 0]  # what one device returned, and what autopar did


def test_the_next_state_is_found_by_structure_shapes_and_dtypes():
    state, batch = {"w": jnp.zeros(3), "n": jnp.int32(0)}, jnp.zeros((2, 3))
    new = {"w": jnp.ones(3), "n": jnp.int32(1)}
    assert case.fed_back((state, batch), 0, (jnp.zeros(()), {"state": new}))[0] is new
    assert case.fed_back((state, batch), 0, (jnp.zeros(()), batch))[0] is state


@pytest.mark.parametrize(
    ("expected", "found", "reason"),
    [
        ({"a": jnp.ones(2)}, {"b": jnp.ones(2)}, "structure"),
        (jnp.ones(2), jnp.ones(3), "instead of float32(2,)"),
        (jnp.ones(2), jnp.ones(2, jnp.bfloat16), "bfloat16(2,) instead of"),
        (jnp.ones(2), jnp.ones(2) + 1e-3, "greatest difference 0.001"),
        (jnp.ones(2), jnp.array([1.0, jnp.nan]), "greatest difference"),
        (jnp.arange(3), jnp.array([0, 5, 2]), "1 of 3 elements differ, the first at (1,)"),
        (jnp.array([True, False]), jnp.array([True, True]), "elements differ"),
        (jax.random.key(0), jax.random.key(1), "elements differ"),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0)), "instead of key<fry>"),
    ],
)
def test_results_differ_by_structure_shape_dtype_and_value(expected, found, reason):
    with pytest.raises(case.Differs) as error:
        case.compare(expected, found, META)
    assert reason in str(error.value)


def test_results_agree_within_the_tolerance_and_the_worst_leaf_is_named():
    expected = {"far": jnp.full(2, 100.0), "near": jnp.ones(2), "nan": jnp.array([jnp.nan, jnp.inf]), "key": jax.random.key(3)}
    expected["none"] = None
    found = {**expected, "far": expected["far"] * (1 + 5e-6)}
    leaf, distance = case.compare(expected, found, META)
    assert leaf == "['far']" and 0.3 < distance < 0.7
    with pytest.raises(case.Differs):
        case.compare(expected, found, {**META, "exact": ["['far']"]})


def test_beyond_its_tolerance_a_leaf_agrees_where_it_is_as_near_to_float64_as_one_device():
    function = lambda x: jnp.sum(x) * jnp.ones(2)  # noqa: E731
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    truth = lambda: case.in_float64(function, (x,))  # noqa: E731
    exact, tight = truth()[0], {**META, "rtol": 0.0, "atol": 0.0}
    one_device = (exact + 1e-6).astype(np.float32)
    assert exact.dtype == np.float64 and exact[0] == pytest.approx(float(np.sum(np.asarray(x, np.float64))))
    case.compare(one_device, (exact - 1.5e-6).astype(np.float32), tight, truth=truth)
    for far in ((exact + 1e-3).astype(np.float32), np.array([exact[0], np.nan], np.float32)):
        with pytest.raises(case.Differs):
            case.compare(one_device, far, tight, truth=truth)
    with pytest.raises(case.Differs):
        case.compare(one_device, (exact - 1.5e-6).astype(np.float32), {**tight, "exact": [""]}, truth=truth)


def test_distances_are_in_units_of_the_tolerance():
    assert case.leaf_distance(np.array([1.0, 2.0]), np.array([1.0, 2.1]), 0.0, 0.1) == pytest.approx(1.0)
    assert case.leaf_distance(np.array([1.0]), np.array([1.0]), 0.0, 0.0) == 0.0
    assert case.leaf_distance(np.array([1 + 1j]), np.array([1 + 2j]), 0.0, 1.0) == pytest.approx(1.0)
    assert case.leaf_distance(np.zeros((0, 3)), np.zeros((0, 3)), 0.0, 0.0) == 0.0


def test_every_mesh_stage_count_and_microbatch_count_of_meta_is_run():
    meta = {"meshes": [[1], [2, 2]], "pipeline_stages": [2, 3], "microbatches": [1, 4]}
    jobs = cases.jobs_of("p", meta, (), ("optimum", "fast-link"), 0)
    assert {(j.mesh, j.stages, j.microbatches) for j in jobs} == {
        *(((1,), 1, 1), ((1,), 1, 4)),
        *(((2, 2), s, m) for s in (1, 2, 3) for m in (1, 4)),
    }
    assert sum(j.plan == "fast-link" for j in jobs) == 2  # each mesh, without stages or microbatches
    assert [j.mesh for j in cases.jobs_of("p", meta, [(8,)], ("optimum",), 0)] == [(8,)]


def test_a_case_that_ends_its_process_costs_no_other_its_row(tmp_path):
    write(tmp_path, "01_dies", "len(jax.devices()) > 1 and os.environ.get('NEVER') is None and os._exit(3)")
    write(tmp_path, "02_fine")
    (tmp_path / "03_unreadable.py").write_text("import no_such_package_at_all")
    rows = cases.run_cases(tmp_path, plans=("optimum",))
    assert len(rows) == 5
    found = {(r.case, r.mesh): r for r in rows}
    assert found["01_dies", "1"].reason.startswith("the process ended with status 3")
    assert found["02_fine", "2"].status == found["02_fine", "1"].status == "agree"
    assert "no_such_package_at_all" in found["03_unreadable", "1"].reason
    assert [r.passed for r in rows if r.case != "02_fine"] == [False] * 3


@pytest.mark.slow
def test_a_case_that_never_ends_is_given_up(tmp_path):
    path = write(tmp_path, "01_hangs", "__import__('time').sleep(600)")
    (row,) = cases.run_jobs([Job(path, (1,))], {}, 20.0)
    assert (row.status, row.reason) == ("error", "no answer within 20 s")


@pytest.mark.slow
def test_what_a_case_forbids_on_standard_error_makes_it_differ(tmp_path):
    path = write(tmp_path, "01_noisy", "os.write(2, b'this is slow\\n')")
    (row,) = cases.run_jobs([Job(path, (1,))], {"forbid_stderr": "is slow"}, 120.0)
    assert (row.status, row.passed) == ("differ", False)


@pytest.mark.slow
def test_what_a_case_prints_does_not_end_up_in_the_json_document(tmp_path):
    write(tmp_path, "01_talks", "print('hello')")
    command = [sys.executable, "-m", "benchmarks.cases", str(tmp_path), "--mesh", "2", "--plan", "fast-link", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["passed"]) == (0, 1, True)
    assert [(r["case"], r["mesh"], r["plan"], r["status"]) for r in document["rows"]] == [("01_talks", "2", "fast-link", "agree")]


def row(**changed):
    return Row(**{**dict.fromkeys(Row.__dataclass_fields__), **{"case": "c", "mesh": "1", "stages": 1, "microbatches": 1}, **changed})


def test_the_table_marks_what_fails_and_says_why_refusals_pass():
    rows = [
        row(plan="optimum", status="differ", reason="greatest difference 3", worst_leaf="['w']", worst=9.5, seconds=1.0, passed=False),
        row(plan="optimum", status="refused", reason="not supported yet", seconds=0.1, passed=True, stages=2),
    ]
    text = cases.table(rows)
    assert "\n! c " in text and "['w']: greatest difference 3" in text
    assert "1 refusals pass" in text and "1 do not pass" in text


def test_the_exit_status_says_whether_the_bars_were_met(tmp_path, capsys):
    rows = [row(plan="optimum", status="agree", reason="", seconds=1.0, passed=True)]
    assert common.finish(rows, True, "a table", None) == 0
    assert common.finish(rows, False, "a table", str(tmp_path / "rows.json")) == 1
    assert capsys.readouterr().out == "a table\na table\n"
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["status"] == "agree"


@pytest.mark.parametrize("mesh", ["0", "2x", "x2", "two", "2X4"])
def test_a_mesh_that_is_no_shape_is_refused(tmp_path, mesh, capsys):
    with pytest.raises(SystemExit):
        cases.main([str(tmp_path), "--mesh", mesh])
    assert "a mesh is a shape" in capsys.readouterr().err


def test_a_directory_without_cases_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cases.main([str(tmp_path)])
    assert "no case file" in capsys.readouterr().err
