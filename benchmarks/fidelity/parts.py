"""What each part of a model costs: its embedding, a layer, its head; forward, backward and the end of a step apart.

One plan of a few layers on one submesh tells it. Its ops know their layers as those of a plan in stages do (`autopar.interop`), so what an
op, a collective or a buffer takes is counted where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean
from typing import Any

from autopar.api.plans import Plan
from benchmarks.fidelity.holding import Holding
from benchmarks.fidelity.kernels import Kernels
from benchmarks.fidelity.marked import marked
from benchmarks.fidelity.timing import Timing, Work
from cost_models import Cluster


@dataclass(frozen=True)
class Part:
    """One part of a model on one device: forward and backward of a microbatch, and the end of a step. Of forward, `layers` are what a
    checkpoint of whole layers runs again, `needed` the same without their last matmul, which backward does not read, and `cores` what a
    checkpoint of attention's core does.

    Bytes: of state and of gradients, which stay; `kept` from a microbatch's forward to its backward; `busy` beyond those while one runs,
    and `updating` at the end of the step. `gives_bytes` are those that a microbatch hands to the next part, whole. `parameters`: how many
    there are on the device.
    """

    forward: Work
    backward: Work
    update: Work
    layers: Work
    needed: Work
    cores: Work
    fixed_bytes: float
    kept_bytes: float
    busy_bytes: float
    updating_bytes: float
    gives_bytes: float
    parameters: float


def parts_of(plan: Plan, cluster: Cluster, begins: Sequence[str], kernels: bool = False, sequence: bool = False) -> tuple[Part, ...]:
    """The parts of a plan's program, which begin with the first op and with the first ops in the scopes that are called `begins`.

    `kernels`: what stands between two matmuls is priced as the kernels of Megatron-LM, norms and residuals whole on every device along
    `tensor` axes unless those cut the `sequence`.
    """
    program = marked(plan, begins)
    work = Timing(program, cluster, Kernels(program, cluster, sequence) if kernels else None).work()
    held = Holding(program, cluster)
    kept, busy = held.kept(), held.busy()
    return tuple(
        Part(
            *(work[n, what] for what in ("forward", "backward", "update", "layers", "needed", "cores")),
            fixed_bytes=held.state[n] + held.sums[n],
            kept_bytes=kept[n],
            busy_bytes=busy.get((n, False), 0.0),
            updating_bytes=busy.get((n, True), 0.0),
            gives_bytes=gives,
            parameters=held.parameters[n],
        )
        for n, gives in enumerate(program.gives)
    )


def average(parts: Sequence[Part]) -> Part:
    """One for several that are alike."""
    values: dict[str, Any] = {}
    for field in fields(Part):
        each = [getattr(part, field.name) for part in parts]
        if isinstance(each[0], Work):
            values[field.name] = Work(mean(w.compute_s for w in each), mean(w.waited_s for w in each))
        else:
            values[field.name] = mean(each)
    return Part(**values)


def timed(part: Part, other: Part) -> Part:
    """A part with the times of another."""
    return replace(part, **{name: getattr(other, name) for name in ("forward", "backward", "update", "layers", "needed", "cores")})


def step_compute_s(parts: Sequence[Part], microbatches: int) -> float:
    """Seconds of compute of a step that has all of these parts on one device."""
    return sum(microbatches * (part.forward + part.backward).compute_s + part.update.compute_s for part in parts)


def rerun(parts: Sequence[Part], what: str) -> Work:
    """What backward runs again of a microbatch's forward: `layers`, what is `needed` of them, `cores`, or nothing."""
    return sum((getattr(part, what) for part in parts), Work()) if what else Work()
