"""Schedules against the definition of what may run when, and against figures that were published or measured for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Schedule, Task, build, check
from autopar.schedule.formulas import NAMES, Formula

shapes = st.tuples(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 15), st.integers(1, 4))


def built(shape: tuple[str, int, int, int]) -> Schedule:
    name, devices, microbatches, chunks = shape
    return build(name, devices, microbatches, chunks if name == "interleaved" else 1)


def play(schedule: Schedule) -> None:
    """Runs the orders with devices that block: whatever a task reads must stand on its device, and nothing may be left at the end."""
    stands: list[set] = [set() for _ in schedule.orders]
    place = [0] * schedule.num_devices
    while any(p < len(order) for p, order in zip(place, schedule.orders, strict=True)):
        before = list(place)
        for d, order in enumerate(schedule.orders):
            if place[d] == len(order) or not stands[d].issuperset(schedule.reads(order[place[d]])):
                continue
            task = order[place[d]]
            stands[d].update(schedule.makes(task))
            for buffer in schedule.makes(task):
                others = {"activation": schedule.targets, "cotangent": schedule.sources}.get(buffer.what)
                for stage in others[task.stage] if others else ():
                    stands[schedule.device_of[stage]].add(buffer)
            stands[d].difference_update(schedule.frees[d][place[d]])
            place[d] += 1
        assert place != before, "no device can go on"
    assert not any(stands)


@given(shapes)
@settings(max_examples=150, deadline=None)
def test_every_order_runs_with_what_is_there_and_frees_all_of_it(shape):
    play(built(shape))


@given(shapes, st.data())
@settings(max_examples=60, deadline=None)
def test_skips_between_stages_that_are_no_neighbours_run_under_every_order(shape, data):
    schedule = built(shape)
    pairs = [(a, b) for a in range(schedule.num_stages) for b in range(a + 2, schedule.num_stages)]
    skips = data.draw(st.lists(st.sampled_from(pairs), unique=True, max_size=4)) if pairs else []
    play(check(replace(schedule, skips=tuple(skips))))


@given(shapes)
@settings(max_examples=100, deadline=None)
def test_gradients_are_summed_in_the_order_of_microbatches_under_every_schedule(shape):
    schedule = built(shape)
    for kind in "FBIW":
        for s in range(schedule.num_stages):
            order = schedule.orders[schedule.device_of[s]]
            microbatches = [task.microbatch for task in order if (task.kind, task.stage) == (kind, s)]
            assert microbatches == sorted(microbatches)


@given(shapes)
@settings(max_examples=150, deadline=None)
def test_microbatches_in_flight_are_those_of_the_formulas(shape):
    name, devices, microbatches, chunks = shape
    schedule = built(shape)
    v = chunks if name == "interleaved" else 1
    for d in range(devices):
        expected = {
            "gpipe": microbatches,
            "1f1b": min(devices - d, microbatches),
            "eager_1f1b": min(2 * (devices - d) - 1, microbatches),
            "interleaved": min(2 * (devices - 1 - d) + (v - 1) * devices + 1, v * microbatches),
            "zero_bubble": min(devices, microbatches),
            "forward": 0,
        }[name]
        found = schedule.in_flight(d)
        held = Formula(name, microbatches, v).flight(devices - d, devices).held
        if name == "forward":
            assert found == 0
        elif name == "interleaved" and microbatches % devices:
            assert found <= expected
        else:
            assert found == expected == pytest.approx(held * v)


@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("eager_1f1b", 1, [7, 5, 3, 1]),
        ("interleaved", 2, [11, 9, 7, 5]),
        ("interleaved", 4, [19, 17, 15, 13]),
        ("zero_bubble", 1, [4, 4, 4, 4]),
    ],
)
def test_four_devices_and_eight_microbatches_hold_what_is_known(name, chunks, expected):
    schedule = build(name, 4, 8, chunks)
    assert [schedule.in_flight(d) for d in range(4)] == expected


def test_1f1b_on_two_stages_is_what_the_paper_draws():
    text = [" ".join(map(str, order)) for order in build("1f1b", 2, 3).orders]
    assert text == ["F0@0 F1@0 B0@0 F2@0 B1@0 B2@0", "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"]


def test_zero_bubble_delays_weight_gradients_by_the_stage():
    text = [" ".join(map(str, order)) for order in build("zero_bubble", 2, 3).orders]
    assert text == ["F0@0 F1@0 I0@0 W0@0 F2@0 I1@0 W1@0 I2@0 W2@0", "F0@1 I0@1 F1@1 I1@1 W0@1 F2@1 I2@1 W1@1 W2@1"]


def tasks(text: str) -> tuple[Task, ...]:
    return tuple(Task(word[0], int(word[1:].split("@")[1]), int(word[1:].split("@")[0])) for word in text.split())


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("B0@0 F0@0", "F0@1 B0@1", "deadlocks: device 0 stands before B0@0, which needs F0@0, B0@1"),
        ("F0@0 B0@0", "B0@1 F0@1", "deadlocks: device 0 stands before B0@0, which needs B0@1; device 1 stands before B0@1"),
        ("F0@0 B0@0", "F0@1", "has F for stage 1 and microbatch 0; it needs F and B"),
        ("F0@0 B0@0", "F0@1 I0@1", "has F, I for stage 1"),
        ("F0@0 B0@0", "F0@1 B0@1 W0@1", "has B, F, W for stage 1"),
        ("F0@0 I0@0 W0@0", "F0@1 W0@1 I0@1", "device 1 stands before W0@1, which needs I0@1"),
        ("F0@0 B0@0 F0@0", "F0@1 B0@1", "F0@0 2 times"),
        ("F0@0 B0@0 F0@1", "B0@1", "runs F0@1 on device 0; its stage is on device 1"),
        ("F0@0 B0@0 F1@0", "F0@1 B0@1", "F1@0 on device 0, which is none of its stages and microbatches"),
        ("B0@0", "F0@1 B0@1", "has B for stage 0"),
        ("F0@0", "", "has nothing for stage 1"),
    ],
)
def test_an_order_that_cannot_run_is_refused_with_its_first_fault(first, second, what):
    with pytest.raises(ScheduleError, match=what.replace("(", r"\(")):
        check(Schedule("mine", 1, (0, 1), (tasks(first), tasks(second))))


def test_an_order_that_splits_backward_on_one_stage_alone_runs():
    orders = (tasks("F0@0 F1@0 B0@0 B1@0"), tasks("F0@1 I0@1 F1@1 I1@1 W0@1 W1@1"))
    play(check(Schedule("mine", 2, (0, 1), orders)))


@pytest.mark.parametrize("skip", [(0, 1), (1, 0), (0, 0), (2, 0), (0, 3), (-1, 1)])
def test_a_skip_that_is_none_is_refused(skip):
    with pytest.raises(ScheduleError, match="skips go forward"):
        check(replace(build("1f1b", 3, 2), skips=(skip,)))


@pytest.mark.parametrize(("device_of", "what"), [((0, 2), "puts stage 1 on device 2"), ((), "stages to be a positive")])
def test_a_stage_without_a_device_is_refused(device_of, what):
    with pytest.raises(ScheduleError, match=what):
        check(replace(build("1f1b", 2, 2), device_of=device_of))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("devices", "microbatches", "what"), [(0, 1, "stages|devices"), (2, 0, "microbatches"), (2, 1.5, "microbatches")])
def test_counts_that_make_no_sense_are_refused(name, devices, microbatches, what):
    with pytest.raises(ScheduleError, match=what):
        build(name, devices, microbatches)


def test_names_and_chunks_that_do_not_exist_are_refused():
    with pytest.raises(ScheduleError, match="no schedule '1f2b'; use gpipe, 1f1b"):
        build("1f2b", 2, 2)
    with pytest.raises(ScheduleError, match="one chunk per device, not 2"):
        build("1f1b", 2, 2, 2)
    with pytest.raises(ScheduleError, match="no schedule"):
        Formula("1f2b", 2)
    with pytest.raises(ScheduleError, match="one chunk per device"):
        Formula("gpipe", 2, 2)
