"""The simulator against longest paths, bytes counted task by task, published bubbles; closed forms and bounds against the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Schedule, build
from autopar.schedule.costs import StageCost, Transfer
from autopar.schedule.formulas import NAMES, Formula
from autopar.schedule.simulate import Simulation, simulate

shapes = st.tuples(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.integers(2, 3), st.integers(0, 2**32 - 1))


def equal(name: str, devices: int, microbatches: int, chunks: int = 1, hop: float = 0.0) -> Simulation:
    """F = I = W = 1 per device's share, and a latency per hop."""
    schedule = build(name, devices, microbatches, chunks)
    costs = [StageCost(1 / chunks, 2 / chunks, 1 / chunks, 1 / chunks)] * (devices * chunks)
    return simulate(schedule, costs, [Transfer(a, b, latency_s=hop) for a, b in schedule.edges])


def uneven(shape: tuple[str, int, int, int, int], wire: float = 1.0) -> tuple[Schedule, list[StageCost], list[Transfer]]:
    """Random stages, transfers and skips; times are multiples of a half, so that sums are exact."""
    name, devices, microbatches, chunks, seed = shape
    rng = np.random.default_rng(seed)
    schedule = build(name, devices, microbatches, chunks if name == "interleaved" else 1)
    stages = schedule.num_stages
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    chosen = [pairs[int(k)] for k in rng.permutation(len(pairs))[:2]]
    schedule = replace(schedule, skips=tuple(chosen))
    costs = []
    for _ in range(stages):
        f, i, w, u = (float(x) / 2 for x in rng.integers(0, 8, 4))
        costs.append(StageCost(f, i + w, i, w, u, *(float(x) for x in rng.integers((20, 0, 0, 0), (40, 20, 9, 99)))))
    transfers = [
        Transfer(a, b, *(wire * float(x) / 2 for x in rng.integers(0, 5, 3)), *(float(x) for x in rng.integers(0, 9, 4)))
        for a, b in schedule.edges
    ]
    return schedule, costs, transfers


@pytest.mark.parametrize(
    ("devices", "microbatches", "name", "chunks", "bubble", "with_hops"),
    [
        (4, 8, "gpipe", 1, 27.3, 28.6),
        (4, 8, "1f1b", 1, 27.3, 30.6),
        (4, 8, "eager_1f1b", 1, 27.3, 28.6),
        (4, 8, "interleaved", 2, 15.8, 19.7),
        (4, 8, "interleaved", 4, 8.6, 17.9),
        (4, 8, "zero_bubble", 1, 11.1, 14.9),
        (8, 16, "gpipe", 1, 30.4, 31.8),
        (8, 16, "1f1b", 1, 30.4, 34.2),
        (8, 16, "eager_1f1b", 1, 30.4, 31.8),
        (8, 16, "interleaved", 2, 17.9, 22.0),
        (8, 16, "interleaved", 4, 9.9, 19.3),
        (8, 16, "zero_bubble", 1, 12.7, 17.0),
    ],
)
def test_bubbles_are_those_that_other_simulations_give(devices, microbatches, name, chunks, bubble, with_hops):
    assert 100 * equal(name, devices, microbatches, chunks).bubble == pytest.approx(bubble, abs=0.05)
    assert 100 * equal(name, devices, microbatches, chunks, 0.1).bubble == pytest.approx(with_hops, abs=0.05)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (1, 5), (2, 2), (3, 9), (4, 8), (5, 20), (8, 16)])
def test_idle_time_on_equal_devices_is_that_of_the_papers(devices, microbatches):
    f, i, w, more = 1.0, 1.5, 0.75, devices - 1
    for name, chunks, expected in (
        ("gpipe", 1, more * (f + i + w)),
        ("1f1b", 1, more * (f + i + w)),
        ("eager_1f1b", 1, more * (f + i + w)),
        ("zero_bubble", 1, more * (f + i - w)),
        ("forward", 1, more * f),
        *((("interleaved", v, more * (f + i + w) / v) for v in (1, 2, 3, 5)) if microbatches % devices == 0 else ()),
    ):
        schedule = build(name, devices, microbatches, chunks)
        found = simulate(schedule, [StageCost(f / chunks, (i + w) / chunks, i / chunks, w / chunks)] * (devices * chunks))
        for d in range(devices):
            assert found.idle_s(d) == pytest.approx(expected), (name, chunks, d)


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_tasks_begin_when_the_longest_path_to_them_ends(shape):
    schedule, costs, transfers = uneven(shape)
    transfers = [replace(t, forward_s=0.0, backward_s=0.0) for t in transfers]  # links that are never busy
    late = {(t.source, t.target): t.latency_s for t in transfers}
    found = {span.task: span for row in simulate(schedule, costs, transfers).spans for span in row}
    starts = dict.fromkeys(schedule.tasks, 0.0)
    changed = True
    while changed:
        changed = False
        for order in schedule.orders:
            for k, task in enumerate(order):
                reach = [starts[order[k - 1]] + costs[order[k - 1].stage].seconds(order[k - 1])] if k else []
                for needed in schedule.needs(task):
                    pair = tuple(sorted((needed.stage, task.stage)))
                    apart = schedule.device_of[pair[0]] != schedule.device_of[pair[1]]
                    hop = late.get(pair, 0.0) if apart else 0.0
                    reach.append(starts[needed] + costs[needed.stage].seconds(needed) + hop)
                if max(reach, default=0.0) > starts[task]:
                    starts[task], changed = max(reach), True
    assert {task: span.start_s for task, span in found.items()} == starts


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_links_carry_one_transfer_at_a_time_and_no_task_begins_before_its_transfers_end(shape):
    schedule, costs, transfers = uneven(shape)
    found = simulate(schedule, costs, transfers)
    spans = {span.task: span for row in found.spans for span in row}
    late = {(t.source, t.target): t.latency_s for t in transfers}
    links: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for shipment in found.shipments:
        a, b = shipment.sender.stage, shipment.receiver.stage
        assert spans[shipment.sender].end_s <= shipment.start_s <= shipment.end_s <= spans[shipment.receiver].start_s
        links.setdefault((schedule.device_of[a], schedule.device_of[b]), []).append(
            (shipment.start_s, shipment.end_s - late[min(a, b), max(a, b)])
        )
    for busy in links.values():
        for (_, end), (start, _) in zip(busy, busy[1:], strict=False):
            assert end <= start
    crossing = [(a, b) for a, b in schedule.edges if schedule.device_of[a] != schedule.device_of[b]]
    ways = 1 if schedule.name == "forward" else 2
    assert len(found.shipments) == ways * schedule.num_microbatches * len(crossing)


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_bytes_on_a_device_are_those_of_what_lives_there(shape):
    schedule, costs, transfers = uneven(shape)
    found = simulate(schedule, costs, transfers)
    spans = {(span.task.kind, span.task.stage, span.task.microbatch): span for row in found.spans for span in row}
    lives: list[list[tuple[float, float, float]]] = [[] for _ in schedule.orders]
    for (kind, s, m), span in spans.items():
        if kind == "F":
            b, i, w = (spans.get((k, s, m)) for k in "BIW")
            d, cost = schedule.device_of[s], costs[s]
            lives[d].append((span.start_s, (b or w or span).end_s, cost.residual_bytes - cost.input_bytes))
            lives[d].append((span.start_s, (b or i or span).end_s, cost.input_bytes))
            if i and w:
                lives[d].append((i.start_s, w.end_s, cost.inner_bytes))
    for shipment in found.shipments:
        sender, receiver = (spans[t.kind, t.stage, t.microbatch] for t in (shipment.sender, shipment.receiver))
        lives[schedule.device_of[sender.task.stage]].append((sender.start_s, shipment.end_s, shipment.sent_bytes))
        lives[schedule.device_of[receiver.task.stage]].append((shipment.start_s, receiver.end_s, shipment.nbytes))
    times = sorted({t for row in found.memory for t, _ in row})
    for d, row in enumerate(found.memory):
        fixed = sum(cost.fixed_bytes for s, cost in enumerate(costs) if schedule.device_of[s] == d)
        for here, there in zip(times, times[1:], strict=False):
            middle = (here + there) / 2
            expected = fixed + sum(nbytes for start, end, nbytes in lives[d] if start < middle < end)
            assert [held for t, held in row if t <= middle][-1] == expected
        assert row[-1][1] == fixed
        assert found.peak_bytes(d) == max(held for _, held in row)


@given(shapes)
@settings(max_examples=40, deadline=None)
def test_busy_and_idle_make_up_the_makespan_and_updates_come_last(shape):
    schedule, costs, transfers = uneven(shape)
    found = simulate(schedule, costs, transfers)
    work = [0.0] * schedule.num_devices
    for task in schedule.tasks:
        work[schedule.device_of[task.stage]] += costs[task.stage].seconds(task)
    ends = []
    for d, row in enumerate(found.spans):
        update = sum(cost.update_s for s, cost in enumerate(costs) if schedule.device_of[s] == d)
        assert found.busy_s(d) == work[d] + update
        assert found.busy_s(d) + found.idle_s(d) == found.makespan_s
        ends.append(row[-1].end_s + update)
    assert found.makespan_s == max(ends)
    assert [span.start_s for span in found.order] == sorted(span.start_s for row in found.spans for span in row)
    place = {span.task: k for k, span in enumerate(found.order)}
    assert all(place[a] < place[b] for order in schedule.orders for a, b in zip(order, order[1:], strict=False))


def shares(rng: np.random.Generator, devices: int, spread: float) -> tuple[list[StageCost], list[Transfer]]:
    def number() -> float:
        return 1 + spread * float(rng.random())

    costs = [StageCost(f, i + w, i, w, number()) for f, i, w in ((number(), number(), number()) for _ in range(devices))]
    return costs, [Transfer(a, a + 1, 0.2 * number(), 0.2 * number(), 0.05) for a in range(devices - 1)]


def chunked(costs: list[StageCost], hops: list[Transfer], v: int) -> tuple[list[StageCost], list[Transfer]]:
    """Each share in v equal chunks; the way back from the last device to the first is as dear as the dearest direction of any hop."""
    if v == 1:
        return costs, hops
    parts = [StageCost(*(x / v for x in (c.forward_s, c.backward_s, c.input_s, c.weight_s, c.update_s))) for c in costs] * v
    there, back = (max((getattr(h, way) for h in hops), default=0.0) for way in ("forward_s", "backward_s"))
    around = Transfer(0, 1, there, back, max((h.latency_s for h in hops), default=0.0))
    n = len(costs)
    found = [replace(hops[a % n] if a % n < n - 1 else around, source=a, target=a + 1) for a in range(n * v - 1)]
    return parts, found


@pytest.mark.parametrize(
    ("name", "spread", "least", "most"),
    [
        ("gpipe", 0.1, 0.95, 1),
        ("gpipe", 3.0, 0.7, 1),
        ("forward", 0.1, 0.9, 1),
        ("forward", 3.0, 0.6, 1),
        ("1f1b", 0.1, 0.9, 1),
        ("1f1b", 3.0, 0.7, 1),
        ("eager_1f1b", 0.1, 0.9, 1),
        ("interleaved", 0.1, 0.8, 1),
        ("zero_bubble", 0.1, 0.8, 1),
    ],
)
def test_closed_forms_are_near_the_simulator_on_uneven_stages_with_transfers_and_updates(name, spread, least, most):
    rng = np.random.default_rng(7)
    for _ in range(60):
        devices, microbatches = int(rng.integers(1, 7)), int(rng.integers(1, 13))
        v = int(rng.integers(2, 4)) if name == "interleaved" else 1
        costs, hops = shares(rng, devices, spread)
        parts, transfers = chunked(costs, hops, v)
        found = simulate(build(name, devices, microbatches, v), parts, transfers).makespan_s
        assert least <= found / Formula(name, microbatches, v).seconds(costs, hops) <= most + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_are_exact_on_equal_stages(name):
    for devices in range(1, 7):
        for microbatches in range(1, 14):
            v = 3 if name == "interleaved" else 1
            if microbatches % devices and v > 1:
                continue
            cost = StageCost(1.0, 2.5, 1.5, 1.0)
            hops = [Transfer(a, a + 1) for a in range(devices - 1)]
            found = simulate(build(name, devices, microbatches, v), *chunked([cost] * devices, hops, v)).makespan_s
            if name == "zero_bubble":
                cost = replace(cost, backward_s=0.0)  # it takes the two parts
            assert found == pytest.approx(Formula(name, microbatches, v).seconds([cost] * devices))


@pytest.mark.parametrize("name", ["gpipe", "forward"])
def test_closed_forms_without_transfers_are_exact_on_any_stages_where_forwards_and_backwards_do_not_mix(name):
    rng = np.random.default_rng(3)
    for _ in range(50):
        costs, _ = shares(rng, int(rng.integers(1, 7)), 9.0)
        costs = [replace(cost, update_s=0.0) for cost in costs]
        microbatches = int(rng.integers(1, 13))
        found = simulate(build(name, len(costs), microbatches), costs).makespan_s
        assert found == pytest.approx(Formula(name, microbatches).seconds(costs))


@pytest.mark.parametrize("name", ["1f1b", "eager_1f1b"])
def test_alternating_orders_never_take_longer_than_the_closed_form_where_backward_is_a_multiple_of_forward(name):
    rng = np.random.default_rng(4)
    for _ in range(150):
        devices, microbatches, ratio = int(rng.integers(1, 7)), int(rng.integers(1, 13)), float(rng.integers(0, 4))
        costs = [StageCost(f, ratio * f) for f in (float(x) for x in rng.integers(0, 9, devices))]
        found = simulate(build(name, devices, microbatches), costs).makespan_s
        assert found <= Formula(name, microbatches).seconds(costs)


@given(st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(2, 3), st.integers(0, 2**32 - 1)))
@settings(max_examples=120, deadline=None)
def test_no_durations_make_a_device_hold_more_than_the_formulas_bound(shape):
    name, devices, microbatches, chunks, seed = shape
    rng = np.random.default_rng(seed)
    v = chunks if name == "interleaved" else 1
    schedule = build(name, devices, microbatches, v)
    scale = float(rng.choice([0.1, 1.0, 30.0]))
    seconds = [[float(x) ** 3 for x in rng.random(4) * 3] for _ in range(devices)]
    costs = [StageCost(*row, residual_bytes=float(rng.integers(0, 9)) / v) for row in seconds] * v
    border = [float(x) for x in rng.integers(0, 6, devices - 1)]
    around = max(border, default=0.0)
    sizes = [(border[s % devices] if s % devices < devices - 1 else around) for s in range(devices * v - 1)]
    transfers = [Transfer(s, s + 1, *(scale * float(x) for x in rng.random(3)), *[b] * 4) for s, b in enumerate(sizes)]
    found = simulate(schedule, costs, transfers)
    for d in range(devices):
        enters = border[d - 1] if d else around if v > 1 else 0.0
        leaves = border[d] if d < devices - 1 else around if v > 1 else 0.0
        bound = Formula(name, microbatches, v).flight(devices - d, devices).nbytes(0.0, costs[d].residual_bytes * v, enters, leaves)
        assert found.peak_bytes(d) <= bound + 1e-9


@pytest.mark.parametrize(
    ("costs", "transfers", "what"),
    [
        ([StageCost(1.0)], [], "1 stage costs were given for 2 stages"),
        ([StageCost(1.0), StageCost(-1.0)], [], "forward_s"),
        ([StageCost(1.0), StageCost(float("nan"))], [], "forward_s"),
        ([StageCost(1.0)] * 2, [Transfer(1, 0)], "from stage 1 to stage 0, which the schedule does not know"),
        ([StageCost(1.0)] * 2, [Transfer(0, 1), Transfer(0, 1)], "two transfers"),
        ([StageCost(1.0)] * 2, [Transfer(0, 1, latency_s=float("inf"))], "latency_s"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs, transfers, what):
    with pytest.raises(ScheduleError, match=what):
        simulate(build("1f1b", 2, 2), costs, transfers)
