"""What each part of a model takes: seconds by part and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.costs import Charges, Pricer, fusion_charges
from autopar.intraop.clusters import is_elementwise
from autopar.intraop.connect import fed_by_state
from autopar.intraop.price import op_seconds
from autopar.rules.inside import numbered
from benchmarks.fidelity.kernels import Kernels, is_core, of_norms
from benchmarks.fidelity.marked import Marked
from cost_models import Cluster


@dataclass(frozen=True)
class Work:
    """Seconds of compute, and of communication that it waits for."""

    compute_s: float = 0.0
    waited_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.compute_s + other.compute_s, self.waited_s + other.waited_s)

    def seconds(self, efficiency: float) -> float:
        """Seconds when compute runs at `efficiency` times what the device's figures say."""
        return self.compute_s / efficiency + self.waited_s


@dataclass(frozen=True, eq=False)
class Timing:
    """The seconds of a program, with `kernels` of another make than XLA's if any."""

    program: Marked
    cluster: Cluster
    kernels: Kernels | None

    @cached_property
    def charges(self) -> Charges:
        return fusion_charges(self.program.graph, [is_elementwise(r) for r in self.program.rules])

    @cached_property
    def pricer(self) -> Pricer:
        return Pricer(self.cluster, self.program.sharding.mesh, self.program.as_written)

    def work(self) -> Mapping[tuple[int, str], Work]:
        """Seconds by part and phase, of one microbatch or of the end of a step."""
        found: dict[tuple[int, str], Work] = defaultdict(Work)
        for i, seconds, of_state in (*self._computed(), *self._moved()):
            part, phase, times = self.program.part(i), self.program.phase(i), self.program.graph.times[i]
            each = Work(seconds.compute_s / times, seconds.waited_s / times)
            found[part, phase] += each
            if phase == "forward" and not of_state and part not in (0, self.program.count - 1):
                scope = self.program.graph.ops[i].scope
                found[part, "layers"] += each
                found[part, "needed"] += Work() if scope.endswith("mlp/down") else each
                found[part, "cores"] += each if is_core(scope) else Work()
        return found

    def _computed(self) -> Iterator[tuple[int, Work, bool]]:
        """Seconds of ops and their launches, the collectives inside of them apart; and whether they are of state."""
        own = numbered(self.program.graph, self.program.rules, self.program.sharding, self.program.as_written)
        for i in range(len(self.program.graph.ops)):
            seconds = op_seconds(self.program.graph, self.program.rules, self.program.sharding, self.pricer, self.charges, i)
            inside = self.program.graph.times[i] * sum(self.pricer.within(c.inside) for c in own.get(i, ()))
            launch = self.cluster.launch_seconds * self.program.graph.times[i] if i in self.charges.heads else 0.0
            if self.kernels and self.kernels.holds(i):
                seconds, launch = self.kernels.seconds(i, seconds), 0.0
            yield i, Work(seconds - inside + launch, inside), False

    def _moved(self) -> Iterator[tuple[int, Work, bool]]:
        """Seconds of conversions, at the op that makes their value, or that reads it first where it comes from outside."""
        state = fed_by_state(self.program.graph, self.program.traced.roles.carried) | set(self.program.graph.inputs)
        for m in self.program.sharding.moves:
            if m.value in self.program.graph.free or (self.kernels and not self.kernels.sequence and of_norms(self.program.graph, m)):
                continue
            cost = self.pricer.move(m.move, m.source, self.program.graph.avals[m.value])
            at = self.program.graph.producer.get(m.value, min(self.program.readers(m.value), default=0))
            seconds = self.program.graph.times[at] * cost
            yield at, Work(0.0, seconds) if m.move.communicates else Work(seconds), m.value in state
