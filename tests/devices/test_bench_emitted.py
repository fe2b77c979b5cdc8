"""`python -m benchmarks.emitted`: both programs of a plan run in turn, and what passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import emitted
from benchmarks.emitted import Row, Summary

FINE = Row("mlp-tiny", "x=8", 3, 1.0, 1.0, 1.0, 2.0, 2.0)


def test_both_programs_of_a_plan_are_compiled_and_timed():
    row = emitted.measure("mlp-tiny", "host:2", 2)
    assert min(row.step_s, row.jit_step_s, row.compile_s, row.jit_compile_s, row.ratio) > 0
    assert (row.model, row.mesh) == ("mlp-tiny", "x=2")


@pytest.mark.parametrize("change, passed", [({}, True), ({"ratio": 1.2}, True), ({"ratio": 1.21}, False), ({"compile_s": 3.01}, False)])
def test_a_model_passes_within_its_bars(change, passed):
    assert replace(FINE, **change).passed == passed


def test_the_mean_is_geometric():
    assert emitted.summary([replace(FINE, ratio=0.5), replace(FINE, ratio=2.0, compile_s=8.0)]) == Summary(1.0, 2.0)


def test_a_model_that_is_none_is_refused_with_the_ones_that_are_close(capsys):
    with pytest.raises(SystemExit) as ended:
        emitted.main(["gpt-tny"])
    assert ended.value.code == 2
    assert "no model is called gpt-tny; close matches: gpt-tiny" in capsys.readouterr().err
