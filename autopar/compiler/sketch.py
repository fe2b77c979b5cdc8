"""Sketches of plans in pipeline stages: what the dynamic programme finds from what layers cost, before any stage is planned as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from autopar.compiler.candidate import Candidate, Cut
from autopar.compiler.compilation import Compilation, budget_of
from autopar.compiler.layer_costs import LayerCosts, layer_costs
from autopar.errors import InfeasibleError, SolverError
from autopar.interop import Chain, Choice, Grid, Layers, Link, StagePlan, Submesh, plan_stages
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.program import Layered, in_layers
from autopar.schedule import build
from autopar.schedule.formulas import Formula
from autopar.trace.trace import Traced

SPARING = 0.3
"""What all the memory of a device is worth where it is short, in the time of a step."""

DEAR = 10 * SPARING
"""The same where it is very short."""

LEAST_SHARE = 0.5
"""Share of the memory below which no stages are sought."""

MORE = (1.15, 1.4, 2.0, 4.0)
"""Shares of the memory with which stages are sought where none fit: layers by themselves may keep more than they do in a stage."""

FEW_OPS = 2_000
"""Ops of a stage up to which its memory is stated rather than priced, and it is asked what exactly to make again: it takes long."""

AGAIN = ("none", "dots", "full")
"""What stages may make again where they do not fit without, if the user leaves that open."""


@dataclass(frozen=True, eq=False)
class Division:
    """A step as so many microbatches, its ops marked with their layers; and the ways in which it has been cut into stages."""

    layered: Layered
    microbatches: int
    cuts: dict[Any, Cut] = field(default_factory=dict)

    @staticmethod
    def of(c: Compilation, step: Traced, layers: Layers, microbatches: int) -> Division:
        """Raises `MicrobatchError` where the step cannot run so."""
        return Division(in_layers(step, layers, microbatches, c.options.batch_argnums, c.options.accumulate_dtype), microbatches)

    def cut(self, ranges: Sequence[tuple[int, int]], schedule: str) -> Cut:
        """The step in stages that hold these layers each."""
        key = tuple(ranges), schedule == "zero_bubble"
        if key not in self.cuts:
            self.cuts[key] = Cut.of(self.layered, ranges, schedule)
        return self.cuts[key]

    @cached_property
    def alone(self) -> Cut:
        """Every layer a stage."""
        return self.cut([(n, n + 1) for n in range(len(self.layered.layers.costs))], "1f1b")


@dataclass(frozen=True, eq=False)
class Sketch:
    """Stages on a logical mesh each, under a schedule; each makes again what its choice's label says. `seconds` are an estimate.

    It was sought with a `share` of the memory that there is.
    """

    table: Table
    formula: Formula
    stages: StagePlan
    share: float

    @property
    def seconds(self) -> float:
        return self.stages.seconds

    def __str__(self) -> str:
        f = self.formula
        return f"{self.table.count} stages of {self.table.mesh}, {f.microbatches} microbatches, {f.name}"

    def candidate(self, remat: str | None = None, least: bool = False) -> Candidate:
        """The stages planned, each as a whole. Raises `InfeasibleError` where one does not fit after all, which says what would if `least`,
        and `SolverError` for want of time."""
        t, f = self.table, self.formula
        labels = [stage.choice.label for stage in self.stages.stages] * f.chunks
        stated = remat is not None or self.num_ops <= FEW_OPS
        prices = [(None,) if stated else t.prices(worth) for _, worth in labels]
        schedule = build(f.name, t.count, f.microbatches, f.chunks)
        found = Candidate(replace(t.c, least=least), self._cut, t.submesh, t.mesh, schedule, [remat or mode for mode, _ in labels], prices)
        found.check()
        return found

    @property
    def num_ops(self) -> int:
        """Ops of the largest stage."""
        return max(len(stage.graph.ops) for stage in self._cut.staged.stages)

    @property
    def _cut(self) -> Cut:
        return self.table.division.cut(self.stages.pieces, self.formula.name)

    @property
    def makes_again(self) -> bool:
        """Whether stages make values again for want of memory."""
        return self.table.c.options.remat == "auto" and any(stage.choice.label[0] != "none" for stage in self.stages.stages)

    @property
    def fullest(self) -> float:
        """Bytes on the fullest device."""
        return max(stage.nbytes for stage in self.stages.stages)

    def smaller(self, peak: float) -> Sketch | None:
        """A sketch with less memory, for one of whose stages one took `peak` bytes."""
        share = self.share * min(0.97, self.table.budget / peak if peak else 0.9)
        try:
            while share > LEAST_SHARE:
                found = self.table.sketch(self.formula, share)
                if found is not None and found.stages.stages != self.stages.stages:
                    return found
                share *= 0.95
        except (InfeasibleError, SolverError):
            pass
        return None


@dataclass(eq=False)
class Table:
    """What layers cost on one logical mesh of `submesh`, of which there are `count`, by what is made again."""

    c: Compilation
    division: Division
    count: int
    submesh: Any
    mesh: LogicalMesh
    known: dict[tuple[str, float], LayerCosts] = field(default_factory=dict)
    fastest: float = float("inf")
    """Seconds of the fastest stages that were found, whatever memory there is."""

    def sketch(self, formula: Formula, share: float = 1.0, below: float = float("inf")) -> Sketch | None:
        """The fastest stages under a schedule; None where none take less than `below` seconds, whatever memory there is. Raises
        `InfeasibleError` where none fit."""
        asked = self.c.options.remat
        first = "none" if asked == "auto" else asked
        self._ask(first)
        free = self._stages(formula, None, [(first, 0.0)])
        self.fastest = min(self.fastest, free.seconds)
        if free.seconds >= below:
            return None
        if max(stage.nbytes for stage in free.stages) <= share * self.budget:
            return Sketch(self, formula, free, share)
        modes = AGAIN if asked == "auto" else (asked,)
        self._ask(modes[-1], DEAR)
        self._stages(formula, share * self.budget, list(self.known))  # or nothing will do
        self._ask(first, SPARING)
        found = self._stages(formula, share * self.budget, list(self.known))
        if len(modes) > 1 and any(stage.choice.label[0] != first for stage in found.stages):  # to spare memory is not enough
            for mode in modes:
                self._ask(mode, SPARING)
            found = self._stages(formula, share * self.budget, list(self.known))
        return Sketch(self, formula, found, share)

    def beyond(self, formula: Formula) -> list[Sketch]:
        """Sketches that hold more than there is: with as little more as there must be, and the fastest of all."""
        found: list[Sketch] = []
        for share in MORE:
            try:
                found += filter(None, [self.sketch(formula, share)])
                break
            except (InfeasibleError, SolverError):
                continue
        try:
            return [*found, Sketch(self, formula, self._stages(formula, None, list(self.known)[:1]), 1.0)] if self.known else found
        except InfeasibleError:
            return found

    @property
    def budget(self) -> float:
        return budget_of(self.c)

    def _ask(self, remat: str, worth: float = 0.0) -> None:
        """The costs of layers that make so much again, where all memory is worth so many steps."""
        if (remat, worth) not in self.known:
            count = self.division.microbatches
            sparing = f", sparing memory by {worth:g}" if worth else ""
            self.c.progress(f"layers on {self.mesh}, {count} microbatches, {remat} made again{sparing}")
            price = worth * self._worth() if worth else 0.0
            self.known[remat, worth] = layer_costs(
                self.c, self.division.alone, self.submesh, self.mesh, count, self.count, (remat, worth), price
            )

    def _worth(self) -> float:
        """Seconds per byte at which all the memory of a device is worth what a stage's share of the layers takes in a step."""
        costs = next(iter(self.known.values()))
        seconds = ((costs.forward + costs.backward) * self.division.microbatches + costs.update).sum() / self.count
        return float(seconds) / self.budget

    def prices(self, worth: float) -> tuple[float, ...]:
        """The prices of memory at which a stage is planned whose layers have been at this one: the same, then dearer."""
        return tuple(w * self._worth() for w in (worth, *(w for w in (SPARING, DEAR, 10 * DEAR) if w > worth)))

    def _stages(self, formula: Formula, memory: float | None, ways: Sequence[tuple[str, float]]) -> StagePlan:
        any_mode = self.known[ways[0]]
        one = Submesh(1, self.mesh.num_devices)
        link = Link(any_mode.rate / any_mode.parts, any_mode.latency)
        grid = Grid(self.count, one.devices, (one,), lambda a, b: link, memory, lambda submesh: any_mode.parts)
        oracle = partial(self._oracle, [self.known[way] for way in ways])
        return plan_stages(self.chain, grid, oracle, [formula], max_stages=self.count)

    @property
    def chain(self) -> Chain:
        return self.division.layered.layers.chain

    @staticmethod
    def _oracle(ways: Sequence[LayerCosts], start: int, stop: int, submesh: Submesh, microbatches: int) -> list[Choice]:
        return [costs.choice(start, stop) for costs in ways]
