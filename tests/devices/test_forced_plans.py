"""Any legal plan gives one device's numbers, and its collectives are the compiled program's."""

from __future__ import annotations

from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_examples
from small_steps import STEPS

import cost_models
from autopar.costs import Pricer
from autopar.emit.hlo import read_collectives
from autopar.intraop.connect import connect
from autopar.intraop.forced import cut_share
from autopar.intraop.merges import merging_casts
from autopar.ir.sharding import TensorSharding
from autopar.ir.strategy import Strategy
from benchmarks import coverage, forced
from benchmarks.programs import QUICK, SMALL, Program, program, zoo

EVERY_MESH = ((2, 4), (3,), (8,))
PLANS = {
    "mlp-tiny": 10,
    "gpt-tiny": 4,
    "llama-tiny": 5,
    "moe-tiny": 3,
    "wresnet-tiny": 5,
    "vit-tiny": 4,
    "unet-tiny": 1,
    "t5-tiny": 3,
}
"""Random plans of each model on each mesh, fewer where compiling takes long."""
LONG = "unet-tiny"
"""With adamw it has more than four thousand ops."""
MORE_SEEDS = range(1000, 1200)
NOT_UNDER_SHARD_MAP = ("mulhi",)
"""JAX itself cannot compile these under `shard_map`."""
FAMILIES = {f.__name__: f for f in (*rule_examples.FAMILIES, *rule_examples.SLOW)}


@cache
def small(name: str) -> Program:
    with jax.enable_x64(True):
        step, args = STEPS[name]()
    return program(name, step, args)


def assert_agrees(subject: Program, sizes: tuple[int, ...], kind: str, seed: int = 0, seen: coverage.Ran | None = None) -> forced.Row:
    row = forced.row(subject, sizes, kind, seed, Counter() if seen is None else seen)
    assert row.status == "agree", forced.table([row])
    return row


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 4), (3,)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_random_plan_of_a_small_step_runs_as_planned(name, sizes, seed):
    row = assert_agrees(small(name), sizes, "random", seed)
    assert row.cut_share >= 0.5
    assert row.passes > 0


@pytest.mark.parametrize("name", STEPS)
def test_the_optimum_of_a_small_step_runs_as_planned(name):
    assert_agrees(small(name), (2, 4), "fast-link")


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_a_scatter_of_one_row_stays_in_its_part(mode):
    """XLA bounds its index by the array that the part was sliced from."""
    with jax.enable_x64(True):
        array, row = jnp.arange(12 * 24.0).reshape(12, 24), -jnp.arange(24.0)
        subject = program("row", lambda a, v, i: a.at[i].set(v, mode=mode), (array, row, jnp.int64(3)))
    for seed in range(9):
        assert_agrees(subject, (2, 4), "random", seed)


def test_a_model_that_is_none_is_refused_with_the_ones_that_are_close(capsys):
    with pytest.raises(SystemExit) as ended:
        forced.main(["--model", "gpt-tny"])
    assert ended.value.code == 2
    assert "no model is called gpt-tny; close matches: gpt-tiny" in capsys.readouterr().err


def test_on_a_mesh_of_one_device_a_random_plan_cuts_nothing():
    row = assert_agrees(small("perceptron"), (1,), "random")
    assert (row.cut_share, row.planned) == (0, 0)


def test_a_wrong_factor_in_any_leaf_shows():
    subject = small("perceptron")
    outputs = list(subject.expected[0])
    assert subject.error(0, outputs)[0] == 0
    for k, name in enumerate(subject.traced.graph.output_names):
        wrong = [np.asarray(x) * 2 if i == k else x for i, x in enumerate(outputs)]
        error, worst = subject.error(0, wrong)
        assert error > 0.4 and worst == name


def test_code_that_is_compiled_fast_has_the_same_collectives():
    subject = small("attention")
    plan, _ = forced.plan_for(subject, forced.logical((3,)), "random", 0)
    found = []
    with subject.mode:
        for options in (QUICK, {}):
            compiled = forced.executable(subject, plan, options).compiled
            found.append([(c.kind, c.ids, c.nbytes, c.groups) for c in read_collectives(compiled.as_text())])
    assert sorted(found[0]) == sorted(found[1])
    assert found[0]


@pytest.mark.parametrize("passes", [True, False])
def test_both_sides_of_a_cast_of_partial_sums_are_one_array(passes):
    """Both are reduced alike. The compiler makes that one reduction where the cast passes partial sums on."""
    step = lambda a, b: (jnp.sin(a @ b), jnp.cos((a @ b).astype(jnp.float32)))  # noqa: E731
    args = [jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.bfloat16) for s in ((4, 8), (8, 6))]
    truth = [np.asarray(x) for x in step(*(np.asarray(x, np.float64) for x in args))]
    subject, mesh = program("casts", step, args, "bfloat16", truth), forced.logical((2,))
    graph, rules = subject.traced.graph, subject.rules
    pricer = Pricer(cost_models.load_cluster("fast-link:2"), mesh)
    whole, rows = TensorSharding(((), ())), TensorSharding((("x",), ()))
    contracted = Strategy(cuts=((rules[0].operands[0][1][0], ("x",)),))
    by_rows = [Strategy(cuts=((rule.operands[0][0][0], ("x",)),)) for rule in rules]
    cast = next(i for i, op in enumerate(graph.ops) if op.primitive == "convert_element_type")
    by_rows[cast] = Strategy(passes=(("x", 0),)) if passes else by_rows[cast]
    plan = connect(graph, rules, mesh, [contracted, *by_rows[1:]], [whole, whole], [rows, rows], pricer.move)
    assert merging_casts(graph, rules, plan) == ({cast} if passes else set())
    assert forced.check(subject, plan, pricer)[1].agree == (not passes)


def test_random_plans_are_the_same_for_the_same_seed_and_differ_between_seeds():
    subject, mesh = small("perceptron"), forced.logical((2, 4))
    first, again, other = (forced.plan_for(subject, mesh, "random", seed)[0] for seed in (3, 3, 4))
    assert first == again != other
    assert cut_share(subject.traced.graph, first) >= 0.5


def assert_everything_runs(subject: Program, sizes: tuple[int, ...], seen: coverage.Ran, wanted: set[coverage.Pair]) -> list[forced.Row]:
    """Runs plans until each wanted (primitive, method) has run; plans that would add none are passed over."""
    found = []
    for seed in MORE_SEEDS:
        if not coverage.missing(seen, wanted):
            break
        plan, _ = forced.plan_for(subject, forced.logical(sizes), "random", seed)
        added = coverage.ran(subject.traced.graph, subject.rules, plan)
        if len(coverage.missing(seen + added, wanted)) < len(coverage.missing(seen, wanted)):
            found.append(assert_agrees(subject, sizes, "random", seed, seen))
    return found


def without_nan(x):
    """XLA's reductions of maxima over devices lose them in code that is compiled fast."""
    return jnp.where(jnp.isnan(x), 0, x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rule_runs_on_devices(name):
    """All examples of a family are one program; each way that its rules allow runs in one of a few plans."""
    with jax.enable_x64(True):
        examples = [e for e in FAMILIES[name]() if e[0] not in NOT_UNDER_SHARD_MAP]
        arguments = [jax.tree.map(without_nan, a) for _, _, a in examples]
        subject = program(name, lambda *args: [f(*a) for (_, f, _), a in zip(examples, args, strict=True)], arguments)
    seen: coverage.Ran = Counter()
    wanted = coverage.possible(subject.traced.graph, subject.rules, forced.logical((2, 2)))
    assert_everything_runs(subject, (2, 2), seen, wanted)
    assert not coverage.missing(seen, wanted)


def test_a_hundred_random_plans_are_planned():
    assert sum(n for name, n in PLANS.items() if name != LONG) * len(EVERY_MESH) >= 100
    assert PLANS.keys() == SMALL.keys()


MODELS = [pytest.param(name, marks=pytest.mark.exhaustive if name == LONG else pytest.mark.slow) for name in SMALL]


@pytest.mark.parametrize("name", MODELS)
def test_random_plans_of_every_model_run_as_planned(name, capsys):
    """A way of running that the model's rules allow and that no plan took fails, too. Most plans are of a step with little update."""
    seen: coverage.Ran = Counter()
    found = []
    for optimizer, seeds in ("adamw", range(name != LONG)), ("sgd", range(name != LONG, PLANS[name])):
        subject = zoo(name, optimizer=optimizer)
        found += [forced.row(subject, sizes, "random", seed, seen) for sizes in EVERY_MESH for seed in seeds]
    wanted = coverage.possible(subject.traced.graph, subject.rules, forced.logical(EVERY_MESH[0]))
    found += assert_everything_runs(subject, EVERY_MESH[0], seen, wanted)
    with capsys.disabled():
        print(f"\n{name}\n{coverage.table(seen)}\n\n{forced.table(found)}")
    assert not [r for r in found if r.status != "agree"]
    assert all(r.cut_share >= 0.5 and r.passes for r in found)
    assert not coverage.missing(seen, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["optimum", "slow-link", "fast-link"])
@pytest.mark.parametrize("name", SMALL)
def test_the_optimum_of_every_model_runs_as_planned(name, kind):
    assert_agrees(zoo(name, optimizer="sgd" if name == LONG else "adamw"), (2, 4), kind)


@pytest.mark.parametrize("name", MODELS)
def test_the_optimum_of_every_model_for_little_memory_runs_as_planned(name):
    assert_agrees(zoo(name, optimizer="sgd" if name == LONG else "adamw"), (2, 4), "tight-memory")


@pytest.mark.parametrize("sizes", [(8,), (3,), (1,)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_optimum_of_every_model_on_one_axis_runs_as_planned(name, sizes):
    assert_agrees(zoo(name), sizes, "fast-link")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_narrower_dtypes_stay_within_their_rounding(name, dtype):
    assert_agrees(zoo(name, dtype), (2, 4), "random")
