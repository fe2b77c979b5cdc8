"""Published rows beside predictions: what is read, how it is priced, what counts."""

from dataclasses import replace
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import models
from benchmarks.fidelity.case import Case, Layout, Model, Share, Skipped, Software
from benchmarks.fidelity.judge import Row, fits, groups, is_calibration, passed, summaries, told
from benchmarks.fidelity.mixed import master_weights
from benchmarks.fidelity.parts import parts_of, rerun, step_compute_s
from benchmarks.fidelity.pipeline import Piped, Stage, pipe
from benchmarks.fidelity.price import SOFTWARE, Price, _price, begins, communication, machine, model_parts, planned_case, price
from benchmarks.fidelity.read import _alpa_parts, _alpa_stages, read
from benchmarks.fidelity.timing import Work
from cost_models.overlap import exposed_seconds

MEGATRON = """# a comment
table,model,params_B,hw,gpus,gpus_per_node,seq,vocab,hidden,layers,heads,tp,pp,vpp_chunks,dp,mbs,gbs,precision,recompute,seq_par,schedule,\
system,step_time_s,step_time_s_derived,usable
T,a,1,A100-SXM4-80GB,64,8,2048,51200,3072,30,32,2,1,,32,8,512,fp16 mixed,full (every layer),no,none,Megatron-LM,,3.7,Y
T,b,1,A100-SXM4-80GB,64,8,2048,51200,3072,48,32,8,8,3,1,1,64,fp16 mixed,full,no,interleaved,Megatron-LM,18.1,,Y
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
    case, _ = _cases(MEGATRON, tmp_path / "rows.csv")
    assert isinstance(case, Case)
    assert case.layout == Layout(data=32, tensor=2, remat="full", microbatches=2)
    assert (case.file, case.row, case.step_s, case.dtype, case.model.layers) == ("rows.csv", 1, 3.7, "float16", 30)
    assert machine(case).shape == (8, 8)


def test_a_row_in_pipeline_stages_says_what_each_stage_holds(tmp_path):
    _, piped = _cases(MEGATRON, tmp_path / "rows.csv")
    assert isinstance(piped, Case)
    assert piped.layout.shares == (Share(2, 1, 8),) * 24
    assert (piped.layout.schedule, piped.layout.interleave, piped.layout.microbatches, piped.layout.devices) == ("interleaved", 3, 64, 64)


def test_layers_that_do_not_divide_into_stages_are_not_guessed(tmp_path):
    _, piped = _cases(MEGATRON.replace("3072,48,32", "3072,30,32"), tmp_path / "rows.csv")
    assert isinstance(piped, Skipped) and "30 layers" in piped.reason


ALPA = {"model": "GPT", "layers": "32", "pp": "", "dp": "", "op": ""}


@pytest.mark.parametrize(
    ("model", "plan", "shares"),
    [
        (
            {},
            "stages: layers[0,1 of 8]@mesh1x2 logical2x1 forceDP; layers[2,3]@mesh1x2 logical2x1; layers[4..7]@mesh1x4 logical1x4",
            (Share(8, 2, 1), Share(8, 2, 1), Share(16, 1, 4)),
        ),
        ({}, "layers='[[0; 1]; [2; 3]; [4; 5; 6; 7]]' physical='[[1; 4]]' logical='[[4; 1]; [2; 1]; [2; 2]]' opts=[{}]", None),
        ({"pp": "4", "dp": "2", "op": "2"}, "manual 3D", (Share(8, 2, 2),) * 4),
        ({"model": "MoE", "layers": "16", "pp": "4"}, "uniform_layer pipeline, one stage per GPU", (Share(2),) * 4),
        ({"model": "Wide-ResNet"}, "[0-8]@4 dp4; [9-10]@1; [11-13]@2 dp2; [14-15]@1", (Share(9, 4), Share(2), Share(3, 2), Share(2))),
        ({}, "stages: layers[all]@mesh1x1 logical1x1", ()),
    ],
)
def test_stages_are_read_as_alpa_writes_them(model, plan, shares):
    shares = (Share(8, 4, 1), Share(8, 2, 1), Share(16, 2, 2)) if shares is None else shares
    assert _alpa_stages({**ALPA, **model, "plan": plan}) == shares


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


def test_where_the_best_of_several_was_published_all_of_them_are_tried():
    row = {"num_microbatches": "", "remat": "yes", "notes": "micro-batch count is the best of 2..8, not recorded"}
    assert _alpa_parts(row) == {"remat": "full", "counts": (2, 4, 8)}
    case = replace(TINY, layout=Layout(data=8, counts=(2, 3)))
    assert price(case) == price(replace(case, layout=Layout(data=8, microbatches=2)))


PIPED = replace(TINY, model=replace(TINY.model, layers=4), layout=Layout(shares=(Share(2, 2, 2),) * 2, microbatches=4, schedule="1f1b"))
PLAIN = Software(waits_sends=False)


def test_the_parts_of_a_model_add_up_to_its_plan():
    case = replace(TINY, layout=Layout(data=4, tensor=2, microbatches=2))
    plan = planned_case(case, machine(case), PLAIN, 2)
    parts = parts_of(plan, machine(case), begins(case, 2))
    waited = sum(2 * (part.forward + part.backward).waited_s + part.update.waited_s for part in parts)
    assert step_compute_s(parts, 2) == pytest.approx(plan.predicted.compute_s, rel=0.03)
    assert waited == pytest.approx(plan.predicted.communication_s)
    leaves = [leaf for leaf in plan.inputs if ".params[" in leaf.path]
    held = sum(prod(leaf.shape) / prod(plan.mesh_shape[axis] for axis in leaf.sharding.axes) for leaf in leaves)
    assert sum(part.parameters for part in parts) == pytest.approx(held) and held > 0


def test_stages_put_together_take_what_a_plan_in_stages_does():
    kind, cluster = PIPED.layout.shares[0].submesh, machine(PIPED)
    found = pipe(PIPED, cluster, PLAIN, {kind: model_parts(PIPED, cluster, PLAIN, kind)})
    step, args = models.build("gpt-2.6b", batch=PIPED.batch, dtype=PIPED.dtype, tied=False, layers=4, **dict(PIPED.model.changes))
    options = autopar.Options(reduce_dtype="as_written", accumulate_dtype="as_written", remat="none")
    plan = autopar.manual(step, args, cluster, pipeline=2, data=2, tensor=2, microbatches=4, schedule="1f1b", options=options)
    assert found.step_s() == pytest.approx(plan.predicted.step_time_s, rel=0.1)


def _stage(forward_s: float, backward_s: float, sends_s: float = 0.0, returns_s: float = 0.0) -> Stage:
    return Stage(Work(forward_s), Work(backward_s), Work(0.0, 1.0), sends_s, returns_s, 100.0, 10.0, 5.0, 1.0)


def test_a_step_in_stages_follows_its_schedule_and_waits_for_what_is_sent():
    beside = Piped((_stage(1.0, 2.0), _stage(1.0, 2.0)), 2, "1f1b", 4, waits=False)
    waiting = Piped((_stage(1.0, 2.0, sends_s=0.5), _stage(1.0, 2.0, returns_s=0.5)), 2, "1f1b", 4, waits=True)
    assert beside.step_s() == pytest.approx(5 * 3.0 + 1.0)
    assert beside.step_s(0.5) == pytest.approx(5 * 6.0 + 1.0)
    assert waiting.step_s() > beside.step_s() + 4 * 0.5
    assert beside.peak_bytes == 100 + 2 * 10 + 5


def test_checkpoints_of_whole_layers_run_more_again_than_backward_needs():
    case = replace(TINY, layout=Layout(tensor=8))
    parts = parts_of(planned_case(case, machine(case), PLAIN, 2), machine(case), begins(case, 2))
    layers, needed, cores = (rerun(parts, what) for what in ("layers", "needed", "cores"))
    assert layers.compute_s > needed.compute_s > cores.compute_s > 0
    assert layers.waited_s > needed.waited_s > cores.waited_s
    assert rerun(parts, "") == Work()


def test_norms_that_stay_whole_are_not_gathered():
    model = Model("gpt-2.6b", 2, (("hidden", 6144), ("heads", 64), ("seq", 2048), ("vocab", 1024)))
    case = replace(TINY, model=model, layout=Layout(tensor=8), batch=4)
    plan = planned_case(case, machine(case), PLAIN, 2)
    cut, whole = (parts_of(plan, machine(case), begins(case, 2), kernels)[2].forward.waited_s for kernels in (False, True))
    sums = [c.seconds for c in plan.collectives if c.kind == "all_reduce" and c.phase == "forward" and c.purpose.endswith(("out", "down"))]
    assert cut > 1.2 * whole and whole > 0.9 * sum(sums) / 2
    moved, kept = (communication(plan, False, whole_norms).awaited for whole_norms in (False, True))
    assert moved > kept > 0


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
    assert group.plans == 3 and group.rank == pytest.approx(0.5) and group.regret == pytest.approx(1.0) and group.counts


def test_groups_with_rows_that_are_partly_usable_are_told_apart():
    rows = [_row(p, 4 - p, group="g", usable=usable) for p, usable in ((1.0, "Y"), (2.0, "partial"), (3.0, "Y"))]
    (group,) = groups(rows)
    assert group.rank == pytest.approx(-1.0) and not group.counts


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
