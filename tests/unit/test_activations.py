"""Closed forms of activation memory, against the paper's figures and their own limits."""

import json
from dataclasses import replace

import pytest

from benchmarks import activations as bench
from cost_models import ClusterError
from cost_models.activations import Transformer, layer_bytes, stage_bytes, state_bytes

GPT3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, microbatch=1)
UNIT = 2048 * 12288


def test_one_device_keeps_34_sbh_and_the_scores():
    assert layer_bytes(GPT3) == pytest.approx(UNIT * (34 + 5 * 96 * 2048 / 12288))
    assert layer_bytes(GPT3, recompute="selective") == 34 * UNIT and layer_bytes(GPT3, recompute="full") == 2 * UNIT


def test_sequence_parallelism_divides_all_and_tensor_parallelism_all_but_ten():
    for recompute in ("none", "selective"):
        whole = layer_bytes(GPT3, recompute=recompute)
        assert layer_bytes(GPT3, 8, True, recompute) == pytest.approx(whole / 8)
        assert layer_bytes(GPT3, 8, False, recompute) == pytest.approx((whole - 10 * UNIT) / 8 + 10 * UNIT)


def test_the_first_stage_keeps_all_layers_worth_and_more_when_interleaved():
    assert stage_bytes(GPT3, 8, 1) == stage_bytes(GPT3, 8, 16) == 96 * layer_bytes(GPT3, 8)
    assert stage_bytes(GPT3, 8, 8, 3) == pytest.approx(96 * layer_bytes(GPT3, 8) * (1 + 7 / 24))


def test_memory_grows_with_the_microbatch_alone():
    assert stage_bytes(replace(GPT3, microbatch=4)) == 4 * stage_bytes(GPT3)
    assert state_bytes(replace(GPT3, microbatch=4), 8, 8) == state_bytes(GPT3, 8, 8) == 18 * GPT3.parameters / 64


def test_an_unknown_recomputation_is_refused():
    with pytest.raises(ClusterError, match="selective"):
        layer_bytes(GPT3, recompute="some")


def test_the_papers_figures_are_met_to_a_percent(capsys):
    assert bench.main(["--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 32 and max(abs(row["error"]) for row in found["rows"]) < 0.01


def test_a_figure_that_is_off_is_found(tmp_path):
    file = tmp_path / "off.csv"
    file.write_text(bench.DATA.read_text().replace("66.84375", "64.0"))
    assert bench.main([str(file)]) == 1
