"""The plan beside data parallelism, ZeRO, FSDP and the grid."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from deep_step import deep, deep_arguments
from typer.testing import CliRunner

import cost_models
from autopar import api, models
from autopar.api.compare import Attempt, grid_of
from autopar.cli import app
from autopar.trace.trace import trace
from benchmarks import baselines as benchmark

SMALL = cost_models.load_cluster("h100-sxm:4", measure=False)


@pytest.fixture(scope="module")
def found():
    step, args = models.build("mlp-small", batch=64, layers=2, hidden=1024)
    return api.baselines(step, args, SMALL)


def test_no_baseline_is_faster_than_the_plan(found):
    assert found.passed and found.best.ratio >= 1.0 - 1e-4
    assert [b.setting.name for b in found.baselines] == ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "grid"]
    assert all(b.ratio == pytest.approx(b.step_time_s / found.plan.predicted.step_time_s) for b in found.baselines)


def test_baselines_hold_less_from_level_to_level(found):
    peaks = [b.peak_bytes for b in found.baselines[:4]]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[3]


def test_the_grid_is_all_shapes_with_tensor_parallelism():
    settings = list(grid_of(8))
    assert {(s.data, s.tensor) for s in settings} == {(4, 2), (2, 4), (1, 8)}
    assert all(s.zero == 0 for s in settings if s.data == 1) and any(s.sequence_parallel for s in settings)


def test_a_baseline_that_is_faster_fails_the_comparison(found):
    first = found.baselines[0]
    faster = replace(first, step_time_s=0.9 * found.plan.predicted.step_time_s, ratio=0.9)
    assert not api.Comparison(found.plan, (faster,), 1).passed
    row = benchmark.Row("m", "c", 1, "", "data parallel", "", "priced", 1.0, 0, 0.9, "planned")
    assert benchmark.beaten([row, replace(row, ratio=None), replace(row, kind="measured")]) == [row]


def test_what_fits_only_when_made_again_is_made_again():
    args = deep_arguments()
    peak = api.manual(deep, args, SMALL, data=4).predicted.peak_bytes
    options = api.Options(memory_bytes=int(0.9 * peak))
    attempt = Attempt(trace(deep, args), SMALL, options, 1.0, lambda text: None)
    best = attempt.best(api.Setting("data parallel", 4))
    assert best.status == "planned" and best.setting.remat in ("dots", "full") and best.peak_bytes <= 0.9 * peak
    assert attempt.best(api.Setting("data parallel", 4, remat="none")).status == "does not fit"


def test_the_command_prints_a_table_and_one_document():
    result = CliRunner().invoke(app, ["baselines", "mlp-tiny", "--cluster", "fast-link:2", "-k", "layers=2", "--json", "-"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and document["passed"] and document["rows"][0]["name"] == "autopar"
    assert {row["status"] for row in document["rows"]} == {"planned"}


def test_the_benchmark_writes_rows_a_table_and_a_page(tmp_path, capsys):
    page = tmp_path / "page.md"
    case = "mlp-tiny@fast-link:2@24@layers=2"
    assert benchmark.main([case, "--markdown", str(page), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"model", "cluster", "batch", "step_time_s", "ratio"} <= set(rows[0]) and rows[0]["fields"] == "layers=2"
    assert f"`python -m benchmarks.baselines {case}" in page.read_text() and "| mlp-tiny layers=2 | fast-link:2 | 24 |" in page.read_text()
