"""What each part of a model holds: bytes of one device by part, as the device's compiler counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.intraop.liverange import BACKENDS, Buffer, buffers
from autopar.runtime.held import backend_of
from benchmarks.fidelity.marked import Marked
from cost_models import Cluster


@dataclass(frozen=True, eq=False)
class Holding:
    """The bytes of a program."""

    program: Marked
    cluster: Cluster

    @cached_property
    def _buffers(self) -> tuple[Buffer, ...]:
        carried = self.program.traced.roles.carried if self.program.plan.data.options.get("donate", True) else ()
        return buffers(self.program.graph, self.program.rules, self.program.sharding, carried, self._backend, self.program.as_written)

    @property
    def _backend(self) -> str:
        return backend_of(self.cluster.device.name) or "gpu"

    @cached_property
    def state(self) -> Mapping[int, float]:
        """Bytes of inputs, where the first part is that reads them."""
        found: dict[int, float] = defaultdict(float)
        for v, sharding in zip(self.program.graph.inputs, self.program.sharding.inputs, strict=True):
            first = min(map(self.program.part, self.program.readers(v)), default=0)
            found[first] += sharding.local_bytes(self.program.graph.avals[v], self.program.sharding.mesh)
        return found

    @cached_property
    def parameters(self) -> Mapping[int, float]:
        """Elements of state that forward or backward reads, where the first part is that reads them."""
        found: dict[int, float] = defaultdict(float)
        graph, mesh = self.program.graph, self.program.sharding.mesh
        for i, _ in self.program.traced.roles.carried:
            readers, aval = self.program.readers(graph.inputs[i]), graph.avals[graph.inputs[i]]
            if any(graph.ops[k].phase != "update" for k in readers):
                share = self.program.sharding.inputs[i].local_bytes(aval, mesh) / max(1, aval.nbytes)
                found[min(map(self.program.part, readers))] += share * aval.size
        return found

    def _ends(self, b: Buffer) -> tuple[str, str]:
        """The phases in which a buffer is made and last read; what is before and after the loop is part of the update."""
        return self.program.phase(b.start), self.program.phase(b.stop)

    def _stays(self, b: Buffer) -> bool:
        """Whether a buffer holds a gradient until the end of the step."""
        return self._ends(b)[1] == "update" and (self._ends(b)[0] != "update" or self._spans_loop(b))

    def _spans_loop(self, b: Buffer) -> bool:
        return any(self.program.graph.times[i] > 1 for i in range(b.start, min(b.stop, len(self.program.graph.ops))))

    def _crosses(self, b: Buffer) -> bool:
        """Whether a buffer is kept from forward to backward."""
        return self._ends(b) == ("forward", "backward")

    @cached_property
    def sums(self) -> Mapping[int, float]:
        """Bytes of gradients, or their sums over microbatches."""
        found: dict[int, float] = defaultdict(float)
        for b in filter(self._stays, self._buffers):
            found[self.program.part(b.stop)] += b.nbytes
        return found

    def kept(self) -> Mapping[int, float]:
        """Bytes that a microbatch keeps from forward to backward, where backward reads them."""
        found: dict[int, float] = defaultdict(float)
        for b in filter(self._crosses, self._buffers):
            found[self.program.part(b.stop)] += b.nbytes
        return found

    def busy(self) -> Mapping[tuple[int, bool], float]:
        """The most bytes at an op of each part, in the microbatches and after them, of what neither stays nor is kept."""
        packing = BACKENDS[self._backend].packing
        live = _profile((b for b in self._buffers if not self._stays(b) and not self._crosses(b)), len(self.program.graph.ops))
        found: dict[tuple[int, bool], float] = {}
        for i, nbytes in enumerate(live):
            key = self.program.part(i), self.program.phase(i) == "update"
            found[key] = max(found.get(key, 0.0), packing * nbytes)
        return found


def _profile(found: Iterable[Buffer], ops: int) -> list[int]:
    """Bytes at each op."""
    change = [0] * (ops + 2)
    for b in found:
        change[b.start] += b.nbytes
        change[min(b.stop, ops) + 1] -= b.nbytes
    live, now = [], 0
    for each in change[:ops]:
        now += each
        live.append(now)
    return live
