"""Values made again instead of kept: numbers, collectives, and the compiler's own memory figures."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import autopar
import cost_models
from autopar import models, rules as rule_table
from autopar.compiler.compilation import logical_meshes
from autopar.costs import Pricer, fusion_charges
from autopar.errors import InfeasibleError, PlanError
from autopar.intraop.choose import SolveOptions, TooSlow, choose_on
from autopar.intraop.clusters import is_elementwise
from autopar.intraop.meshes import WORTHWHILE, Search, choose
from autopar.intraop.remat import Variants, borders
from autopar.intraop.shape import shape_of
from autopar.ir.check import check_graph
from autopar.ir.graph import GATE
from autopar.ir.mesh import LogicalMesh
from autopar.trace.recompute import doubled, recompute, recomputed_ops, repeatable
from autopar.trace.trace import trace
from benchmarks import forced
from benchmarks.programs import SMALL, repeated, zoo

LAYERS, WIDTH, HIDDEN, ROWS = 8, 64, 512, 512
MIB = 2**20


def layer(w, x):
    return jnp.tanh(jnp.sin(x @ w) @ w.T)


def deep_step(checkpoint: bool = False):
    f = jax.checkpoint(layer) if checkpoint else layer

    def step(ws, x):
        def loss(ws):
            h = x
            for w in ws:
                h = f(w, h)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def deep_arguments():
    keys = jax.random.split(jax.random.PRNGKey(0), LAYERS + 1)
    return [jax.random.normal(k, (WIDTH, HIDDEN)) * 0.1 for k in keys[1:]], jax.random.normal(keys[0], (ROWS, WIDTH))


def plan_deep(devices: int, memory: float | None, remat: str = "auto", checkpoint: bool = False) -> autopar.Plan:
    cluster = cost_models.load_cluster(f"host:{devices}", measure=False)
    options = autopar.Options(memory_bytes=None if memory is None else int(memory), remat=remat, axis_names=("x",), microbatches=1)
    return autopar.plan(deep_step(checkpoint), deep_arguments(), cluster, options=options)


def temporaries(plan: autopar.Plan, checkpoint: bool = False) -> int:
    """The compiler's own figure, after a check of numbers and collectives."""
    report = plan.verify(deep_step(checkpoint), deep_arguments(), steps=2)
    assert report.numbers.agree and report.collectives.agree, report
    return int(report.memory.actual.replace(",", "").split()[0])


def variants_of(step, args, mode: str = "auto") -> Variants:
    traced = trace(step, args)

    def fold(graph):
        return shape_of(graph, [rule_table.rule_for(op, graph.aval) for op in graph.ops], traced.roles.carried)

    return Variants(traced.graph, fold, mode)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_budget_short_by_some_layers_costs_some_recomputed_layers(devices):
    free = plan_deep(devices, None)
    assert free.remat == "none" and not free.recomputed
    budgets = [int(free.predicted.peak_bytes * share) for share in (0.7, 0.45, 0.3)]
    plans = [plan_deep(devices, budget) for budget in budgets]
    assert all(p.remat == "auto" and p.recomputed for p in plans)
    assert len({len(p.recomputed) for p in plans}) == 3
    times = [free.predicted.step_time_s, *(p.predicted.step_time_s for p in plans)]
    assert times == sorted(times) and times[-1] < 1.5 * times[0]
    for plan, budget in zip(plans, budgets, strict=True):
        found = temporaries(plan)
        assert plan.predicted.peak_bytes <= budget
        assert found <= 1.25 * plan.predicted.temp_bytes
        assert plan.predicted.temp_bytes <= 1.15 * found


def test_a_users_checkpoint_is_run_again_and_saves_memory():
    plain, checkpointed = plan_deep(1, None), plan_deep(1, None, checkpoint=True)
    assert checkpointed.predicted.temp_bytes < 0.4 * plain.predicted.temp_bytes
    assert temporaries(checkpointed, checkpoint=True) < 0.4 * temporaries(plain)
    stock = jax.jit(deep_step(True)).lower(*deep_arguments()).compile().memory_analysis().temp_size_in_bytes
    assert temporaries(checkpointed, checkpoint=True) <= 1.5 * stock


def test_a_users_checkpoint_that_allows_merging_is_merged():
    step = lambda x: jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)), prevent_cse=False)(x).sum())(x)  # noqa: E731
    graph = trace(step, (jnp.ones(8),)).graph
    assert not graph.again and GATE not in [op.primitive for op in graph.ops]


@pytest.mark.parametrize("mode", ["dots", "full"])
def test_the_modes_make_again_what_they_say(mode):
    plan = plan_deep(1, None, mode)
    assert plan.remat == mode
    graph = trace(deep_step(), deep_arguments()).graph
    again = {graph.ops[graph.producer[v]].primitive for v in plan.recomputed}
    assert "sin" in again and ("dot_general" in again) == (mode == "full")
    assert temporaries(plan) < temporaries(plan_deep(1, None, "none"))
    assert "recomputed" in dict(plan.cost_split) and f"recomputed ({mode})" in plan.table()


def test_no_recomputation_is_no_plan_where_memory_would_need_it():
    budget = plan_deep(1, None).predicted.peak_bytes * 0.5
    with pytest.raises(InfeasibleError):
        plan_deep(1, budget, "none")


def test_recomputation_is_never_dearer_than_doing_without():
    free = plan_deep(8, None, "none").predicted.peak_bytes
    for share in (0.95, 0.8):
        without = plan_deep(8, share * free, "none").predicted.step_time_s
        assert plan_deep(8, share * free).predicted.step_time_s <= without * (1 + 1e-9)


def quiet(text: str) -> None:
    pass


def zero() -> float:
    return 0.0


def three_layers(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.sin(h @ w) @ w.T
        return jnp.mean(h**2)

    return jax.grad(loss)(ws)


@pytest.mark.parametrize("share", [0.8, pytest.param(0.55, marks=pytest.mark.slow)])
def test_what_is_made_again_is_close_to_the_best_of_all_subsets(share):
    args = [jax.ShapeDtypeStruct((32, 256), jnp.float32)] * 3, jax.ShapeDtypeStruct((256, 32), jnp.float32)
    variants = variants_of(three_layers, args)
    pricer = Pricer(cost_models.load_cluster("host:1", measure=False), LogicalMesh(("x",), (1,)))
    options = SolveOptions(gap=0.0)

    def price(values: frozenset[int], budget: float | None) -> float:
        try:
            return choose_on(variants.shape(values), pricer, budget, {}, options, quiet, zero, False).price.total_s
        except InfeasibleError:
            return float("inf")

    budget = share * choose_on(variants.shape(), pricer, 1e12, {}, options, quiet, zero).peak_bytes
    large = [v for v in variants.every() if variants.graph.avals[v].nbytes >= 256 * 256 * 4]
    assert 5 <= len(large) <= 9
    best = min(price(frozenset(chosen), budget) for n in range(len(large) + 1) for chosen in combinations(large, n))
    found = Search(variants, pricer.cluster, budget, lambda mesh: {}, options, quiet, zero).best(pricer.mesh)
    assert found.peak_bytes <= budget and best < float("inf")
    assert found.price.total_s <= 1.02 * best


@pytest.mark.slow
def test_a_search_over_meshes_finds_what_the_best_of_them_has():
    """Meshes are passed over by bound and by promise, and what is given up by bound is no faster."""
    cluster = cost_models.load_cluster("h100-sxm:8")
    variants = variants_of(deep_step(False), deep_arguments())
    budget = 0.9 * plan_deep(8, None).predicted.peak_bytes
    meshes = logical_meshes(cluster, ("x", "y"))
    search = Search(variants, cluster, budget, lambda mesh: {}, SolveOptions(), quiet, zero)
    alone = []
    for mesh in meshes:
        with suppress(InfeasibleError):
            alone.append(search.best(mesh, least=False).price.total_s)
    found, _ = choose(search, meshes)
    assert found.peak_bytes <= budget
    assert found.price.total_s <= min(alone) * (1 + 2 * WORTHWHILE)
    with pytest.raises(TooSlow):
        choose(replace(search, below=1e-9), meshes, least=False)


def test_a_refusal_of_an_impossible_budget_names_one_that_works():
    with pytest.raises(InfeasibleError) as refused:
        plan_deep(8, 1000)
    least = refused.value.peak_bytes
    assert plan_deep(8, least).predicted.peak_bytes <= least
    with pytest.raises(InfeasibleError):
        plan_deep(8, 0.9 * least)


def test_a_plan_with_recomputation_is_saved_and_runs_from_its_file(tmp_path):
    plan = plan_deep(1, None, "full")
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    step, (ws, x) = autopar.parallelize(deep_step(), plan=tmp_path / "plan.json"), deep_arguments()
    ours, theirs = step(ws, x), jax.jit(deep_step())(ws, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    damaged = tmp_path / "damaged.json"
    first = f"[{plan.recomputed[0]}, "
    damaged.write_text((tmp_path / "plan.json").read_text().replace(f'"recomputed": {first}', '"recomputed": [99999, ', 1))
    with pytest.raises(PlanError, match="makes value 99999 again"):
        autopar.parallelize(deep_step(), plan=damaged)(ws, x)


def test_dropout_masks_are_the_same_when_made_again():
    def step(w, x, key):
        def loss(w):
            h = x
            for k in jax.random.split(key, 4):
                h = jnp.where(jax.random.bernoulli(k, 0.5, h.shape), jnp.tanh(h @ w), 0.0)
            return jnp.mean(h**2)

        return jax.grad(loss)(w)

    args = jax.random.normal(jax.random.PRNGKey(1), (64, 64)) * 0.2, jnp.ones((128, 64)), jax.random.PRNGKey(2)
    plan = autopar.plan(step, args, cost_models.load_cluster("host:8", measure=False), options=autopar.Options(remat="full"))
    graph = recompute(trace(step, args).graph, plan.recomputed)
    assert {"random_bits", "select_n"} <= {graph.ops[i].primitive for i in recomputed_ops(graph)}
    report = plan.verify(step, args, steps=1)
    assert report.numbers.agree and report.collectives.agree, report


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny"])
def test_a_random_plan_of_a_model_that_makes_all_again_runs_as_planned(name):
    row = forced.row(zoo(name, optimizer="sgd"), (2, 4), "remat", 0, forced.Counter())
    assert row.status == "agree", forced.table([row])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 4), (3,)], ids=str)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "unet-tiny"])
def test_random_plans_of_models_that_make_all_again_run_as_planned(name, sizes):
    row = forced.row(zoo(name), sizes, "remat", 1, forced.Counter())
    assert row.status == "agree", forced.table([row])


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny", "wresnet-tiny"])
def test_what_is_made_again_keeps_a_graph_whole(name):
    subject = zoo(name, optimizer="sgd")
    graph = subject.traced.graph
    again = repeated(subject).traced.graph
    check_graph(again)
    assert len(recomputed_ops(again)) > 20
    assert [graph.avals[v] for v in graph.inputs] == [again.avals[v] for v in again.inputs]
    assert [graph.aval(o) for o in graph.outputs] == [again.aval(o) for o in again.outputs]
    both = doubled(graph, repeatable(graph))
    assert not both.twin and both.graph == graph


def test_the_narrow_places_of_a_transformer_are_between_its_blocks():
    step, args = models.build("gpt-125m", batch=8)
    variants = variants_of(step, args)
    graph, found = variants.graph, borders(variants.shape())
    sizes = sorted((graph.avals[v].nbytes for v in found), reverse=True)
    stream = 8 * 2048 * 768 * 2
    assert sizes[:24] == [stream] * 24 and all(size <= stream / 100 for size in sizes[24:])


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny", "wresnet-tiny", "unet-tiny"])
def test_no_fusion_waits_for_itself(name):
    step, args = models.build(name)
    graph = trace(step, args).graph
    charges = fusion_charges(graph, [is_elementwise(rule_table.rule_for(op, graph.aval)) for op in graph.ops])
    between = nx.DiGraph()
    for i, op in enumerate(graph.ops):
        for o in op.inputs:
            p = graph.producer.get(o)
            if p is not None and charges.groups[p] != charges.groups[i]:
                between.add_edge(charges.groups[p], charges.groups[i])
    assert nx.is_directed_acyclic_graph(between)
