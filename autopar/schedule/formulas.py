"""Closed forms: what a schedule takes and what it holds, for equal and for uneven stages, without running it.

All schedules take `sum of latencies + sum over peaks of weight * the largest value on any stage or hop`. The sum is what the first
microbatch needs from end to end, the peaks are what the slowest place adds for each further one. Narayanan et al. 2021 for 1F1B
and interleaving, Qi et al. 2023 for ZB-H1, Zheng et al. 2022 for the form with uneven stages. `simulate` is the measure:

- on equal stages without transfers all forms are exact;
- GPipe and forward alone are exact on uneven stages too; 1F1B's and its eager kin's are upper bounds where backward takes the same multiple
  of forward on all stages, which a slow first stage can make loose, and else estimates;
- so are those of interleaving and ZB-H1 on uneven stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar.errors import ScheduleError
from autopar.schedule.check import check_counts
from autopar.schedule.costs import StageCost, Transfer

NAMES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble", "forward")

Array = Any
"""Numbers or numpy arrays of one shape."""


class StageSeconds(NamedTuple):
    """Of a device's share of the model per microbatch; `weight` is the weight gradients' part of `backward`, `update` once per step."""

    forward: Array
    backward: Array
    weight: Array
    update: Array


class HopSeconds(NamedTuple):
    """Of what crosses from one stage to the next, per microbatch: the link's time each way, and the latency of one way."""

    forward: Array
    backward: Array
    latency: Array

    @property
    def both(self) -> Array:
        """There and back."""
        return self.forward + self.backward + 2 * self.latency


class Peak(NamedTuple):
    """A term `weight * max` over all stages' and hops' values."""

    weight: float
    stage: Array
    hop: Array


class Flight(NamedTuple):
    """The most microbatches of a stage at once, in units of a device's share.

    `held` counts those between forward and the end of backward. `entering` counts them and what crosses the border to the stage before,
    either way, while it stands on this stage's device; `leaving` what crosses the border to the next stage. Bounds for any durations.
    """

    held: float
    entering: float
    leaving: float

    def nbytes(self, fixed: Array, residual: Array, enters: Array, leaves: Array) -> Array:
        """A bound on a stage's bytes: `fixed`, `residual` per microbatch held, and what crosses its two borders per microbatch."""
        return fixed + self.entering * enters + self.held * np.maximum(residual - enters, 0) + self.leaving * leaves


@dataclass(frozen=True)
class Formula:
    """A schedule's closed forms for a number of microbatches, and of chunks per device where it is `interleaved`.

    A *share* is all that a device runs; with chunks it is cut in as many parts that are taken to be equal.
    """

    name: str
    microbatches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ScheduleError(f"there is no schedule {self.name!r}; use {', '.join(NAMES)}.")
        check_counts(self.name, microbatches=self.microbatches, chunks=self.chunks)
        if self.chunks != 1 and self.name != "interleaved":
            raise ScheduleError(f"schedule {self.name!r} has one chunk per device, not {self.chunks}; use 'interleaved'.")

    def latency(self, stage: StageSeconds) -> Array:
        """What a share adds to the sum."""
        f, b, w, _ = stage
        if self.name == "forward":
            return f
        if self.name == "zero_bubble":
            return np.maximum(f + b - 2 * w, 0)
        return (f + b) / self.chunks

    def hop_latency(self, hop: HopSeconds) -> Array:
        """What a hop adds to the sum."""
        return hop.forward + hop.latency if self.name == "forward" else self.chunks * hop.both

    def peaks(self, stage: StageSeconds, hop: HopSeconds, stages: int) -> tuple[Peak, ...]:
        """The terms that the slowest of so many stages or their hops decides; those with weight 0 are left out."""
        f, b, w, update = stage
        more = self.microbatches - 1
        found = {
            "gpipe": (Peak(more, f, hop.forward), Peak(more, b, hop.backward)),
            "forward": (Peak(more, f, hop.forward),),
            "1f1b": (Peak(more, f + b, 0 * hop.forward), Peak(more, 0 * f, hop.both)),
            "eager_1f1b": (Peak(more, f + b, np.maximum(hop.forward, hop.backward)),),
            "interleaved": self._interleaved(f + b, hop, stages),
            "zero_bubble": self._zero_bubble(f + b, w, hop, stages),
        }[self.name]
        return tuple(peak for peak in (*found, Peak(1, update, 0 * hop.forward)) if peak.weight > 0)

    def _interleaved(self, share: Array, hop: HopSeconds, stages: int) -> tuple[Peak, ...]:
        """The last device's result goes back to the first after each chunk but the last, over a hop like the dearest one.

        A last round that is not full takes as long as a full one, but for the microbatches that its last chunk lacks.
        """
        busy = self.chunks * np.maximum(hop.forward, hop.backward)
        lacking = -self.microbatches % stages
        more = self.microbatches + lacking - (1 + lacking) / self.chunks
        return Peak(more, share, busy), Peak(self.chunks - 1, 0 * share, hop.both)

    def _zero_bubble(self, share: Array, weight: Array, hop: HopSeconds, stages: int) -> tuple[Peak, ...]:
        """With fewer microbatches than stages there are not enough gradients of weights to fill the bubble."""
        missing = max(0, stages - self.microbatches)
        slowest = Peak(1, (self.microbatches - 1) * share + (2 + missing) * weight, 0 * hop.forward)
        return slowest, Peak(self.microbatches - 1, 0 * share, hop.both)

    @property
    def counts_all(self) -> bool:
        """Whether what a stage holds depends on how many stages there are, not only on how many follow."""
        return self.name in ("zero_bubble", "interleaved")

    def flight(self, position: int, stages: int) -> Flight:
        """What is in flight on the stage at `position`, the last one being 1, of so many `stages`. Grows with both."""
        m, v, held = self.microbatches, self.chunks, self._held
        if self.name == "forward":
            return Flight(1, m + 1, m)
        if self.name == "interleaved":
            return Flight(held(position, stages), v * held(stages, stages) + 1, v * held(position, stages))
        if self.name == "zero_bubble":
            return Flight(min(stages, m), min(stages, m) + min(position + 1, m) + 1, min(position, m))
        return Flight(held(position, stages), held(position + 1, stages) + 1, held(position, stages))

    def _held(self, position: int, stages: int) -> float:
        ahead = {
            "gpipe": float(self.microbatches),
            "1f1b": float(position),
            "eager_1f1b": 2.0 * position - 1,
            "interleaved": (2 * (position - 1) + (self.chunks - 1) * stages + 1) / self.chunks,
            "zero_bubble": float(stages),
        }[self.name]
        return min(ahead, float(self.microbatches))

    def seconds(self, stages: Sequence[StageCost], hops: Sequence[Transfer] = ()) -> float:
        """The makespan. `stages[s]` is device s's share, `hops[s]` leads from it to the next; without hops they cost nothing."""
        share = StageSeconds(*np.array([[s.forward_s, self._backward(s), s.weight_s, s.update_s] for s in stages], float).T)
        hop = HopSeconds(*np.array([[h.forward_s, h.backward_s, h.latency_s] for h in hops], float).reshape(-1, 3).T)
        total = np.sum(self.latency(share)) + np.sum(self.hop_latency(hop))
        for weight, stage, between in self.peaks(share, hop, len(stages)):
            total += weight * max(np.max(stage), np.max(between, initial=0.0))
        return float(total)

    def _backward(self, cost: StageCost) -> float:
        return cost.input_s + cost.weight_s if self.name == "zero_bubble" else cost.backward_s
