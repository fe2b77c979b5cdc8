"""What the layers of a step cost on a submesh, each by itself: the oracle of the dynamic programme over stages.

Each layer is planned as if it were a stage, equal ones once, without a limit of memory. A stage of several takes their seconds, holds
what each holds, and works with as much as the one that needs most while it runs. What stages so found really take is planned afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from autopar.compiler.candidate import Candidate, Cut
from autopar.compiler.compilation import Compilation
from autopar.interop import Choice
from autopar.ir.mesh import LogicalMesh
from autopar.ir.problem import Floats
from autopar.schedule import Schedule, build

PLENTY = 2**60
"""Bytes of memory with which it decides nothing."""

WEIGHT_SHARE = 0.5
"""Share of backward that makes gradients of weights, where it has not been planned apart."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """The layers on one logical mesh, `label` being the caller's. Seconds are per microbatch but for `update`, bytes those of one device.

    `state` stands all the time, `kept` per microbatch in flight, `working` while one microbatch runs, and `updating` while weights are
    updated. Each has one entry per layer.
    What crosses between layers lies in so many `parts`, each of which goes to the next stage at `rate` seconds per byte after `latency`.
    """

    label: tuple[str, float]
    forward: Floats
    backward: Floats
    weight: Floats
    update: Floats
    state: Floats
    kept: Floats
    working: Floats
    updating: Floats
    rate: float
    latency: float
    parts: float

    def choice(self, start: int, stop: int) -> Choice:
        """Layers `start` to `stop - 1` as one stage."""
        r = slice(start, stop)
        fixed = self.state[r].sum() + self.working[r].max()
        forward, backward, weight, update, kept = (
            float(x[r].sum()) for x in (self.forward, self.backward, self.weight, self.update, self.kept)
        )
        return Choice(
            forward, backward, weight, update, float(fixed), kept, self.label, float(self.state[r].sum() + self.updating[r].sum())
        )


@lru_cache(maxsize=2)
def _schedule(name: str, count: int, microbatches: int) -> Schedule:
    return build(name, count, microbatches)


def layer_costs(
    c: Compilation, cut: Cut, submesh: Any, mesh: LogicalMesh, microbatches: int, flight: int, label: tuple[str, float], price: float
) -> LayerCosts:
    """The layers of a cut that has each as a stage. The label begins with what is made again; `flight` microbatches are in flight, and what
    they hold is worth `price` seconds per byte.

    Raises `SolverError` where a layer is not solved in time.
    """
    count = len(cut.ranges)
    options = replace(c.options, memory_bytes=PLENTY, remat=label[0])
    schedule = _schedule("forward" if c.options.schedule == "forward" else "1f1b", count, microbatches)
    alone = Candidate(replace(c, options=options), cut, submesh, mesh, schedule, prices=((price,),) * count, flight=flight)
    rows = []
    for n, stage in enumerate(alone.stages):
        standing = alone.standing(n)
        running, updating = alone.solved[n].chosen.peaks
        working = max(0, running - standing - stage.in_flight * stage.residual_bytes)
        seconds = (stage.forward_s, stage.input_s + stage.weight_s, WEIGHT_SHARE * stage.input_s, stage.before_s + stage.after_s)
        rows.append((*seconds, standing, stage.residual_bytes, working, max(0, updating - standing)))
    forward, backward, weight, update, state, kept, working, updating = np.array(rows, np.float64).T
    return LayerCosts(label, forward, backward, weight, update, state, kept, working, updating, alone.rate, alone.latency, alone.parts)
