"""The dynamic programme against all ways to cut layers and to deal out devices, priced one by one."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import InfeasibleError, MeshError, UsageError
from autopar.interop.slice import plan_stages
from autopar.interop.stages import Chain, Choice, Grid, Link, StagePlan, crossings
from autopar.interop.submesh import Submesh, place, submeshes
from autopar.schedule.formulas import Formula, HopSeconds, StageSeconds
from benchmarks import stages

FORMULAS = [
    *(Formula(name, m) for name in ("gpipe", "1f1b", "eager_1f1b", "zero_bubble", "forward") for m in (1, 2, 5)),
    *(Formula("interleaved", m, v) for m, v in ((2, 1), (4, 2), (5, 2))),
]


class Case:
    """Random layers of few classes, values that skip layers, choices that differ with all that they may depend on, slow and fast links."""

    def __init__(self, seed: int, limit: bool):
        rng = np.random.default_rng(seed)
        self.layers = int(rng.integers(1, 7))
        nodes, devices = [(2, 1), (1, 4), (2, 2), (3, 1), (2, 4), (1, 6), (4, 2), (1, 8)][int(rng.integers(8))]
        made = [int(x) for x in rng.integers(0, self.layers, 6)]
        self.values = [(a, int(rng.integers(a, self.layers)), float(rng.integers(1, 9))) for a in made]
        self.classes = tuple(int(x) for x in rng.integers(0, 2, self.layers))
        self.seed, self.asked = seed, []
        rate, late = float(rng.choice([0.0, 0.3, 3.0])), float(rng.integers(0, 2))
        self.link = lambda a, b: Link(rate / min(a.size, b.size), late * (a.nodes != b.nodes))
        memory = float(rng.integers(20, 120)) if limit else None
        self.grid = Grid(nodes, devices, submeshes(nodes, devices), self.link, memory, lambda s: 1 + s.size // 2)
        self.forward = crossings(self.layers, self.values)
        self.choices = functools.cache(self._choices)
        self.chain = Chain(self.classes, self.forward, tuple(x / 2 for x in self.forward))

    def _choices(self, content: tuple[int, ...], submesh: Submesh, microbatches: int) -> list[Choice]:
        rng = np.random.default_rng([self.seed, len(content), *content, submesh.nodes, submesh.devices, microbatches])
        found = []
        for c in range(int(rng.integers(0 if len(content) > 1 else 1, 4))):
            f, i, w, u = (float(x) * len(content) / submesh.size for x in rng.integers(1, 20, 4))
            fixed, residual = (float(x) * len(content) for x in rng.integers(0, 12, 2))
            if self.seed % 2:  # what is fast per microbatch is slow once per step
                u = microbatches * 400 * len(content) / submesh.size / (f + i + w)
            found.append(Choice(f, i + w, w, u, fixed, residual, c))
        return found

    def oracle(self, start: int, stop: int, submesh: Submesh, microbatches: int) -> list[Choice]:
        self.asked.append((self.classes[start:stop], submesh, microbatches))
        return self.choices(self.classes[start:stop], submesh, microbatches)

    def all_plans(self, formula: Formula) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and bytes on the fullest device, of every plan there is."""
        n, m = self.layers, formula.microbatches
        found = [(np.empty(0), np.empty(0))]
        for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
            borders = (0, *cuts, n)
            if not any((b - a) % formula.chunks for a, b in itertools.pairwise(borders)):
                for meshes in itertools.product(self.grid.submeshes, repeat=len(cuts) + 1):
                    if sum(mesh.size for mesh in meshes) == self.grid.size:
                        options = [self.choices(self.classes[a:b], s, m) for a, b, s in zip(borders, borders[1:], meshes, strict=False)]
                        found.append(self.prices(formula, borders, meshes, list(itertools.product(*options))))
        return tuple(np.concatenate(values) for values in zip(*found, strict=True))

    def prices(self, formula: Formula, borders, meshes, plans: list[tuple[Choice, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """The same for plans that differ in their choices alone."""
        if not plans:
            return np.empty(0), np.empty(0)
        n, m = len(meshes), formula.microbatches
        fields = [[(c.forward_s, c.backward_s, c.weight_s, c.update_s, c.fixed_bytes, c.residual_bytes) for c in plan] for plan in plans]
        f, b, w, u, fixed, residual = np.moveaxis(np.array(fields), 2, 0)
        cross = np.array([sum(size for made, read, size in self.values if made < k <= read) / m for k in borders])
        links = [self.link(*pair) for pair in itertools.pairwise(meshes)]
        there = cross[1:-1] * [link.seconds_per_byte for link in links]
        stage, hop = StageSeconds(f, b, w, u), HopSeconds(there, there / 2, np.array([link.latency_s for link in links]))
        seconds = formula.latency(stage).sum(axis=1) + np.sum(formula.hop_latency(hop))
        for weight, values, between in formula.peaks(stage, hop, n):
            seconds += weight * np.maximum(values.max(axis=1), np.max(between, initial=0.0))
        bytes_of = []
        for s, mesh in enumerate(meshes):
            enters, leaves = cross[s : s + 2] / self.grid.parts(mesh)
            bytes_of.append(formula.flight(n - s, n).nbytes(fixed[:, s], residual[:, s], enters, leaves))
        return seconds, np.max(bytes_of, axis=0)


def check_plan(case: Case, plan: StagePlan) -> None:
    """A plan's parts fit together, and its price is that of its parts."""
    borders = (0, *(stage.stop for stage in plan.stages))
    assert [stage.start for stage in plan.stages] == list(borders[:-1]) and borders[-1] == case.layers
    meshes, picks = tuple(s.submesh for s in plan.stages), tuple(s.choice for s in plan.stages)
    place(meshes, case.grid.nodes, case.grid.devices)
    for stage in plan.stages:
        assert stage.choice in case.choices(case.classes[stage.start : stage.stop], stage.submesh, plan.microbatches)
    (seconds,), (peak,) = case.prices(plan.formula, borders, meshes, [picks])
    assert plan.seconds == pytest.approx(seconds)
    assert max(stage.nbytes for stage in plan.stages) == pytest.approx(peak)


@pytest.mark.parametrize("limit", [False, True])
@given(st.integers(0, 10**6), st.sampled_from(FORMULAS))
@settings(max_examples=150, deadline=None)
def test_no_plan_is_better_than_the_one_that_is_found(limit, seed, formula):
    case = Case(seed, limit)
    seconds, peaks = case.all_plans(formula)
    fitting = seconds[peaks <= case.grid.memory_bytes] if limit else seconds
    if len(fitting):
        plan = plan_stages(case.chain, case.grid, case.oracle, [formula])
        assert plan.seconds == pytest.approx(min(fitting), rel=1e-9)
        check_plan(case, plan)
    else:
        with pytest.raises(InfeasibleError) as caught:
            plan_stages(case.chain, case.grid, case.oracle, [formula])
        if len(peaks):
            assert caught.value.peak_bytes == np.ceil(min(peaks) - 1e-9)
            assert caught.value.budget_bytes == case.grid.memory_bytes
    assert len(set(case.asked)) == len(case.asked), "a class was asked for twice"


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_the_best_schedule_and_number_of_microbatches_is_found_and_simulates(seed):
    case = Case(seed, True)
    fitting = {}
    for formula in FORMULAS[:9]:
        seconds, peaks = case.all_plans(formula)
        fitting |= {formula: min(found)} if len(found := seconds[peaks <= case.grid.memory_bytes]) else {}
    if fitting:
        plan = plan_stages(case.chain, case.grid, case.oracle, FORMULAS[:9])
        assert plan.seconds == pytest.approx(min(fitting.values()))
        assert plan.formula in [f for f, seconds in fitting.items() if seconds == pytest.approx(plan.seconds)]
        found = plan.simulation
        assert 0.5 * plan.seconds <= found.makespan_s <= 1.4 * plan.seconds
        assert all(found.peak_bytes(d) <= stage.nbytes + 1e-9 for d, stage in enumerate(plan.stages))


@given(st.integers(0, 10**6), st.sampled_from(FORMULAS))
@settings(max_examples=40, deadline=None)
def test_a_limit_on_stages_and_a_gap_are_kept(seed, formula):
    case = Case(seed, False)
    try:
        best = plan_stages(case.chain, case.grid, case.oracle, [formula])
    except InfeasibleError:
        return
    near = plan_stages(case.chain, case.grid, case.oracle, [formula], gap=0.1)
    assert best.seconds <= near.seconds * (1 + 1e-9) and near.seconds * (1 - 0.1) <= best.seconds
    whole = case.choices(case.classes, case.grid.submeshes[-1], formula.microbatches)
    whole = whole if case.layers % formula.chunks == 0 else []
    if whole:
        one = plan_stages(case.chain, case.grid, case.oracle, [formula], max_stages=1)
        assert len(one.stages) == 1 and one.seconds >= best.seconds * (1 - 1e-9)


def uniform(layers: int, grid: Grid, seconds: float = 1.0, residual: float = 0.0, border: float = 0.0) -> tuple[Chain, object]:
    """Equal layers that speed up as they should inside a node, and hardly beyond."""

    def oracle(start: int, stop: int, submesh: Submesh, microbatches: int) -> list[Choice]:
        work = seconds * (stop - start) / microbatches / submesh.devices / submesh.nodes**0.2
        return [Choice(work, 2 * work, work, residual_bytes=residual * (stop - start) / microbatches / submesh.size)]

    crossing = (0.0, *[border] * (layers - 1), 0.0)
    return Chain(("layer",) * layers, crossing, crossing), oracle


def fast(a: Submesh, b: Submesh) -> Link:
    return Link(0.0)


def test_nodes_that_share_badly_become_stages_of_equal_layers():
    grid = Grid(4, 2, submeshes(4, 2), fast)
    chain, oracle = uniform(8, grid)
    plan = plan_stages(chain, grid, oracle, [Formula("1f1b", 16)])
    assert [(s.start, s.stop, str(s.submesh)) for s in plan.stages] == [(k, k + 2, "1x2") for k in (0, 2, 4, 6)]
    assert plan.seconds == pytest.approx(plan.simulation.makespan_s) == pytest.approx((16 + 3) * 3 * 2 / 16 / 2)


def test_one_stage_is_the_answer_where_the_network_is_slow_or_there_is_one_microbatch():
    grid = Grid(4, 2, submeshes(4, 2), lambda a, b: Link(1.0))
    chain, oracle = uniform(8, grid, border=100.0)
    assert len(plan_stages(chain, grid, oracle, [Formula("1f1b", 16)]).stages) == 1
    grid = Grid(4, 2, submeshes(4, 2), fast)
    assert len(plan_stages(chain, grid, oracle, [Formula("1f1b", 1)]).stages) == 1


def test_seven_layers_on_four_devices_are_cut_unevenly_not_refused():
    grid = Grid(4, 1, (Submesh(1, 1),), fast)
    chain, oracle = uniform(7, grid)
    plan = plan_stages(chain, grid, oracle, [Formula("1f1b", 8)])
    assert sorted(stage.stop - stage.start for stage in plan.stages) == [1, 2, 2, 2]


def test_shares_of_an_interleaved_plan_are_dealt_out_in_chunks():
    grid = Grid(4, 1, (Submesh(1, 1),), fast)
    chain, oracle = uniform(16, grid)
    plan = plan_stages(chain, grid, oracle, [Formula("interleaved", 8, 2)])
    assert plan.pieces == tuple((k, k + 2) for k in range(0, 16, 2))
    assert plan.simulation.makespan_s == pytest.approx(plan.seconds)
    straight = plan_stages(chain, grid, oracle, [Formula("1f1b", 8)])
    assert straight.pieces == tuple((stage.start, stage.stop) for stage in straight.stages)
    assert plan.seconds < straight.seconds


def test_a_short_memory_takes_the_schedule_that_holds_less():
    grid = Grid(4, 2, submeshes(4, 2), fast)
    chain, oracle = uniform(8, grid, residual=16.0)
    both = [Formula("gpipe", 16), Formula("1f1b", 16)]
    assert plan_stages(chain, grid, oracle, both).schedule == "gpipe"
    tight = Grid(4, 2, submeshes(4, 2), fast, memory_bytes=4.0)
    plan = plan_stages(chain, tight, oracle, both)
    assert plan.schedule == "1f1b" and max(stage.nbytes for stage in plan.stages) == 4.0


def test_what_does_not_fit_is_told_by_stage_and_bytes():
    grid = Grid(2, 2, submeshes(2, 2), fast, memory_bytes=2.0**30)
    chain, oracle = uniform(4, grid, residual=64.0 * 2**30)
    with pytest.raises(InfeasibleError, match=r"stage \d \(layers \d to \d on \dx\d devices\) needs .* GiB: it lacks .* GiB") as caught:
        plan_stages(chain, grid, oracle, [Formula("1f1b", 2)])
    assert caught.value.peak_bytes > caught.value.budget_bytes == 2**30
    assert sum(nbytes for _, nbytes in caught.value.live) == pytest.approx(caught.value.peak_bytes, abs=3)


def test_devices_that_no_choice_tiles_are_told():
    grid = Grid(3, 1, (Submesh(1, 1), Submesh(2, 1)), fast)
    chain = Chain(("layer",), (0.0, 0.0), (0.0, 0.0))
    with pytest.raises(InfeasibleError, match="no ranges of layers that have a choice tile 3 nodes of 1 devices"):
        plan_stages(chain, grid, lambda *_: [Choice(1.0)], [Formula("1f1b", 2)])


@pytest.mark.parametrize(
    "choice",
    [Choice(-1.0), Choice(float("nan")), Choice(1.0, float("inf")), Choice(1.0, 1.0, 2.0), Choice(1.0, fixed_bytes=-1.0)],
)
def test_costs_that_are_none_are_refused(choice):
    grid = Grid(1, 1, submeshes(1, 1), fast)
    with pytest.raises(UsageError, match="layers 0 to 0"):
        plan_stages(Chain(("layer",), (0.0, 0.0), (0.0, 0.0)), grid, lambda *_: [choice], [Formula("1f1b", 2)])


def test_borders_that_do_not_fit_the_layers_are_refused():
    with pytest.raises(UsageError, match="3 numbers"):
        Chain(("a", "b"), (0.0, 1.0), (0.0, 1.0, 0.0))
    with pytest.raises(UsageError, match="the first and the last 0"):
        Chain(("a", "b"), (0.0, 1.0, 1.0), (0.0, 1.0, 0.0))
    with pytest.raises(UsageError, match="at least one layer"):
        Chain((), (0.0,), (0.0,))


def test_searches_that_make_no_sense_are_refused():
    grid = Grid(1, 1, submeshes(1, 1), fast)
    chain, oracle = uniform(2, grid)
    for formulas, options in (([], {}), ([Formula("1f1b", 2)], {"max_stages": 0}), ([Formula("1f1b", 2)], {"gap": 1.0})):
        with pytest.raises(UsageError, match="give one schedule or more"):
            plan_stages(chain, grid, oracle, formulas, **options)
    for changed in ({"submeshes": ()}, {"memory_bytes": 0.0}):
        with pytest.raises(UsageError, match="a grid needs submeshes and memory"):
            replace(grid, **changed)


def test_a_value_crosses_every_border_up_to_its_last_reader():
    assert crossings(5, [(0, 1, 1.0), (0, 4, 10.0), (2, 2, 99.0), (3, 4, 5.0)]) == (0.0, 11.0, 10.0, 10.0, 15.0, 0.0)


@pytest.mark.parametrize(
    ("nodes", "devices", "expected"),
    [(1, 1, "1x1"), (1, 8, "1x1 1x2 1x4 1x8"), (4, 2, "1x1 1x2 2x2 4x2"), (3, 6, "1x1 1x2 1x6 2x6 3x6"), (2, 3, "1x1 1x3 2x3")],
)
def test_submeshes_are_powers_of_two_in_a_node_and_whole_nodes(nodes, devices, expected):
    assert " ".join(map(str, submeshes(nodes, devices))) == expected
    assert [s.nodes for s in submeshes(nodes, devices, every_count=True) if s.devices == devices] == list(range(1, nodes + 1))


@given(st.sampled_from([(1, 8), (4, 2), (3, 6), (5, 4), (2, 3)]), st.randoms(use_true_random=False))
def test_whatever_sizes_add_up_tile_the_cluster(shape, random):
    nodes, devices = shape
    sizes, left = [], nodes * devices
    while left:
        sizes.append(random.choice([s for s in submeshes(nodes, devices, every_count=True) if s.size <= left]))
        left -= sizes[-1].size
    taken = set()
    for first, size in zip(place(sizes, nodes, devices), sizes, strict=True):
        own = set(range(first, first + size.size))
        assert not own & taken
        taken |= own
        assert len({d // devices for d in own}) == size.nodes
    assert taken == set(range(nodes * devices))


def test_stages_that_do_not_fill_the_cluster_are_refused():
    with pytest.raises(MeshError, match="do not fill 2 nodes of 2"):
        place([Submesh(1, 2)], 2, 2)
    with pytest.raises(MeshError, match="does not fit beside the others"):
        place([Submesh(1, 2)] * 3, 2, 3)
    with pytest.raises(MeshError, match="at least one"):
        submeshes(0, 8)


def by_every_bound(layers: int, grid: Grid, price, microbatches: int) -> float:
    """The least makespan under 1F1B as Alpa finds it: for each bound on the slowest stage the least sum, level by level."""
    pairs = list(itertools.combinations(range(layers + 1), 2))
    ranges = {(i, j, m): price(j - i, mesh) for i, j in pairs for m, mesh in enumerate(grid.submeshes)}
    best = np.inf
    for bound in sorted({c.forward_s + c.backward_s for some in ranges.values() for c in some}):
        if (microbatches - 1) * bound >= best:
            break
        behind = np.full((layers + 1, grid.size + 1), np.inf)
        behind[layers, 0] = 0.0
        for position in range(1, layers + 1):
            state = np.full_like(behind, np.inf)
            for (i, j, m), some in ranges.items():
                fit = [c for c in some if c.fixed_bytes + min(position, microbatches) * c.residual_bytes <= grid.memory_bytes]
                took = min((t for c in fit if (t := c.forward_s + c.backward_s) <= bound), default=np.inf)
                size = grid.submeshes[m].size
                if np.isfinite(took) and size <= grid.size:
                    state[i, size:] = np.minimum(state[i, size:], took + behind[j, : grid.size + 1 - size])
            behind = state
            best = min(best, state[0, grid.size] + (microbatches - 1) * bound)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_twelve_layers_under_a_memory_that_binds_agree_with_a_search_over_every_bound(seed):
    rng = np.random.default_rng(seed)
    slow = {(n, size, c): float(rng.uniform(1, 1.3)) for n in range(1, 13) for size in (1, 2, 4, 8, 16) for c in range(2)}

    def price(length: int, submesh: Submesh) -> list[Choice]:
        found = []
        for c, (residual, more) in enumerate(((2.0, 1.0), (0.4, 1.4))):
            work = length / submesh.size**0.5 * more * slow[length, submesh.size, c]
            found.append(Choice(work, 2 * work, work, 0.0, length / submesh.size, length * residual / submesh.size))
        return found

    grid = Grid(4, 4, submeshes(4, 4), fast, memory_bytes=float(rng.uniform(2.0, 4.0)))
    chain = Chain(("layer",) * 12, (0.0,) * 13, (0.0,) * 13)
    expected = by_every_bound(12, grid, price, 8)
    plan = plan_stages(chain, grid, lambda i, j, submesh, m: price(j - i, submesh), [Formula("1f1b", 8)])
    assert plan.seconds == pytest.approx(expected)
    loose = plan_stages(chain, Grid(4, 4, grid.submeshes, fast), lambda i, j, submesh, m: price(j - i, submesh), [Formula("1f1b", 8)])
    assert loose.seconds < plan.seconds, "memory does not bind"


def test_the_benchmark_of_stages_runs_and_its_rows_are_whole(capsys):
    assert stages.main(["8:2x2:8:1f1b", "8:2x2:8:zero_bubble:0.5", "8:2x2:8:1f1b:0.001", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["stages"] > 0 for row in rows] == [True, True, False]
    assert all(0.5 < row["simulated"] / row["seconds"] <= 1 + 1e-9 for row in rows[:2])


def test_many_layers_on_a_large_cluster_take_seconds():
    grid = Grid(128, 8, submeshes(128, 8), lambda a, b: Link(1e-3 / min(a.size, b.size), 1e-5))
    chain, oracle = uniform(96, grid, border=10.0)
    plan = plan_stages(chain, grid, oracle, [Formula("1f1b", 128)])
    assert sum(stage.submesh.size for stage in plan.stages) == 1024 and len(plan.stages) > 4
