"""Topologies, algorithms, transfers, tiles: closed forms and brute force against `cost_models`."""

import doctest
import importlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cost_models
from autopar import costs
from autopar.ir.graph import Aval, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.strategy import Strategy
from autopar.rules.notation import instantiate, parse
from cost_models import ClusterError, Curve, Levels, Link, Shape, Tiling, TwoLevel, load_cluster
from cost_models.rings import ring_links
from cost_models.switch import node_groups

KINDS = cost_models.KINDS
LINK, NETWORK = Link(100e9, latency_seconds=1e-6, half_bytes=1e6), Link(10e9, latency_seconds=1e-5, call_seconds=2e-5)
TWO = TwoLevel(shape=(4, 8), link=LINK, network=NETWORK)


@given(st.floats(1, 1e12), st.lists(st.tuples(st.floats(0, 1e-9), st.floats(0, 1e-6)), max_size=3))
def test_one_curve_after_another_costs_their_sum(nbytes, terms):
    first, second = Curve(1e-6, tuple(terms)), Curve(2e-6, ((1e-10, 1e-7), (3e-10, 0.0)))
    assert first.then(second).seconds(nbytes) == pytest.approx(first.seconds(nbytes) + second.seconds(nbytes))
    assert first.sample(np.array([nbytes]))[0] == pytest.approx(first.seconds(nbytes))


def test_half_the_rate_is_reached_at_the_half_size():
    assert LINK.curve(1.0, 0, LINK.rate).seconds(1e6) == pytest.approx(2 * 1e6 / 100e9)


# Meshes of links


def cube():
    return load_cluster("v100-p3:8").topology.mesh


def test_the_hybrid_cube_mesh_has_six_links_a_device_and_three_rings_both_ways():
    assert all(sum(row) == 6 for row in cube()) and all(cube()[a][b] == cube()[b][a] for a in range(8) for b in range(8))
    assert ring_links(cube(), tuple(range(8))) == 6
    assert [ring_links(cube(), quad) for quad in ((0, 1, 2, 3), (4, 5, 6, 7), (0, 2, 4, 6))] == [4, 4, 2]
    assert [ring_links(cube(), pair) for pair in ((0, 1), (0, 3), (0, 5))] == [1, 2, 0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_rings_of_four_devices_are_as_many_as_brute_force_finds(weights):
    """Four devices have three Hamiltonian cycles; try every multiset of them."""
    pairs = list(itertools.combinations(range(4), 2))
    counts = [[0] * 4 for _ in range(4)]
    for (a, b), weight in zip(pairs, weights, strict=True):
        counts[a][b] = counts[b][a] = weight
    cycles = [((0, 1), (1, 2), (2, 3), (0, 3)), ((0, 1), (1, 3), (2, 3), (0, 2)), ((0, 2), (1, 2), (1, 3), (0, 3))]
    fitting = [
        sum(times)
        for times in itertools.product(range(3), repeat=3)
        if all(sum(t for t, c in zip(times, cycles, strict=True) if p in c) <= w for p, w in zip(pairs, weights, strict=True))
    ]
    assert ring_links(tuple(map(tuple, counts)), (0, 1, 2, 3)) == 2 * max(fitting)


def test_a_group_on_a_mesh_of_links_runs_at_its_own_rings_rate():
    """V100: 25 GB/s a link at 85 %. Pairs of neighbours share one link in the worst pair, quads have two rings, all eight three."""
    cluster, nbytes = load_cluster("v100-p3:8"), 1e10
    for axes, links in ((((2, 1),), 1), (((4, 1),), 4), (((4, 2),), 2), (((8, 1),), 6), (((2, 4),), 1)):
        size = math.prod(each for each, _ in axes)
        ideal = 2 * (size - 1) / size * nbytes / (links * 25e9 * 0.85)
        assert cluster.collective_seconds("all_reduce", nbytes, axes, "ring") == pytest.approx(ideal, rel=0.03)


def test_every_device_of_a_node_is_in_one_group():
    for pieces in (((2, 1),), ((2, 4),), ((2, 1), (2, 4)), ((4, 2),)):
        groups = node_groups(pieces, 8)
        assert sorted(d for group in groups for d in group) == list(range(8))
        assert {len(group) for group in groups} == {math.prod(size for size, _ in pieces)}


def test_a_mesh_that_is_too_small_is_refused():
    with pytest.raises(ClusterError, match="square"):
        TwoLevel(shape=(1, 4), link=LINK, network=NETWORK, mesh=((0, 1), (1, 0)))


# Algorithms


def test_the_price_is_that_of_the_fastest_algorithm_and_each_can_be_asked_for():
    cluster, axes = load_cluster("h100-sxm:4x8"), ((32, 1),)
    for nbytes in (1e4, 1e7, 1e10):
        each = {name: cluster.collective_seconds("all_reduce", nbytes, axes, name) for name in ("flat", "hierarchical")}
        assert set(cluster.collective_curves("all_reduce", axes)) == set(each)
        assert cluster.collective_seconds("all_reduce", nbytes, axes) == min(each.values())
    with pytest.raises(ClusterError, match="flat, hierarchical"):
        cluster.collective_seconds("all_reduce", 1, axes, "ring")


def test_small_all_reduces_take_the_tree_and_large_ones_the_ring_or_the_switch():
    for text, large in (("a100-80:8", "ring"), ("h200-sxm:8", "switch")):
        curves = load_cluster(text).collective_curves("all_reduce", ((8, 1),))
        best = {size: min(curves, key=lambda name, size=size: curves[name].seconds(size)) for size in (1e3, 1e10)}
        assert best[1e10] == large and best[1e3] in ("tree", "switch")


def test_a_reduction_in_the_switch_gains_with_the_group():
    """Operand and an n-th of the result share a link: n/(n+1) of the rate."""
    topology = load_cluster("h200-sxm:8").topology
    times = [topology.curves("all_reduce", ((size, 1),))["switch"].seconds(1e12) for size in (2, 4, 8)]
    assert times == pytest.approx([1e12 / topology.switch_reduce_bytes_per_s * (size + 1) / size for size in (2, 4, 8)], rel=0.01)


def test_curves_are_made_once():
    cluster = load_cluster("h100-sxm:4x8")
    assert cluster.collective_curves("all_gather", ((32, 1),)) is cluster.collective_curves("all_gather", ((32, 1),))


# Levels


def test_two_levels_cost_what_a_two_level_cluster_costs():
    levels = Levels(shape=(4, 8), links=(NETWORK, LINK))
    for kind, axes, nbytes in itertools.product(KINDS, (((8, 1),), ((4, 8),), ((32, 1),), ((16, 2),), ((2, 4),)), (1e3, 1e8)):
        assert levels.seconds(kind, nbytes, axes) == pytest.approx(TWO.seconds(kind, nbytes, axes))


def test_three_levels_are_bound_by_their_slowest_border():
    """Pods of 2 nodes of 4 devices. A flat ring crosses a pod's border once with all its bytes, on 8 shares of it."""
    links = (Link(1e9), Link(5e9), Link(100e9))
    levels = Levels(shape=(2, 2, 4), links=links)
    assert levels.seconds("all_gather", 1e6, ((16, 1),)) == pytest.approx(15e6 / 8e9)
    assert levels.seconds("all_reduce", 1e9, ((16, 1),), "hierarchical") == pytest.approx(2 * 1 / 2 * 1e9 / 8e9)
    assert levels.seconds("all_reduce", 1e9, ((2, 4),)) == pytest.approx(1e9 / 5e9)
    assert levels.seconds("all_to_all", 1e9, ((16, 1),)) == pytest.approx(8 * 8 / 16 * 1e9 / 8e9)
    assert levels.num_devices == 16 and levels.dims == (2, 2, 4)


@pytest.mark.parametrize(("text", "shape"), [("l4:8", (1, 2, 4)), ("l4:2x8", (2, 2, 4)), ("l4:2", (1, 1, 2)), ("rtx4090:2x2x4", (2, 2, 4))])
def test_devices_fill_sockets_from_the_inside(text, shape):
    assert load_cluster(text).shape == shape


@pytest.mark.parametrize(("text", "says"), [("l4:10", "do not fill"), ("l4:1x1x8", "at most 4"), ("l4:2x2x2x2", "neither")])
def test_shapes_that_no_node_has_are_refused(text, says):
    with pytest.raises(ClusterError, match=says):
        load_cluster(text)


def test_cards_on_pcie_are_slower_across_sockets():
    cluster = load_cluster("l4:8")
    inside, across = (cluster.collective_seconds("all_reduce", 1e8, axes) for axes in (((4, 1),), ((2, 4),)))
    assert across > inside
    assert cost_models.Cluster.from_dict(cluster.to_dict()) == cluster


# Tori


def test_an_open_box_of_chips_gathers_on_one_ring_through_all():
    """Two links' worth whether two dimensions are used or three, and a step for each chip but one."""
    topology = load_cluster("v7x:2x2x2").topology
    flat, cube = (topology.curves("all_gather", axes)["torus"] for axes in (((4, 4),), ((8, 2),)))
    assert (cube.fixed - topology.link.call_seconds) / (flat.fixed - topology.link.call_seconds) == pytest.approx(7 / 3)
    assert cube.terms[0][0] / flat.terms[0][0] == pytest.approx(7 / 3)


# Transfers


def test_a_device_alone_fills_its_nic_and_all_together_the_nodes():
    nbytes = 1e9
    cluster = load_cluster("v100-p3:2x8")
    node = 8 * cluster.topology.network.rate
    alone, all_eight = cluster.transfer_seconds(nbytes, [(0, 8)]), cluster.transfer_seconds(nbytes, [(i, 8 + i) for i in range(8)])
    assert alone == pytest.approx(nbytes / node, rel=0.05) and all_eight == pytest.approx(8 * nbytes / node, rel=0.05)
    own = load_cluster("h100-sxm:2x8")
    assert own.transfer_seconds(nbytes, [(0, 8)]) == pytest.approx(own.transfer_seconds(nbytes, [(i, 8 + i) for i in range(8)]), rel=0.01)


def test_a_device_that_sends_to_two_sends_one_after_the_other():
    cluster = load_cluster("h100-sxm:8")
    one, two, apart = (cluster.transfer_seconds(1e11, flows) for flows in ([(0, 1)], [(0, 1), (0, 2)], [(0, 1), (2, 3)]))
    assert two == pytest.approx(2 * one, rel=0.01) and apart == pytest.approx(one)
    assert one == pytest.approx(1e11 / (cluster.topology.link.rate * cluster.topology.point_efficiency), rel=0.05)


def test_nothing_that_stays_where_it_is_costs_anything():
    for text in ("h100-sxm:2x8", "v5e:4x4", "host:4", "l4:8", "v5e:2x4x4"):
        cluster = load_cluster(text, measure=False)
        assert cluster.transfer_seconds(1e9, [(0, 0), (1, 1)]) == cluster.transfer_seconds(0, [(0, 1)]) == 0.0
        assert cluster.transfer_seconds(1e9, [(0, cluster.num_devices - 1)]) > 0


def test_flows_over_one_torus_link_share_it_and_the_short_way_round_is_taken():
    cluster = load_cluster("v5e:16x16")
    rate = cluster.topology.link.rate
    assert cluster.transfer_seconds(1e9, [(0, 1)]) == pytest.approx(1e9 / rate, rel=0.01)
    assert cluster.transfer_seconds(1e9, [(0, 2), (1, 3)]) == pytest.approx(2e9 / rate, rel=0.01)
    assert cluster.transfer_seconds(1e9, [(0, 15), (1, 14)]) == pytest.approx(2e9 / rate, rel=0.01)  # both cross the closing link
    assert cluster.transfer_seconds(1e9, [(0, 15), (7, 8)]) == pytest.approx(1e9 / rate, rel=0.01)


def test_slices_exchange_over_their_hosts():
    cluster = load_cluster("v5e:2x4x4")
    assert cluster.transfer_seconds(1e9, [(0, 16)]) == pytest.approx(1e9 / cluster.topology.network.rate, rel=0.02)


# Matmuls


A100 = load_cluster("a100-80:1").device
V5E = load_cluster("v5e:1x1").device


def test_one_tile_more_than_a_wave_costs_another_wave():
    tiling = Tiling(((128, 128, 32, 1.0),), 108)
    full, more = (tiling.padded_flops(Shape(1, 128 * tiles, 128, 4096)) for tiles in (108, 109))
    assert more == 2 * full == 2 * Shape(1, 128 * 108, 128, 4096).flops


def test_few_tiles_split_the_contraction():
    tiling = Tiling(((128, 128, 32, 1.0),), 108)
    assert tiling.padded_flops(Shape(1, 128, 128, 108 * 32)) == Shape(1, 128, 128, 108 * 32).flops


def test_a_head_of_64_half_fills_a_systolic_array_of_128():
    """`(b h) q d, k d -> q k` with d = 64: twice the FLOPs' time; d = 128 is free of padding."""
    seconds = [V5E.compute_seconds(s.flops, 0, "bfloat16", True, s) for s in (Shape(512, 4096, 4096, 64), Shape(512, 4096, 4096, 128))]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


@settings(deadline=None)
@given(st.tuples(*(st.integers(1, 3000) for _ in range(4))), st.sampled_from([A100, V5E]))
def test_padding_never_saves_work(sizes, device):
    shape = Shape(*sizes)
    assert device.tiling.padded_flops(shape) >= shape.flops * (1 - 1e-12)
    plain = device.compute_seconds(shape.flops, 0, "bfloat16", True)
    assert device.compute_seconds(shape.flops, 0, "bfloat16", True, shape) >= plain


def test_large_matmuls_that_fit_are_not_slowed():
    shape = Shape(1, 8192, 8192, 8192)
    for device in (A100, V5E):
        plain = device.compute_seconds(shape.flops, 0, "bfloat16", True)
        assert device.compute_seconds(shape.flops, 0, "bfloat16", True, shape) == pytest.approx(plain, rel=0.06)


def test_a_dtype_may_reach_less_of_its_peak():
    device = load_cluster("h100-sxm:8").device
    assert device.matmul_rate("float8_e4m3fn") == pytest.approx(1402.6e12, rel=0.01)
    assert device.matmul_rate("bfloat16") == pytest.approx(794.5e12, rel=0.01)


def test_what_the_driver_keeps_is_not_a_programs():
    """Alpa's logs on V100-32GB show 28.03 GiB at a fraction of 0.9; XLA on v5e has 15.75 GiB."""
    assert load_cluster("v100-dgx2").device.usable_bytes(0.9) == pytest.approx(28.03 * 2**30, rel=1e-3)
    assert load_cluster("v5e").device.usable_bytes() == 15.75 * 2**30


def op(primitive, **params):
    return Op(primitive=primitive, params=tuple(sorted(params.items())), operands=(0, 1), results=(2,))


def test_a_dots_and_a_convolutions_matmul_has_their_flops():
    dot = op("dot_general", dimension_numbers=(((2,), (1,)), ((0,), (0,))))
    shapes = [(8, 128, 64), (8, 64, 32), (8, 128, 32)]
    avals = [Aval(shape, "float32") for shape in shapes]
    assert costs.matmul_shape(dot, shapes[:2], shapes[2:]) == Shape(8, 128, 32, 64)
    assert costs.matmul_shape(dot, shapes[:2], shapes[2:]).flops == costs.flops(dot, avals[:2], avals[2:])
    spec = {"lhs_spec": (0, 1, 2, 3), "rhs_spec": (0, 1, 2, 3), "out_spec": (0, 1, 2, 3)}
    conv = op("conv_general_dilated", dimension_numbers=tuple(spec.items()), feature_group_count=2)
    shapes = [(4, 16, 10, 10), (32, 8, 3, 3), (4, 32, 8, 8)]
    avals = [Aval(shape, "float32") for shape in shapes]
    assert costs.matmul_shape(conv, shapes[:2], shapes[2:]) == Shape(2, 4 * 64, 16, 8 * 9)
    assert costs.matmul_shape(conv, shapes[:2], shapes[2:]).flops == costs.flops(conv, avals[:2], avals[2:])


def test_plans_see_what_a_cut_does_to_a_matmuls_shape():
    """Cut to 16 columns each over eight devices, a systolic array of 128 does the work of the whole."""
    pricer = costs.Pricer(load_cluster("v5e:2x4"), LogicalMesh(("x",), (8,)))
    dot = op("dot_general", dimension_numbers=(((1,), (0,)), ((), ())))
    avals = [Aval(shape, "bfloat16") for shape in ((8192, 8192), (8192, 128), (8192, 128))]
    rule = instantiate(parse("m k, k n -> m n"), avals[:2], avals[2:])
    rows, columns = (pricer.op(dot, rule, Strategy(((f, ("x",)),)), avals[:2], avals[2:], (), ()) for f in "mn")
    assert columns > 5 * rows


@pytest.mark.parametrize("module", ["rings", "levels", "switch", "tiles"])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(importlib.import_module(f"cost_models.{module}")).failed == 0
