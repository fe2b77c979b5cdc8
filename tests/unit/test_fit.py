"""Fits must find the figures that synthetic points were made with."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import cost_models
from cost_models import Curve, Link, fit
from cost_models.fit import Sample, fit_curve, fit_figures, summarise
from cost_models.measured import Measured
from cost_models.profile import figures
from cost_models.profile.questions import questions, shape_of

SIZES = [4.0**power for power in range(6, 16)]


@settings(deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8), st.floats(1e3, 1e8))
def test_a_curve_is_found_again_from_its_points(fixed, per_byte, half):
    truth = Curve(fixed, ((per_byte, half ** (2 / 3) * per_byte),))
    found = fit_curve([(size, truth.seconds(size)) for size in SIZES])
    assert [found.seconds(size) for size in SIZES] == pytest.approx([truth.seconds(size) for size in SIZES], rel=1e-3)


def test_parameters_are_found_through_noise_and_outliers():
    rng = np.random.default_rng(0)
    truth = Curve(2e-5, ((1e-11, (1e6) ** (2 / 3) * 1e-11),))
    points = [(size, truth.seconds(size) * rng.normal(1, 0.02)) for size in SIZES for _ in range(3)]
    points[4] = (points[4][0], 10 * points[4][1])
    points[20] = (points[20][0], 5 * points[20][1])
    found = fit_curve(points)
    assert found.fixed == pytest.approx(truth.fixed, rel=0.1)
    assert found.terms[0] == pytest.approx(truth.terms[0], rel=0.15)


def test_no_figure_is_negative_and_few_points_give_a_simple_curve():
    falling = fit_curve([(1e3, 2e-5), (1e6, 1e-5), (1e9, 2e-5)])
    assert falling.fixed >= 0 and min(falling.terms[0]) >= 0
    assert fit_curve([(1e6, 1e-3)]) == Curve(0.0, ((pytest.approx(1e-9), 0.0),))
    two = fit_curve([(1e3, 1e-5), (1e6, 1e-3)])
    assert [two.seconds(1e3), two.seconds(1e6)] == pytest.approx([1e-5, 1e-3]) and two.terms[0][1] == 0
    with pytest.raises(ValueError, match="at least one"):
        fit_curve([])


def test_terms_can_be_left_out():
    points = [(size, 1e-5 + size * 1e-10) for size in SIZES]
    assert fit_curve(points, fixed=False).fixed == 0 and fit_curve(points, ramp=False).terms[0] == pytest.approx((1e-10, 0.0))


def test_repeats_that_something_else_slowed_do_not_count():
    assert summarise([1.0, 1.02, 0.98, 1.01, 0.99, 30.0, 12.0]).seconds == pytest.approx(1.0, abs=0.01)
    assert summarise([2.0]) == Sample(2.0, 0.0, 1)


def test_figures_of_any_model_are_found():
    def predict(figures):
        return [figures["a"] + figures["b"] * x for x in (1, 10, 100)]

    assert fit_figures({"a": 1.0, "b": 1.0}, predict, [3.2, 5.0, 23.0]) == pytest.approx({"a": 3.0, "b": 0.2}, rel=1e-3)


def points_of(cluster, dims, platform="gpu"):
    """What a profile would find on devices that cost exactly what `cluster` says."""
    found = {}
    for question in questions(platform, dims):
        seconds = figures.predict(question.curve, question.at, cluster)
        found.setdefault(question.curve, {})[question.at] = Sample(seconds, 0.0, 5)
    return found


def blind(cluster):
    """The same cluster with links and rates that are off by some factor: what is known before measuring."""
    topology = cluster.topology
    link = replace(topology.link, bytes_per_s=topology.link.bytes_per_s * 0.5, call_seconds=4e-5, half_bytes=1e6, latency_seconds=9e-6)
    network = replace(topology.network, bytes_per_s=topology.network.bytes_per_s * 3, latency_seconds=1e-6)
    device = replace(cluster.device, vector_flops=1e12, memory_bytes_per_s=1e12, half_flops=1e7, peak_flops=(("float32", 1e12),))
    return replace(cluster, device=device, topology=replace(topology, link=link, network=network))


@pytest.mark.parametrize("text", ["a100-80:2x4", "v5e:4x4"])
def test_a_profile_of_a_known_cluster_finds_it_again(text):
    truth = cost_models.load_cluster(text)
    truth = replace(truth, device=replace(truth.device, tiling=None))  # squares and skinny shapes on one curve
    dims = truth.topology.dims
    found = figures.fitted(points_of(truth, dims), blind(truth))
    assert isinstance(found.topology, Measured)
    base = found.topology.base
    assert base.link.rate == pytest.approx(truth.topology.link.rate, rel=0.05)
    assert found.device.peak("bfloat16") == pytest.approx(truth.device.matmul_rate("bfloat16"), rel=0.03)
    assert found.device.half_flops == pytest.approx(truth.device.half_flops, rel=0.1)
    assert found.device.memory_bytes_per_s == pytest.approx(truth.device.memory_bytes_per_s * truth.device.memory_efficiency, rel=0.03)
    for each in figures.accuracy(points_of(truth, dims), found):
        assert each.median_error < 0.06, each


def test_what_was_not_measured_is_priced_by_the_fitted_model():
    """A node of four was measured; four such nodes are asked for."""
    truth = cost_models.load_cluster("a100-80:1x4")
    found = figures.fitted(points_of(truth, (1, 4)), blind(truth))
    data = found.to_dict()
    larger = cost_models.Cluster.from_dict({**data, "topology": {**data["topology"], "shape": [4, 4]}})
    real = cost_models.load_cluster("a100-80:4x4")
    inside, across = ((4, 1),), ((16, 1),)
    assert larger.collective_curves("all_reduce", inside).keys() == {"measured"}
    assert larger.collective_seconds("all_reduce", 1e8, inside) == pytest.approx(
        real.collective_seconds("all_reduce", 1e8, inside), rel=0.05
    )
    assert larger.collective_curves("all_reduce", across).keys() == {"flat", "hierarchical"}
    assert larger.topology.base.network == blind(truth).topology.network


def test_a_measured_topology_survives_json_and_joins_axes():
    topology = Measured(cost_models.load_cluster("a100-80:2x4").topology, (2, 4), (("all_reduce", "8:1", Curve(1e-5, ((1e-10, 0.0),))),))
    assert Measured.from_dict(topology.to_dict()) == topology
    assert topology.curves("all_reduce", ((2, 4), (4, 1))) == topology.curves("all_reduce", ((8, 1),))
    assert topology.seconds("all_gather", 1e6, ((8, 1),)) == topology.base.seconds("all_gather", 1e6, ((8, 1),))
    assert topology.submesh((1, 4)).shape == (1, 4)


def test_measured_transfers_hold_for_devices_that_were_there():
    base = cost_models.load_cluster("a100-80:2x4").topology
    topology = Measured(base, (2, 4), (), Curve(0.0, ((1e-9, 0.0),)))
    assert topology.transfer_seconds(1e6, [(0, 4), (1, 5)]) == pytest.approx(1e-3)
    assert topology.transfer_seconds(1e6, [(0, 4), (0, 5)]) == pytest.approx(2e-3)
    wider = replace(topology, base=base.submesh((4, 4)))
    assert wider.transfer_seconds(1e6, [(0, 8)]) == base.submesh((4, 4)).transfer_seconds(1e6, [(0, 8)])


def test_links_have_the_rate_of_their_figures():
    assert Link(10.0, efficiency=0.5).rate == 5.0 and shape_of("2x3x4x5").flops == 240


def test_examples_hold():
    assert doctest.testmod(fit).failed == 0
