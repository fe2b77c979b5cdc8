"""The zoo: sizes against published counts, steps that iterate and learn, dtypes, and the pieces against plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import models
from autopar.models.fused import fused_attention
from autopar.models.layers import attend, causal_mask
from autopar.models.llama import rotate
from autopar.models.moe import top2
from autopar.models.t5 import bucket_of
from autopar.models.text import corpus_batches

TINY = tuple(name for name in models.names() if name.endswith("-tiny"))

# Name to (parameters, where the figure comes from). Slow ones are counted by `make test-slow`.
ALPA = "the parameter formula of Alpa's benchmark suite, embeddings tied, positions not counted"
ALPA_LABEL = "the label of Alpa's suite"
CHECKPOINT = "the released checkpoint"
PUBLISHED = {
    "gpt-125m": (125e6, "arXiv:2005.14165 table 2.1"),
    "gpt-350m": (354740224, ALPA),
    "gpt-760m": (758577152, ALPA),
    "gpt-1.3b": (1313409024, ALPA),
    "gpt-2.6b": (2648606720, ALPA),
    "gpt-6.7b": (6653659136, ALPA),
    "gpt-13b": (13.0e9, "arXiv:2005.14165 table 2.1"),
    "gpt-15b": (15364392960, ALPA),
    "gpt-39b": (39078512640, ALPA),
    "gpt-76b": (76.1e9, "arXiv:2104.04473 table 1"),
    "gpt-175b": (174.6e9, "arXiv:2104.04473 table 1"),
    "llama3-8b": (8030261248, CHECKPOINT),
    "llama3-70b": (70553706496, CHECKPOINT),
    "moe-380m": (383506688, ALPA),
    "moe-690m": (685717760, ALPA),
    "moe-1.3b": (1346827520, ALPA),
    "moe-2.4b": (2382961920, ALPA),
    "moe-10b": (10169642240, ALPA),
    "moe-27b": (26648100096, ALPA),
    "moe-70b": (70415219968, ALPA),
    "wresnet-250m": (250e6, ALPA_LABEL),
    "wresnet-500m": (500e6, ALPA_LABEL),
    "wresnet-1b": (1e9, ALPA_LABEL),
    "wresnet-2b": (2e9, ALPA_LABEL),
    "wresnet-4b": (4e9, ALPA_LABEL),
    "wresnet-6.8b": (6.8e9, ALPA_LABEL),
    "wresnet-13b": (13e9, ALPA_LABEL),
    "vit-b16": (86567656, "the published architecture with 1000 classes"),
    "vit-l16": (304326632, "the published architecture with 1000 classes"),
    "vit-h14": (632045800, "the published architecture with 1000 classes"),
    "unet-470m": (470e6, ALPA_LABEL),
    "unet-1b": (1e9, ALPA_LABEL),
    "unet-1.2b": (1.2e9, ALPA_LABEL),
    "unet-1.8b": (1.8e9, ALPA_LABEL),
    "unet-2b": (2e9, ALPA_LABEL),
    "t5-small": (60506624, CHECKPOINT),
    "t5-base": (222903552, CHECKPOINT),
    "t5-large": (737668096, CHECKPOINT),
    "t5-3b": (2851598336, CHECKPOINT),
    "t5-11b": (11307321344, CHECKPOINT),
}
# Labels are rounded more coarsely than the 2 % that is asked of everything else.
COARSE = {"wresnet-13b": 0.03, "unet-1b": 0.065, "unet-1.8b": 0.05, "unet-2b": 0.045}
QUICK = {"gpt-350m", "moe-10b", "wresnet-250m", "vit-b16", "unet-470m", "t5-base"}


def slow_unless(quick, names):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def avals(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), tree)


def equations(jaxpr):
    """All equations, those of sub-jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr") or hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_every_family_has_a_tiny_size_and_every_name_has_facts():
    assert {models.describe(name).family for name in models.names()} == {models.describe(name).family for name in TINY}
    for name in models.names():
        info = models.describe(name)
        assert info.batch > 0 and info.source and info.optimizer in ("adamw", "sgd")


@pytest.mark.parametrize("name", slow_unless(QUICK, PUBLISHED))
def test_parameter_counts_are_the_published_ones(name):
    published, _ = PUBLISHED[name]
    assert models.describe(name).parameters == pytest.approx(published, rel=COARSE.get(name, 0.02))


def test_every_published_size_is_held_against_its_source():
    own = {"gpt-demo", "mlp-small", "mlp-wide", *TINY}
    assert set(PUBLISHED) == set(models.names()) - own


BIG = (
    "gpt-125m",
    "gpt-2.6b",
    "llama3-8b",
    "moe-690m",
    "moe-10b",
    "wresnet-500m",
    "vit-b16",
    "unet-470m",
    "t5-small",
    "t5-large",
    "mlp-wide",
)


@pytest.mark.parametrize("name", slow_unless({"gpt-125m", "moe-690m", "wresnet-500m", "t5-small", "mlp-wide"}, BIG))
def test_big_sizes_trace_without_making_an_array(name):
    step, (state, batch) = models.build(name)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))
    new_state, metrics = jax.eval_shape(step, state, batch)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert avals(new_state) == avals(state)
    assert metrics["loss"].shape == ()


@pytest.mark.parametrize("name", TINY)
def test_three_steps_on_one_batch_lower_the_loss_and_keep_the_state_in_shape(name):
    step, (state, batch) = models.build(name, abstract=False)
    _, (abstract_state, abstract_batch) = models.build(name)
    assert jax.tree.structure(abstract_state) == jax.tree.structure(state)
    assert avals((abstract_state, abstract_batch)) == avals((state, batch))
    run, expected, losses = jax.jit(step, compiler_options=models.QUICK_COMPILE), avals(state), []
    for _ in range(3):
        state, metrics = run(state, batch)
        assert avals(state) == expected
        assert all(np.isfinite(value) for value in jax.tree.leaves(metrics))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("name", TINY)
def test_float64_leaves_no_narrower_float_anywhere(name):
    with jax.enable_x64(True):
        step, args = models.build(name, dtype="float64", param_dtype="float64")
        traced, out = jax.make_jaxpr(step, return_shape=True)(*args)
        variables = [*traced.jaxpr.invars, *traced.jaxpr.constvars]
        for equation in equations(traced.jaxpr):
            variables += [*equation.invars, *equation.outvars]
        floats = {variable.aval.dtype.name for variable in variables if jnp.issubdtype(variable.aval.dtype, jnp.floating)}
    assert floats == {"float64"}
    assert avals(out[0]) == avals(args[0])


@pytest.mark.parametrize("name", TINY)
def test_tiny_batches_divide_by_eight_and_by_three(name):
    _, (_, batch) = models.build(name)
    assert all(leaf.shape[0] % 24 == 0 for leaf in batch.values())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights():
    step, args = models.build("gpt-tiny", dtype="bfloat16")
    products = [e for e in equations(jax.make_jaxpr(step)(*args).jaxpr) if e.primitive.name == "dot_general"]
    assert {str(e.outvars[0].aval.dtype) for e in products} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(args[0].params)} == {"float32"}


def test_a_build_is_deterministic_and_follows_its_seed():
    first, second, other = (models.build("mlp-tiny", abstract=False, seed=seed)[1] for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    assert not np.array_equal(first[1]["x"], other[1]["x"])


def test_overrides_change_the_config_and_batch_the_leading_dimension():
    _, (state, batch) = models.build("gpt-tiny", batch=6, layers=1, seq=8)
    assert batch["tokens"].shape == (6, 8)
    assert "layer_0" in state.params and "layer_1" not in state.params


def test_an_untied_head_adds_a_matrix():
    tied, untied = (models.build("gpt-tiny", tied=tied)[1][0].params for tied in (True, False))
    assert set(untied) - set(tied) == {"head"}
    assert untied["head"]["kernel"].shape == (96, 96)


def test_the_optimizer_can_be_named_or_given():
    _, (by_name, _) = models.build("mlp-tiny", optimizer="sgd")
    assert len(jax.tree.leaves(by_name["optimizer"])) == len(jax.tree.leaves(by_name["params"]))
    _, (given, _) = models.build("mlp-tiny", optimizer=optax.sgd(0.1))
    assert jax.tree.leaves(given["optimizer"]) == []


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: models.build("gpt-2.6"), "gpt-2.6b"),
        (lambda: models.describe("lama-tiny"), "llama-tiny"),
        (lambda: models.build("gpt-tiny", layer=2), "layers"),
        (lambda: models.build("gpt-tiny", optimizer="adam"), "adamw"),
        (lambda: models.build("gpt-tiny", dtype="float64"), "jax_enable_x64"),
        (lambda: models.build("gpt-tiny", dtype="int32"), "floating"),
        (lambda: models.build("gpt-tiny", heads=7), "96 does not divide by 7"),
        (lambda: models.build("moe-tiny", batch=3), "72 does not divide by 48"),
    ],
)
def test_a_wrong_request_says_what_would_do(call, hint):
    with pytest.raises(models.ModelError, match=hint):
        call()


def test_top2_routes_like_a_loop_over_tokens():
    groups, tokens, experts, capacity = 2, 10, 4, 3
    random = np.random.default_rng(0)
    gates = random.dirichlet(np.ones(experts), (groups, tokens))
    expected = np.zeros((groups, tokens, experts, capacity))
    for g in range(groups):
        order = np.argsort(-gates[g], axis=-1)
        filled, placed = np.zeros(experts, int), {}
        for choice in range(2):
            for s in range(tokens):
                expert = order[s, choice]
                if filled[expert] < capacity:
                    placed[s, expert] = filled[expert]
                filled[expert] += 1
        for (s, expert), slot in placed.items():
            total = sum(gates[g, s, e] for e in order[s, :2] if (s, e) in placed)
            expected[g, s, expert, slot] = gates[g, s, expert] / total
    combine, balance = top2(jnp.asarray(gates, jnp.float32), capacity)
    np.testing.assert_allclose(combine, expected, rtol=1e-5)
    share = np.stack([(gates.argmax(-1) == e).mean(1) for e in range(experts)], axis=1)
    assert float(balance) == pytest.approx((share * gates.mean(1)).mean() * experts**2, rel=1e-5)


def test_rotary_scores_depend_on_distance_only():
    x = jnp.broadcast_to(jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32), (1, 6, 1, 8))
    turned = np.asarray(rotate(x, 10000.0))[0, :, 0]
    scores = turned @ turned.T
    for distance in range(6):
        np.testing.assert_allclose(np.diag(scores, distance), scores[0, distance], rtol=1e-5)
    assert not np.allclose(scores[0, 0], scores[0, 1])


@pytest.mark.parametrize("two_sided", [True, False])
def test_relative_buckets_are_the_formula_of_the_paper(two_sided):
    def bucket(distance, buckets=32, furthest=128):
        offset = 0
        if two_sided:
            buckets //= 2
            offset = buckets if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = buckets // 2
        if distance < exact:
            return offset + distance
        steps = math.log(distance / exact) / math.log(furthest / exact) * (buckets - exact)
        return offset + min(exact + math.floor(steps + 1e-9), buckets - 1)

    distances = np.arange(-200, 201)
    expected = [bucket(int(distance)) for distance in distances]
    assert bucket_of(jnp.asarray(distances, jnp.int32), 32, 128, two_sided, jnp.float32).tolist() == expected


def test_text_batches_are_bytes_with_the_next_byte_as_label():
    first, again = (list(corpus_batches(4, 16, 3, seed=1)) for _ in range(2))
    assert len(first) == 3
    for one, two in zip(first, again, strict=True):
        assert one["tokens"].shape == one["labels"].shape == (4, 16)
        assert one["tokens"].dtype == one["labels"].dtype == np.int32
        assert 0 <= one["tokens"].min() and one["tokens"].max() < 256
        assert np.array_equal(one["tokens"][:, 1:], one["labels"][:, :-1])
        assert np.array_equal(one["tokens"], two["tokens"])
    assert avals(first[0]) == avals(models.build("gpt-demo", batch=4, seq=16)[1][1])


@pytest.mark.slow
def test_the_demo_learns_text_within_forty_steps():
    step, (state, batch) = models.build("gpt-demo", abstract=False)
    run, losses = jax.jit(step), []
    for text in corpus_batches(*batch["tokens"].shape, steps=40):
        state, metrics = run(state, text)
        losses.append(float(metrics["loss"]))
    assert losses[0] > 5 and np.mean(losses[-5:]) < 3


def test_fused_attention_is_the_same_function_with_the_same_gradients():
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    query, key, value = (jax.random.normal(k, (2, 16, 3, 4)) for k in keys)

    def plain(q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v, mask=causal_mask(16))))

    def fused(q, k, v):
        return jnp.sum(jnp.sin(fused_attention(q[..., None, :], k, v)[..., 0, :]))

    expected, found = (jax.value_and_grad(f, (0, 1, 2))(query, key, value) for f in (plain, fused))
    assert all(jnp.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))


def test_a_plan_keeps_fused_attention_closed_and_cuts_its_heads():
    step, args = models.build("gpt-tiny", layers=1, fused=True, batch=8)
    plan = autopar.manual(step, args, "h100-sxm:2", tensor=2)
    assert not any("attention" in whole.source or whole.primitive in ("jit", "pjit") for whole in plan.data.whole)
