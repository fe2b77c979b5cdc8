"""Scans over layers in pipeline stages, each with its slice of the stacked weights, beside one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pipelines import check, forced, in_stages
from programs import FAST, assert_close
from scan_steps import CLIPPED, STEPS, WHOLE, weights

import autopar
from autopar import StateError
from autopar.ir.serialize import plan_from_dict
from autopar.runtime.spread import Spread, relaid
from autopar.trace.trace import trace

DROPOUT = {"dropout", "gpt", "gpt remat", "gpt axis 1"}
"""Which part of its layer's bits a microbatch has is known outside of the layers: a plan that has devices agree on it in each layer, as
only random ones do, is compiled to one that has them agree once.
"""

ZERO_GRADIENT = ("['key']['bias']",)
"""Attention's scores do not change with the keys' bias."""


@pytest.fixture(autouse=True)
def exact():
    with jax.enable_x64(True):
        yield


# step, stages, microbatches, schedule, sizes of each stage's mesh, whether all is made again
FORCED = [
    ("plain", 2, 4, "1f1b", (2,), False),
    ("carried 7", 4, 4, "zero_bubble", (1,), False),
    ("dropout", 2, 2, "interleaved", (1,), False),
    ("checkpointed 3", 2, 8, "gpipe", (1,), True),
    ("forward", 4, 2, "forward", (2,), False),
]


@pytest.mark.parametrize(("name", "stages", "count", "schedule", "sizes", "again"), FORCED)
def test_random_plans_of_scans_in_stages_give_the_numbers_of_one_device(name, stages, count, schedule, sizes, again):
    step, args = STEPS[name]()
    check(forced(step, args, stages, count, schedule, sizes, again=again), args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"forward", *DROPOUT}))
def test_more_random_plans_of_scans(name, seed):
    random = np.random.default_rng([seed, *name.encode()])
    stages, sizes = [(2, (2,)), (2, (4,)), (2, (2, 2)), (4, (2,)), (4, (1,))][random.integers(5)]
    schedule = ["gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble"][random.integers(5)]
    count = int(random.choice([1, 2, 4, 8] if schedule != "interleaved" else [stages, 8]))
    step, args = STEPS[name]()
    check(forced(step, args, stages, count, schedule, sizes, seed, again=bool(random.integers(2))), args, leave_out=ZERO_GRADIENT)


@pytest.mark.parametrize("name", ["plain", "backwards", "checkpointed", "shared", "within", "carried", "dropout"])
def test_only_activations_and_single_numbers_cross_between_stages(name):
    """Neither weights nor moments, nor gradients; but for a weight that all layers read, which crosses once, and its gradient."""
    staged = in_stages(trace(*STEPS[name]()), 4, 4)
    common = 8 * 8 if name == "shared" else 1
    for n, stage in enumerate(staged.stages):
        each = [stage.graph.avals[stage.graph.inputs[p.position]] for p in stage.receives if p.when == "each"]
        once = [stage.graph.avals[stage.graph.inputs[p.position]] for p in stage.receives if p.when != "each"]
        assert sum(a.size > 4 for a in each) == (n > 0) + (n < 3) and max(a.size for a in each) == 4 * 4 * 8
        assert max(a.size for a in once) <= common


def test_a_scan_in_pieces_keeps_each_slice_and_its_moments_on_one_stage():
    staged = in_stages(trace(*STEPS["carried 7"]()), 4, 2)
    assert staged.whole.pieces.borders == ((0, 2, 4, 6, 7),)
    for n, (begin, end) in enumerate([(0, 2), (2, 4), (4, 6), (6, 7)]):
        names = [name for name in staged.stages[n].graph.input_names if name.endswith(f"[{begin}:{end}]")]
        assert len(names) == 6 and len([s for s in staged.stages if set(names) & set(s.graph.input_names)]) == 1


def test_what_is_reduced_over_the_layers_is_reduced_where_they_are():
    """LAMB's norms of a stacked weight and of its update: one number goes from stage to stage, not the weight."""
    staged = in_stages(trace(*STEPS["lamb"]()), 2, 4)
    for stage in staged.stages:
        assert all(stage.graph.avals[stage.graph.inputs[p.position]].size <= 64 for p in stage.receives if p.when != "each")


@pytest.mark.parametrize(("name", "why"), [("hidden", "inside of a `jax.checkpoint`. Checkpoint the layer"), ("repeated", "")])
def test_a_scan_that_cannot_be_cut_stays_whole_and_the_plan_says_why(name, why):
    step, args = WHOLE[name]()
    plan = autopar.plan(step, args, FAST, options=autopar.Options(stages=2, microbatches=1, axis_names=("x",)))
    assert not plan.scans and not any(leaf.parts for leaf in plan.inputs)
    notes = [note for note in plan.notes if "scan over layers" in note]
    assert len(notes) == bool(why) and all(why in note and "scan_steps.py" in note for note in notes)


def test_plans_without_stages_do_not_know_of_pieces():
    step, args = STEPS["plain"]()
    plan = autopar.plan(step, args, FAST)
    assert "scans" not in plan.to_dict() and all("parts" not in leaf for leaf in plan.to_dict()["inputs"])


# --- chosen plans ---------------------------------------------------------------------------------------------------------------------


def planned(name, **options):
    step, args = STEPS[name]()
    asked = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "axis_names": ("x",), **options}
    return step, args, asked, autopar.plan(step, args, FAST, options=autopar.Options(**asked))


def bytes_by_device(state):
    """Bytes of arrays on each device, keys left out."""
    found: dict[int, int] = {}
    for x in jax.tree.leaves(state):
        for shard in () if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


def test_a_chosen_plan_runs_as_planned_from_its_file_and_each_stage_has_its_layers(tmp_path):
    step, (state, batch), asked, plan = planned("plain")
    assert plan.scans == ((0, 2, 4),) and not plan.notes
    report = plan.verify(step, (state, batch))
    assert report.agree, report
    stacked = [leaf for leaf in plan.inputs if leaf.path.endswith(("['w']", "['b']"))]
    assert len(stacked) == 6 and all([(p.stage, p.begin, p.end) for p in leaf.parts] == [(0, 0, 2), (1, 2, 4)] for leaf in stacked)
    assert all(leaf.sharding.dims[0][0] == "stage" for leaf in stacked)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    ours, theirs, mine = autopar.parallelize(step, FAST, plan=tmp_path / "plan.json", **asked), state, state
    for _ in range(3):
        (mine, found), (theirs, expected) = ours(mine, batch), jax.jit(step)(theirs, batch)
        assert_close(found, expected)
    assert_close(mine, theirs)
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    assert max(bytes_by_device(mine).values()) < 0.55 * whole / 4
    w = mine[0]["w"]
    assert w.shape == (4, 8, 8) and w.sharding.mesh == plan.make_mesh() and np.asarray(w).shape == (4, 8, 8)
    assert {s.device.id: s.index[0].start or 0 for s in w.addressable_shards} == {d: 2 * (d // 4) for d in range(8)}


CHOSEN = [
    ("gpt", {"stages": 2, "schedule": "1f1b"}),
    ("gpt", {"stages": 4, "schedule": "zero_bubble", "microbatches": 8}),
    ("gpt remat", {"stages": 2, "schedule": "gpipe", "microbatches": 1, "axis_names": ("data", "tensor")}),
    ("gpt axis 1", {"stages": 4, "schedule": "1f1b", "microbatches": 2}),
    ("gpt", {"stages": 2, "schedule": "interleaved"}),
    ("dropout", {"stages": 4, "schedule": "zero_bubble", "microbatches": 8}),
    ("carried", {"stages": 4, "schedule": "eager_1f1b", "remat": "full"}),
    ("twice", {"stages": 4, "axis_names": ("x", "y")}),
    ("plain 5", {"stages": 2}),
    ("gradients", {"stages": 4}),
    ("forward", {"stages": 4, "schedule": "forward"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CHOSEN)
def test_chosen_plans_of_scans_run_as_planned(name, options):
    step, args, _, plan = planned(name, **options)
    assert plan.scans and any(leaf.parts for leaf in plan.inputs)
    report = plan.verify(step, args)
    assert report.agree, report


# --- state ----------------------------------------------------------------------------------------------------------------------------


def running(name="plain", **options):
    step, (state, batch) = STEPS[name]()
    asked = {"stages": 2, "microbatches": 4, "schedule": "1f1b", "axis_names": ("x",), **options}
    return step, state, batch, autopar.parallelize(step, FAST, **asked)


def test_a_stacked_leaf_is_born_on_its_stages_and_given_away_where_it_lies():
    step, state, batch, ours = running()

    def create(key):
        del key
        return weights(), CLIPPED.init(jax.tree.map(jnp.asarray, weights()))

    born = ours.init(create, jax.random.key(0), batch=batch)
    assert max(bytes_by_device(born).values()) < 0.55 * sum(x.nbytes for x in jax.tree.leaves(born)) / 4
    (first, _), (expected, _) = ours(born, batch), jax.jit(step)(state, batch)
    assert_close(first, expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(born) if x.size > 1)
    places = [s.data.unsafe_buffer_pointer() for s in first[0]["w"].addressable_shards]
    second, _ = ours(first, batch)
    assert_close(second, jax.jit(step)(expected, batch)[0])
    assert [s.data.unsafe_buffer_pointer() for s in second[0]["w"].addressable_shards] == places  # written over, not copied
    with pytest.raises(StateError, match="was donated to an earlier step"):
        ours(first, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array))


def test_unequal_slices_go_round_too_and_are_given_away():
    """Five layers on two stages: no array lies so, and each step takes the leaves apart."""
    step, state, batch, ours = running("plain 5")
    first, _ = ours(state, batch)
    assert any("takes them apart" in note for note in ours.plan(state, batch).notes)
    second, _ = ours(first, batch)
    expected = jax.jit(step)(jax.jit(step)(state, batch)[0], batch)[0]
    assert_close(second, expected)
    assert first[0]["w"].is_deleted()
    with pytest.raises(StateError, match="was donated to an earlier step"):
        ours(first, batch)


def test_a_stacked_leaf_that_is_kept_stays_whole():
    _, state, batch, ours = running(donate=False)
    first, _ = ours(state, batch)
    second, _ = ours(first, batch)
    again, _ = ours(first, batch)
    assert_close(second, again, 0)


def test_a_stacked_leaf_given_twice_is_split():
    def step(state, x):
        def loss(s):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, s["a"])
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, s["b"])
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, axis_names=("x",), batch_argnums=1)
    w, x = weights()["w"], np.random.default_rng(0).standard_normal((8, 8))
    state, _ = ours({"a": w, "b": w}, x)
    state, _ = ours({"a": state["a"], "b": state["a"]}, x)
    expected, _ = jax.jit(step)({"a": w, "b": w}, x)
    assert_close(state, jax.jit(step)({"a": expected["a"], "b": expected["a"]}, x)[0])


@pytest.mark.parametrize("layers", [4, 5])
def test_a_stacked_value_given_back_as_two_leaves_goes_round(layers):
    """What is one array on the stages is one outside too: the next step copies one of the two before it gives both up."""

    def step(state, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

        value, g = jax.value_and_grad(loss)(state["params"] + state["mean"])
        new = state["params"] - 0.1 * g + 0.01 * state["anchor"]
        return {"params": new, "anchor": new, "mean": 0 * g, "square": 0 * g + 0 * state["square"]}, value

    ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, axis_names=("x",), batch_argnums=1)
    w, x = weights(layers)["w"], np.random.default_rng(0).standard_normal((8, 8))
    mine = theirs = {"params": w, "anchor": 2 * w, "mean": w / 2, "square": w * w}
    for _ in range(3):
        (mine, found), (theirs, expected) = ours(mine, x), jax.jit(step)(theirs, x)
        assert_close(found, expected)
        assert_close(mine, theirs)


@pytest.mark.parametrize("layers", [4, 5])
def test_stacked_keys_go_round_with_the_state(layers):
    def step(state, x):
        w, keys = state

        def loss(w):
            def layer(h, q):
                w, k = q
                return jnp.tanh(h @ w) + jax.random.normal(k, (8,)), None

            return jnp.mean(jax.lax.scan(layer, x, (w, keys))[0] ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return (w - 0.1 * g, jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)), value

    ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, axis_names=("x",), batch_argnums=1)
    x = np.random.default_rng(0).standard_normal((8, 8))
    mine = theirs = weights(layers)["w"], jax.random.split(jax.random.key(0), layers)
    assert all(leaf.parts for leaf in ours.plan(mine, x).inputs[:2])
    for _ in range(3):
        (mine, found), (theirs, expected) = ours(mine, x), jax.jit(step)(theirs, x)
        assert_close(found, expected)
        assert_close((mine[0], jax.random.key_data(mine[1])), (theirs[0], jax.random.key_data(theirs[1])))


@pytest.mark.parametrize(("name", "schedule"), [("plain", "1f1b"), ("plain 5", "1f1b"), ("shared", "interleaved")])
def test_a_step_in_stages_runs_within_the_callers_mesh(name, schedule):
    """Not even one of other devices plays a part where leaves are taken apart, or where they or their parts are copied."""
    step, state, batch, ours = running(name, schedule=schedule)
    state = jax.tree.map(jnp.asarray, state)
    with jax.set_mesh(Mesh(np.array(jax.devices()[1:3]), ("q",))):
        first, _ = ours(state, batch)
        second, _ = ours(first, batch)
    assert_close(second, jax.jit(step)(jax.jit(step)(state, batch)[0], batch)[0])


@pytest.mark.parametrize("layers", [4, 5])
def test_a_stacked_leaf_may_be_empty(layers):
    def step(state, x):
        def loss(w):
            return jnp.mean(jax.lax.scan(lambda h, q: (jnp.tanh(h @ q[0]) + jnp.sum(q[1]), None), x, w)[0] ** 2)

        value, g = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, g), value

    ours = autopar.parallelize(step, FAST, stages=2, microbatches=4, axis_names=("x",), batch_argnums=1)
    x = np.random.default_rng(0).standard_normal((8, 8))
    mine = theirs = weights(layers)["w"], np.zeros((layers, 0, 8))
    for _ in range(2):
        (mine, found), (theirs, expected) = ours(mine, x), jax.jit(step)(theirs, x)
        assert_close(found, expected)
        assert mine[1].shape == (layers, 0, 8)
        assert_close(mine[0], theirs[0])


def test_blocks_are_laid_anew_on_the_devices_that_want_them():
    devices = np.array(jax.devices()).reshape(4, 2)
    x = np.arange(6 * 8 * 3.0).reshape(6, 8, 3)
    whole = jax.device_put(x, NamedSharding(Mesh(devices, ("s", "x")), P(None, ("s", "x"))))
    parts = []
    for (begin, end), group, spec in (((0, 3), 1, P(None, "x")), ((3, 4), 0, P()), ((4, 6), 3, P("x"))):
        there = NamedSharding(Mesh(devices[group], ("x",)), spec)
        parts.append(relaid([((0, 0, 0), whole)], (end - begin, 8, 3), there, (begin, 0, 0)))
        assert parts[-1].sharding == there
        np.testing.assert_array_equal(parts[-1], x[begin:end])
    starts = ((0, 0, 0), (3, 0, 0), (4, 0, 0))
    again = relaid(list(zip(starts, parts, strict=True)), (6, 8, 3), whole.sharding, (0, 0, 0))
    np.testing.assert_array_equal(again, x)


@pytest.mark.parametrize("fresh", [True, False])
def test_parts_have_memory_of_their_own_only_where_they_are_given_up(fresh):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    home = NamedSharding(Mesh(devices, ("s", "x")), P(("s", "x")))
    parts = NamedSharding(Mesh(devices[0], ("x",)), P()), NamedSharding(Mesh(devices[1], ("x",)), P("x"))
    leaf = jax.device_put(np.arange(24.0).reshape(8, 3), home)
    found = Spread((8, 3), 0, home, (0, 1), (0, 4), parts, direct=False).split(leaf, fresh)
    np.testing.assert_array_equal(np.concatenate(found), leaf)
    here, there = ([s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in (leaf, found[1]))
    assert set(here).isdisjoint(there) if fresh else here[2:] == there


@pytest.mark.parametrize("scans", [[[]], [[0, 3, 2, 4]], [[1, 2, 4]], [[0, 1, 4]], []])
def test_a_plan_whose_scans_are_cut_otherwise_is_refused(scans):
    step, args, _, plan = planned("plain")
    document = plan.to_dict() | {"scans": scans}
    with pytest.raises(autopar.PlanError):
        autopar.Plan(plan_from_dict(document)).verify(step, args)


ONE_DIMENSION = {"sharding": {"dims": [[]], "partial": []}}
UNEVEN = {"sharding": {"dims": [["x"], [], []], "partial": []}}
PARTIAL = {"sharding": {"dims": [[], [], []], "partial": [["x", "sum"]]}}
TAMPERED = [
    *[("has no part", change) for change in ({"stage": 2}, {"end": 5}, {"dimension": 3})],
    ("has no part", {"sharding": {"dims": [["y"], [], []], "partial": []}}),
    *[("cannot lie as", change) for change in (ONE_DIMENSION, UNEVEN, PARTIAL)],
    *[("are not the whole of it", change) for change in ({"begin": 3}, {"begin": 1}, {"end": 3}, {"dimension": 1, "begin": 4, "end": 8})],
]


def test_parts_that_a_leaf_or_a_stage_does_not_have_are_refused():
    *_, plan = planned("plain")
    whole = {"dims": [[], [], []], "partial": []}
    for error, change in TAMPERED:
        document = plan.to_dict()
        leaf = next(leaf for leaf in document["inputs"] if leaf.get("parts") and len(leaf["shape"]) == 3)
        leaf["parts"][1] |= {"sharding": whole} | change
        with pytest.raises(autopar.PlanError, match=f"{error}.*Plan again"):
            plan_from_dict(document)
