"""Layers: cuts against all cuts of small programs, what crosses against its definition, the zoo's programs cut where blocks meet."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import UsageError
from autopar.interop.belong import JOIN
from autopar.interop.layers import UNEVEN, Layers, crossing_bytes, find_layers, narrow_places
from autopar.interop.ops import Ops, ops_of
from autopar.interop.slice import plan_stages
from autopar.interop.stages import Choice, Grid, Link
from autopar.interop.submesh import submeshes
from autopar.ir.graph import Graph
from autopar.models import build
from autopar.schedule.formulas import Formula
from autopar.trace.trace import trace

QUICK = (("gpt-tiny", 4), ("t5-tiny", 4), ("unet-tiny", 4))
SLOW = (("llama-tiny", 3), ("moe-tiny", 3), ("wresnet-tiny", 3), ("vit-tiny", 2), ("mlp-tiny", 2))
ZOO = (*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW))


def random_ops(seed: int) -> Ops:
    """Forward ops alone, which read earlier results near and far; op i makes value i."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    near = [{int(x) for x in rng.integers(max(0, i - 3), i, 2)} if i else set() for i in range(n)]
    reads = tuple(tuple(sorted(some | ({int(rng.integers(0, i))} if i else set()))) for i, some in enumerate(near))
    return Ops(
        ("forward",) * n,
        rng.integers(0, 9, n).astype(float),
        rng.integers(0, 3, n),
        reads,
        tuple(bool(x) for x in rng.random(n) < 0.15),
        np.arange(n),
        rng.integers(0, 50, n).astype(float),
        np.zeros(n),
    )


def bytes_at(ops: Ops, p: int) -> float:
    """What crosses the border before forward op p, by definition."""
    n = len(ops.phase)
    return sum(ops.nbytes[v] for v in range(n) if v < p and any(v in ops.reads[i] for i in range(p, n)))


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_what_crosses_is_what_is_made_before_and_read_after(seed):
    ops = random_ops(seed)
    assert crossing_bytes(ops).tolist() == [bytes_at(ops, p) for p in range(len(ops.phase))]


@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([0.0, 0.2, 1.0]))
@settings(max_examples=100, deadline=None)
def test_of_all_cuts_that_are_even_enough_the_one_that_least_crosses_is_found(seed, count, slack):
    ops = random_ops(seed)
    n = len(ops.phase)
    free = [p for p in range(1, n) if not ops.joined[p]]
    begins = free[:1] if seed % 3 == 0 and count > 1 else []
    if count > len(free) + 1:
        with pytest.raises(UsageError, match="layers cannot be cut"):
            find_layers(ops, count, begins, slack)
        return
    height = [bytes_at(ops, p) for p in range(n)]
    narrow = {free[k - 1] for k in narrow_places([0.0, *(height[p] for p in free)])} | set(begins)
    places = sorted(narrow) if len(narrow) >= count - 1 else free
    mean = ops.cost.sum() / count

    def parts(cut):
        return [float(ops.cost[a:b].sum()) for a, b in itertools.pairwise((0, *cut, n))]

    def judged(cut):
        return sum(height[p] for p in cut), sum((c - mean) ** 2 for c in parts(cut))

    def best(places):
        cuts = [cut for cut in itertools.combinations(places, count - 1) if set(begins) <= set(cut)]
        cap = (1 + slack) * min(max(parts(cut)) for cut in cuts)
        even = [cut for cut in cuts if max(parts(cut)) <= cap]
        floor = max(min(parts(cut)) for cut in even) / 2
        return min((cut for cut in even if min(parts(cut)) >= floor), key=judged)

    expected = best(places)
    if max(parts(expected)) > UNEVEN * mean:
        expected = min(expected, best(free), key=lambda cut: max(parts(cut)))
    found = find_layers(ops, count, begins, slack)
    assert judged(found.begins) == pytest.approx(judged(expected))
    assert list(found.costs) == parts(found.begins)
    assert found.chain.forward_bytes == (0.0, *(height[p] for p in found.begins), 0.0)


@pytest.mark.parametrize(
    ("height", "expected"),
    [
        ([0, 5, 1, 5], [2]),
        ([0, 5, 1, 1, 5, 1, 5], [2, 5]),
        ([0, 5, 1.1, 1, 5], [3]),
        ([0, 5, 1, 1.1, 1, 5], [2]),
        ([0, 3, 2, 1], [3]),
        ([0, 1, 2, 3], [1]),
        ([0, 5, 4.5, 4.4, 5], [3]),
        ([0], []),
    ],
)
def test_a_narrow_place_is_the_first_lowest_between_two_rises(height, expected):
    assert narrow_places(height) == expected


@functools.cache
def zoo(name: str) -> tuple[Graph, Ops]:
    function, arguments = build(name, **({"layers": 12} if name == "gpt-tiny" else {}))  # enough that their names do not sort by number
    traced = trace(function, arguments)
    return traced.graph, ops_of(traced.graph, traced.roles.carried)


@functools.cache
def zoo_layers(name: str, count: int) -> Layers:
    return find_layers(zoo(name)[1], count)


def known_in(ops: Ops, layers: Layers) -> dict[int, set[int]]:
    """Value -> the layers whose forward makes or reads it."""
    known: dict[int, set[int]] = {}
    for value, maker in enumerate(ops.made):
        if maker >= 0 and ops.phase[maker] == "forward":
            known[value] = {layers.layer_of[maker]}
    for i in ops.forward:
        for value in ops.reads[i]:
            known.setdefault(value, set()).add(layers.layer_of[i])
    return known


@pytest.mark.parametrize(("name", "count"), ZOO)
def test_layers_of_the_zoo_take_their_part_and_hand_values_on_one_way(name, count):
    graph, ops = zoo(name)
    layers = zoo_layers(name, count)
    known = known_in(ops, layers)
    forward = [layers.layer_of[i] for i in ops.forward]
    assert forward == sorted(forward) and set(forward) == set(range(count))
    for i, phase in enumerate(ops.phase):
        layer = layers.layer_of[i]
        if phase == "backward":
            assert 0 <= layer < count
            for value in ops.reads[i]:
                maker = int(ops.made[value])
                assert maker < 0 or ops.phase[maker] != "backward" or layers.layer_of[maker] >= layer
                assert value not in known or ops.nbytes[value] == 0 or layer in known[value], "what is read is not there"
        elif phase == "update":
            own = {min(known[v]) for v in ops.reads[i] if ops.made[v] < 0 and v in known}
            assert len(own) != 1 or layer in own
            makers = {int(ops.made[v]) for v in ops.reads[i] if ops.made[v] >= 0 and ops.phase[ops.made[v]] != "forward"}
            assert layer != JOIN or len({layers.layer_of[m] for m in makers}) != 1 or layers.layer_of[min(makers)] == JOIN
    assert all(total > 0 for total in layers.costs)
    assert sum(layers.costs) == pytest.approx(ops.cost[ops.forward].sum())


@pytest.mark.parametrize(("name", "count"), ZOO)
def test_chains_of_the_zoo_carry_what_later_layers_read(name, count):
    graph, ops = zoo(name)
    layers = zoo_layers(name, count)
    for phase, found in (("forward", layers.chain.forward_bytes), ("backward", layers.chain.backward_bytes)):
        for border in range(1, count):
            crossing = set()
            for i, its in enumerate(ops.phase):
                for value in ops.reads[i] if its == phase else ():
                    maker = int(ops.made[value])
                    if maker >= 0 and ops.phase[maker] == phase:
                        sides = sorted((layers.layer_of[maker], layers.layer_of[i]))
                        if sides[0] < border <= sides[1]:
                            crossing.add(value)
            shared = [v for v, its in known_in(ops, layers).items() if phase == "forward" and min(its) < border <= max(its)]
            assert found[border] == sum(ops.nbytes[v] for v in crossing) + sum(ops.weights[v] for v in shared)


def test_a_gpt_is_cut_between_its_blocks_and_equal_blocks_are_one_class():
    graph, ops = zoo("gpt-tiny")
    layers = zoo_layers("gpt-tiny", 4)
    assert [graph.ops[i].scope for i in layers.begins] == [f"GPT/layer_{k}/attention_norm" for k in (3, 6, 9)]
    assert layers.chain.classes == (0, 1, 1, 2)
    stream = next(graph.avals[v].nbytes for v in ops.reads[layers.begins[0]])
    sizes = {path: graph.avals[v].nbytes for v, path in zip(graph.inputs, graph.input_names, strict=True)}
    embedding = sizes["state.params['embed']['embedding']"]
    assert set(layers.chain.forward_bytes[1:-1]) == {stream + embedding}  # the tied weights go to the head, their gradient comes back
    assert set(layers.chain.backward_bytes[1:-1]) == {stream + embedding}
    scalars = [i for i, op in enumerate(graph.ops) if op.phase == "update" and not graph.avals[op.results[0]].shape]
    roots = [i for i in scalars if graph.ops[i].primitive == "sqrt"]
    assert roots and all(layers.layer_of[i] == JOIN for i in roots), "the global norm is no layer's"


def test_blocks_are_cut_at_one_kind_of_place_so_that_layers_repeat():
    graph, ops = zoo("gpt-tiny")
    for count, classes in ((4, (0, 1, 1, 2)), (6, (0, 1, 1, 1, 1, 2)), (5, None)):
        layers = find_layers(ops, count)
        scopes = [graph.ops[i].scope for i in layers.begins]
        assert len({scope.split("/")[-1] for scope in scopes}) == 1
        if classes:
            assert scopes == [f"GPT/layer_{k * 12 // count}/attention_norm" for k in range(1, count)]
            assert layers.chain.classes == classes


def test_a_given_cut_is_kept():
    graph, ops = zoo("gpt-tiny")
    halves = [i for i in ops.forward if graph.ops[i].scope == "GPT/layer_2/mlp_norm"]
    layers = find_layers(ops, 3, begins=[int(halves[0])])
    assert int(halves[0]) in layers.begins and len(layers.begins) == 2


def test_skips_of_a_unet_are_paid_at_every_border_between():
    graph, ops = zoo("unet-tiny")
    layers = zoo_layers("unet-tiny", 4)
    far = set()
    for i in ops.forward:
        for value in ops.reads[i]:
            maker = int(ops.made[value])
            if maker >= 0 and ops.nbytes[value] > 0 and layers.layer_of[i] - layers.layer_of[maker] > 1:
                far.add((value, layers.layer_of[maker], layers.layer_of[i]))
    assert far, "no value skips a layer"
    for value, maker, reader in far:
        assert all(layers.chain.forward_bytes[k] >= ops.nbytes[value] for k in range(maker + 1, reader + 1))


def test_nothing_is_cut_inside_a_loop():
    def step(w, x):
        y = jnp.tanh(x @ w)
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), y, None, length=5)
        return jnp.sum(jnp.tanh(y @ w) @ w)

    spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(step, (spec, spec)).graph
    ops = ops_of(graph, ())
    first, last = graph.spans[0]
    free = sum(not joined for joined in ops.joined) - 1
    for count in range(1, free + 2):
        assert not [i for i in find_layers(ops, count).begins if first < i <= last]
    with pytest.raises(UsageError, match="cannot be cut"):
        find_layers(ops, free + 2)
    with pytest.raises(UsageError, match=f"no layer can begin with op {first + 1}"):
        find_layers(ops, 2, begins=[first + 1])


@pytest.mark.parametrize("begins", [[0], [999], [-1]])
def test_a_cut_where_no_layer_can_begin_is_refused(begins):
    with pytest.raises(UsageError, match="no layer can begin"):
        find_layers(random_ops(1), 2, begins=begins)


def test_layers_of_the_zoo_become_stages():
    grid = Grid(2, 2, submeshes(2, 2), lambda a, b: Link(1e-12))
    for name, count in QUICK:
        layers = zoo_layers(name, count)

        def oracle(start, stop, submesh, microbatches, layers=layers):
            work = sum(layers.costs[start:stop]) / microbatches / submesh.devices * 1e-9
            return [Choice(work, 2 * work, work)]

        plan = plan_stages(layers.chain, grid, oracle, [Formula("1f1b", 8)])
        assert plan.stages[0].start == 0 and plan.stages[-1].stop == count and len(plan.stages) == 2
        assert plan.simulation.makespan_s <= plan.seconds * (1 + 1e-9)
