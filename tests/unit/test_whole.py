"""What runs whole, and the list of primitives in the docs."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from autopar.trace.trace import trace
from benchmarks import whole

DOCS = Path(__file__).parents[2] / "docs"


def test_of_the_tiny_models_less_than_a_thousandth_runs_whole():
    found = list(whole.rows(["mlp-tiny", "gpt-tiny", "moe-tiny", "wresnet-tiny"], None))
    assert all(r.flops > 0 and r.flops_share <= whole.BAR for r in found), whole.table(found)


def test_an_op_without_a_rule_counts_as_whole_as_often_as_its_loop_runs():
    def step(x):
        return jax.lax.fori_loop(0, 5, lambda i, c: jnp.linalg.cholesky(c @ c.T + jnp.eye(8)), x)

    row = whole.measure("loop", trace(step, (jnp.eye(8),)).graph)
    assert row.primitives.split()[0] == "cholesky" and 0 < row.flops_share < 1
    assert row.whole_flops == 5 * 64


def test_the_list_of_primitives_in_the_docs_is_that_of_the_table():
    assert (DOCS / "primitives.md").read_text() == whole.primitives()
