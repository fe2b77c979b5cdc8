"""Published rows beside predictions: what is read, how it is priced, what counts."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.fidelity.case import Case, Layout, Model, Skipped
from benchmarks.fidelity.judge import Row, fits, groups, is_calibration, passed, summaries, told
from benchmarks.fidelity.mixed import master_weights
from benchmarks.fidelity.price import SOFTWARE, Price, _price, communication, machine, planned_case, price
from benchmarks.fidelity.read import read
from cost_models.overlap import exposed_seconds

MEGATRON = """# a comment
table,model,params_B,hw,gpus,gpus_per_node,seq,vocab,hidden,layers,heads,tp,pp,vpp_chunks,dp,mbs,gbs,precision,recompute,seq_par,schedule,\
system,step_time_s,step_time_s_derived,usable
T,a,1,A100-SXM4-80GB,64,8,2048,51200,3072,30,32,2,1,,32,8,512,fp16 mixed,full (every layer),no,none,Megatron-LM,,3.7,Y
T,b,1,A100-SXM4-80GB,64,8,2048,51200,3072,30,32,8,8,3,1,1,64,fp16 mixed,full,no,interleaved,Megatron-LM,18.1,,Y
T,c,1,A100-SXM4-80GB,64,8,2048,51200,3072,30,32,2,1,,32,8,512,fp16 mixed,full,no,none,Megatron-LM,,,N
"""
FSDP = """section,model,hidden,heads,layers,vocab,seq,gpus,gpu,gpus_per_node,sharding,precision,act_ckpt,act_cpu_offload,grad_accum,gbs,\
step_time_s_derived,usable
A100 with 1600 Gbps RoCE,m,4096,32,32,50368,2048,16,a100_40gb,8,FULL_SHARD,bf16,True,False,4,384,26.7,Y
"""
TINY = Case(
    *("f", "t", 1, "Y", "megatron", "H100", 8, 8),
    Model("gpt-2.6b", 3, (("hidden", 1024), ("heads", 16), ("seq", 512), ("vocab", 1024))),
    Layout(data=4, tensor=2, remat="full"),
    *(16, "bfloat16", 1.0),
)


def _cases(text: str, path: Path) -> list[Case | Skipped]:
    path.write_text(text)
    return list(read([path]))


def test_a_row_says_its_model_its_plan_and_its_machine(tmp_path):
    case, piped = _cases(MEGATRON, tmp_path / "rows.csv")
    assert isinstance(case, Case) and isinstance(piped, Skipped)
    assert case.layout == Layout(data=32, tensor=2, remat="full", microbatches=2)
    assert (case.file, case.row, case.step_s, case.dtype, case.model.layers) == ("rows.csv", 1, 3.7, "float16", 30)
    assert machine(case).shape == (8, 8)


def test_rows_with_pipeline_stages_say_why_they_are_not_predicted(tmp_path):
    _, piped = _cases(MEGATRON, tmp_path / "rows.csv")
    assert "pipeline" in piped.reason


def test_fully_sharded_rows_share_the_nodes_network_interfaces(tmp_path):
    (case,) = _cases(FSDP, tmp_path / "rows.csv")
    assert case.layout == Layout(data=16, zero=3, remat="full", microbatches=4)
    assert machine(case).topology.network.bytes_per_s == pytest.approx(1600e9 / 8 / 8)


def test_a_table_of_another_kind_is_refused_row_by_row(tmp_path):
    (row,) = _cases("kind,size,usable\na,1,Y\n", tmp_path / "rows.csv")
    assert "no known table" in row.reason


def test_layers_lie_on_a_line():
    whole = _price(TINY, machine(TINY), SOFTWARE["megatron"], 3)
    line = price(TINY)
    assert line.step_s() == pytest.approx(whole.step_s(), rel=1e-3)
    assert line.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_layers_wait_for_tensor_parallel_sums_and_not_for_gathers_of_state():
    case = replace(TINY, layout=Layout(data=8, zero=3))
    gathers = communication(planned_case(case, machine(case), SOFTWARE["megatron"], 1), again=False)
    sums = communication(planned_case(replace(case, layout=Layout(tensor=8)), machine(case), SOFTWARE["megatron"], 1), again=False)
    assert gathers.within > 5 * gathers.awaited
    assert sums.awaited > 2 * sums.within


def test_gathering_again_for_backward_costs_the_gathers_once_more():
    plan = planned_case(replace(TINY, layout=Layout(data=8, zero=3)), machine(TINY), SOFTWARE["megatron"], 1)
    once, twice = communication(plan, again=False), communication(plan, again=True)
    gathers = sum(c.seconds for c in plan.collectives if c.kind == "all_gather" and c.purpose.startswith("gather state"))
    assert twice.within - once.within >= 0.99 * gathers > 0
    assert twice.awaited == once.awaited


def test_what_runs_beside_compute_is_exposed_beyond_it_only():
    assert exposed_seconds(3.0, 2.0, 0.5) == 2.0
    assert Price(2.0, 1.0, 3.0, 0.0).step_s() == 4.0
    assert Price(2.0, 1.0, 3.0, 0.0).step_s(0.5) == 5.0


def test_every_fit_is_one_number_from_three_rows_at_most():
    known = fits()
    assert all(1 <= len(fit.rows) <= 3 for fit in known)
    assert len({(fit.machine, fit.software) for fit in known}) == len(known)


def test_calibration_rows_are_told_by_their_table_and_seconds():
    fit = next(f for f in fits() if f.software == "megatron-2020" and f.machine == "a100-40")
    names = ("f", "README Sept-2020 (MP)", 1, "Y", "megatron-2020", "DGX A100 (8x A100-SXM4-40GB)", 1, 1)
    mine = Case(*names, TINY.model, TINY.layout, 16, "", 1.076)
    assert is_calibration(mine, fit)
    assert not is_calibration(replace(mine, step_s=1.077), fit)
    assert not is_calibration(replace(mine, software="megatron"), fit)


def _row(published: float, predicted: float, **rest) -> Row:
    return Row("f", "t", 1, published, predicted, predicted / published - 1, **rest)


def test_the_order_of_plans_and_the_regret_of_the_one_we_would_take():
    (group,) = groups([_row(p, q, group="g") for p, q in ((1.0, 2.0), (2.0, 1.5), (3.0, 4.0))])
    assert group.plans == 3 and group.rank == pytest.approx(0.5) and group.regret == pytest.approx(1.0)


def test_rows_that_served_to_fit_do_not_count():
    rows = [_row(1.0, 1.1), _row(1.0, 3.0, calibration=True), _row(1.0, 5.0, usable="partial")]
    whole = summaries(rows)[-2]
    assert whole.table == "all" and whole.rows == 1 and whole.median_error == pytest.approx(0.1)
    assert passed(rows) and not passed([*rows, _row(1.0, 1.9)])


def test_what_ran_must_be_said_to_fit():
    assert told([_row(1.0, 1.0, fits=True, predicted_fits=True), _row(1.0, 1.0, fits=False, predicted_fits=True)]) == (1, 2)


def test_master_weights_follow_the_float32_optimiser():
    params = {"w": jnp.linspace(-1, 1, 64, dtype=jnp.float16)}
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    narrow, plain = master_weights(optax.adamw(1e-2)), optax.adamw(1e-2)
    state, reference = narrow.init(params), plain.init(wide)
    for step in range(3):
        grads = {"w": jnp.sin(jnp.arange(64, dtype=jnp.float16) + step)}
        updates, state = narrow.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, reference = plain.update(jax.tree.map(lambda g: g.astype(jnp.float32), grads), reference, wide)
        wide = optax.apply_updates(wide, updates)
    assert jnp.allclose(state.params["w"], wide["w"], atol=1e-6)
    assert jnp.max(jnp.abs(params["w"].astype(jnp.float32) - wide["w"])) < 2e-3
