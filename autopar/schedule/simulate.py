"""How long a schedule takes, when each task runs, and what each device holds, for given stages and transfers.

Devices run their orders as they stand, each task as soon as the device is free and what it needs has arrived. A link, the pair of the
sending and the receiving device, carries one transfer after the other in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.schedule.check import running
from autopar.schedule.costs import StageCost, Transfer, check_costs
from autopar.schedule.tasks import Schedule, Task


@dataclass(frozen=True, slots=True)
class Span:
    """A task in time, in seconds from the begin of the step."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Shipment:
    """A transfer in time: `sender`'s result reaches `receiver` at `end_s`, having kept the link busy until `end_s` less its latency."""

    sender: Task
    receiver: Task
    start_s: float
    end_s: float
    sent_bytes: float
    nbytes: float


@dataclass(frozen=True)
class Simulation:
    """A step in time. `spans[d]` and `memory[d]` are those of device d, in order; `memory` holds (seconds, bytes from then on)."""

    spans: tuple[tuple[Span, ...], ...]
    shipments: tuple[Shipment, ...]
    updates_s: tuple[float, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]

    @cached_property
    def makespan_s(self) -> float:
        """From the first task's begin to the end of the last device's update."""
        return max((row[-1].end_s if row else 0.0) + update for row, update in zip(self.spans, self.updates_s, strict=True))

    def busy_s(self, device: int) -> float:
        """Seconds in which a device works, its update counted."""
        return sum(span.end_s - span.start_s for span in self.spans[device]) + self.updates_s[device]

    def idle_s(self, device: int) -> float:
        """Seconds of the makespan in which a device waits."""
        return self.makespan_s - self.busy_s(device)

    @cached_property
    def bubble(self) -> float:
        """The share of all devices' time that is idle, in [0, 1)."""
        whole = self.makespan_s * len(self.spans)
        return sum(map(self.idle_s, range(len(self.spans)))) / whole if whole else 0.0

    def peak_bytes(self, device: int) -> float:
        """The most bytes that stand on a device at once."""
        return max(held for _, held in self.memory[device])

    @cached_property
    def order(self) -> tuple[Span, ...]:
        """All tasks by the time at which they begin: the order in which one thread had better start them."""
        rows = [(span.start_s, k, d) for d, row in enumerate(self.spans) for k, span in enumerate(row)]
        return tuple(self.spans[d][k] for _, k, d in sorted(rows))


def simulate(schedule: Schedule, costs: Sequence[StageCost], transfers: Sequence[Transfer] = ()) -> Simulation:
    """Runs a schedule on paper. `costs[s]` is stage s's; edges without a transfer cost nothing, as do those within one device.

    Raises `ScheduleError` for costs that do not fit the schedule, or one that deadlocks.
    """
    check_costs(costs, transfers, schedule.num_stages, schedule.edges)
    clock = _Clock(schedule, {(t.source, t.target): t for t in transfers})
    for device, task in running(schedule):
        clock.run(device, task, costs[task.stage].seconds(task))
    updates = [0.0] * schedule.num_devices
    for s, cost in enumerate(costs):
        updates[schedule.device_of[s]] += cost.update_s
    memory = tuple(_memory(schedule, costs, clock, d) for d in range(schedule.num_devices))
    return Simulation(tuple(map(tuple, clock.spans)), tuple(clock.shipments), tuple(updates), memory)


class _Clock:
    """When each device and each link is free, and when what was sent arrives."""

    def __init__(self, schedule: Schedule, transfers: dict[tuple[int, int], Transfer]):
        self.schedule, self.transfers = schedule, transfers
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.shipments: list[Shipment] = []
        self.arrived: dict[tuple[Task, Task], float] = {}
        self.ends: dict[Task, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self, device: int, task: Task, seconds: float) -> None:
        """A device's next task; all that it needs has run before."""
        row = self.spans[device]
        ready = (self.arrived.get((needed, task), self.ends[needed]) for needed in self.schedule.needs(task))
        start = max(ready, default=0.0)
        start = max(start, row[-1].end_s) if row else start
        row.append(Span(task, start, start + seconds))
        self.ends[task] = start + seconds
        if task.kind != "W":
            self._send(task)

    def _send(self, task: Task) -> None:
        s, m = task.stage, task.microbatch
        forward = task.kind == "F"
        for other in self.schedule.targets[s] if forward else self.schedule.sources[s]:
            transfer = self.transfers.get((s, other) if forward else (other, s))
            receiver = Task("F", other, m) if forward else self.schedule.backward(other, m)
            here, there = self.schedule.device_of[s], self.schedule.device_of[other]
            if transfer is None or receiver is None or here == there:
                continue
            seconds, sent, nbytes = _one_way(transfer, forward)
            start = max(self.ends[task], self.link_free.get((here, there), 0.0))
            self.link_free[here, there] = start + seconds
            self.arrived[task, receiver] = start + seconds + transfer.latency_s
            self.shipments.append(Shipment(task, receiver, start, self.arrived[task, receiver], sent, nbytes))


def _one_way(transfer: Transfer, forward: bool) -> tuple[float, float, float]:
    """Seconds on the link, bytes on the sender and bytes on the receiver."""
    if forward:
        return transfer.forward_s, transfer.forward_sent_bytes, transfer.forward_bytes
    return transfer.backward_s, transfer.backward_sent_bytes, transfer.backward_bytes


def _memory(schedule: Schedule, costs: Sequence[StageCost], clock: _Clock, device: int) -> tuple[tuple[float, float], ...]:
    """(seconds, bytes from then on) of one device. What begins when something else ends at the same time does not meet it."""
    changes: list[tuple[float, int, int, float]] = []  # seconds, position in the device's order, begin or end of that task, bytes
    for k, span in enumerate(clock.spans[device]):
        made, left = _kept(schedule, costs[span.task.stage], span.task)
        changes += [(span.start_s, k, 0, made), (span.end_s, k, 1, -left)]
    place = {span.task: (k, span) for k, span in enumerate(clock.spans[device])}
    for shipment in clock.shipments:
        if shipment.receiver in place:
            k, span = place[shipment.receiver]
            changes += [(shipment.start_s, -1, 0, shipment.nbytes), (span.end_s, k, 1, -shipment.nbytes)]
        if shipment.sender in place:
            k, span = place[shipment.sender]
            changes += [(span.start_s, k, 0, shipment.sent_bytes), (shipment.end_s, len(place), 1, -shipment.sent_bytes)]
    held = sum(cost.fixed_bytes for s, cost in enumerate(costs) if schedule.device_of[s] == device)
    timeline = [(0.0, held)]
    for time, _, _, change in sorted(changes):
        held += change
        if change:
            timeline.append((time, held))
    return tuple(timeline)


def _kept(schedule: Schedule, cost: StageCost, task: Task) -> tuple[float, float]:
    """Bytes that a task begins to hold, and those that are held no longer when it ends."""
    if task.kind == "F":
        kept = schedule.backward(task.stage, task.microbatch) is not None
        return cost.residual_bytes, 0.0 if kept else cost.residual_bytes
    if task.kind == "B":
        return 0.0, cost.residual_bytes
    if task.kind == "I":
        return cost.inner_bytes, cost.input_bytes
    return 0.0, cost.residual_bytes - cost.input_bytes + cost.inner_bytes
