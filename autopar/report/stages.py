"""The stages of a plan: what each holds, takes and sends, and its schedule in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.interop.timing import schedule_of, simulate_plan, step_seconds
from autopar.ir.plan import Plan, Stage
from autopar.report.timeline import Span
from autopar.report.units import bytes_text, seconds_text

COLUMNS = ("stage", "layers", "devices", "mesh", "forward", "backward", "update", "peak per device", "in flight", "sends")
WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
SENDING = "before and after the microbatches"


@dataclass(frozen=True)
class StageTimeline:
    """The predicted step of a plan in stages: `devices` names the groups of devices, whose tracks hold their tasks; the spans of `links`
    are what goes from one group to another. `seconds` is the whole step.
    """

    devices: tuple[str, ...]
    links: tuple[str, ...]
    spans: tuple[Span, ...]
    seconds: float


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row of text for each stage, under `COLUMNS`; forward and backward are those of one microbatch."""
    return [
        (
            str(n),
            range_text(*s.layers),
            range_text(s.devices[0], sum(s.devices)),
            str(s.sharding.mesh),
            seconds_text(s.forward_s),
            seconds_text(s.input_s + s.weight_s),
            seconds_text(s.before_s + s.after_s),
            bytes_text(s.peak_bytes),
            str(s.in_flight),
            "; ".join(sent_texts(s)) or "nothing",
        )
        for n, s in enumerate(plan.stages)
    ]


def sent_texts(stage: Stage) -> Iterator[str]:
    """What a stage gives others, in words."""
    words = {"before": "before the microbatches", "each": "a microbatch", "after": "after them"}
    for s in stage.sends:
        yield f"{bytes_text(s.nbytes)} to {s.target} {words[s.when]}"


def range_text(first: int, stop: int) -> str:
    """Numbers from the first to before the last.

    >>> range_text(0, 4), range_text(4, 5)
    ('0 to 3', '4')
    """
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def stages_text(stages: Sequence[int]) -> str:
    """Stages by number.

    >>> stages_text((2,)), stages_text((0, 1, 2)), stages_text((0, 2))
    ('2', '0 to 2', '0, 2')
    """
    if list(stages) == list(range(stages[0], stages[-1] + 1)):
        return range_text(stages[0], stages[-1] + 1)
    return ", ".join(map(str, stages))


def devices_text(plan: Plan, group: int) -> str:
    """A group of devices with its stages: `devices 0 to 3 (stage 0)`."""
    first, count = sorted({stage.devices for stage in plan.stages})[group]
    mine = [str(n) for n, s in enumerate(plan.stages) if s.devices == (first, count)]
    which = f"stage{'s' if len(mine) > 1 else ''} {', '.join(mine)}"
    return f"device{'s' if count > 1 else ''} {range_text(first, first + count)} ({which})"


def stage_timeline(plan: Plan) -> StageTimeline:
    """The schedule of a plan in stages as the simulator runs it, with what comes before and after the microbatches."""
    schedule = schedule_of(plan)
    simulation = simulate_plan(schedule, plan.stages)
    names = tuple(devices_text(plan, d) for d in range(schedule.num_devices))
    begin = max(s.before_s for s in plan.stages)
    spans = [
        Span("before", names[schedule.device_of[n]], begin - s.before_s, s.before_s, (("stage", n),)) for n, s in enumerate(plan.stages)
    ]
    for d, row in enumerate(simulation.spans):
        for span in row:
            task, seconds = span.task, span.end_s - span.start_s
            details = (("what", WORDS[task.kind]), ("stage", task.stage), ("microbatch", task.microbatch))
            spans.append(Span(str(task), names[d], begin + span.start_s, seconds, details))
        now = begin + (row[-1].end_s if row else 0.0)
        for n, s in enumerate(plan.stages):
            if schedule.device_of[n] == d:
                spans.append(Span("update", names[d], now, s.after_s, (("stage", n),)))
                now += s.after_s
    links = []
    for shipment in simulation.shipments:
        link = f"{names[schedule.device_of[shipment.sender.stage]]} to {schedule.device_of[shipment.receiver.stage]}"
        seconds = shipment.end_s - shipment.start_s
        links.append(Span(str(shipment.sender), link, begin + shipment.start_s, seconds, (("for", str(shipment.receiver)),)))
    total = step_seconds(simulation, plan.stages)
    rest = total - begin - simulation.makespan_s
    if rest > 0:
        links.append(Span(SENDING, SENDING, begin + simulation.makespan_s, rest))
    spans = [s for s in spans if s.seconds > 0]
    return StageTimeline(names, tuple(dict.fromkeys(s.track for s in links)), (*spans, *(s for s in links if s.seconds > 0)), total)
