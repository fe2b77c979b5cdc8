"""A plan in stages in time: its schedule, and how long its step takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.plan import Plan, Stage
from autopar.schedule import Schedule, Simulation, StageCost, Transfer, build, simulate


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan in stages, with what it skips."""
    devices = len({stage.devices for stage in plan.stages})
    schedule = build(plan.schedule, devices, plan.microbatches, len(plan.stages) // devices)
    return skipping(schedule, [(n, s.target) for n, stage in enumerate(plan.stages) for s in stage.sends if s.when == "each"])


def skipping(schedule: Schedule, crossing: Iterable[tuple[int, int]]) -> Schedule:
    """A schedule with the skips that values need which go from stage to stage in each microbatch, one way or the other."""
    pairs = {(min(pair), max(pair)) for pair in crossing}
    return replace(schedule, skips=tuple(sorted((a, b) for a, b in pairs if b > a + 1)))


def simulate_plan(schedule: Schedule, stages: Sequence[Stage]) -> Simulation:
    """The microbatches of a plan in time."""
    cost = [
        StageCost(s.forward_s, s.input_s + s.weight_s, s.input_s, s.weight_s, s.after_s, s.residual_bytes, fixed_bytes=s.peak_bytes)
        for s in stages
    ]
    there = {(n, s.target): s.seconds for n, stage in enumerate(stages) for s in stage.sends if s.when == "each"}
    edges = [(a, b) for a, b in schedule.edges if (a, b) in there or (b, a) in there]
    hops = [Transfer(a, b, there.get((a, b), 0.0), there.get((b, a), 0.0)) for a, b in edges]
    return simulate(schedule, cost, hops)


def step_seconds(simulation: Simulation, stages: Sequence[Stage]) -> float:
    """The whole step: what comes before the microbatches, they, what comes after, and what crosses before and after."""
    crossing = sum(s.seconds for stage in stages for s in stage.sends if s.when != "each")
    return max((s.before_s for s in stages), default=0.0) + simulation.makespan_s + crossing
