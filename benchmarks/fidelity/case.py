"""A published measurement in words of ours: a model, a plan, a machine, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


class Unmapped(ValueError):
    """A row that is not priced; the message says why."""


@dataclass(frozen=True)
class Model:
    """A model of the zoo: the name of a size of its family, and what differs from it. `layers` is 0 where depth is no plain number."""

    name: str
    layers: int
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Share:
    """A pipeline stage: so many layers, or blocks, on `data x tensor` devices. `sequence`: what crosses between stages is cut over `tensor`
    already. `free` leaves the sharding to the programme."""

    layers: int
    data: int = 1
    tensor: int = 1
    sequence: bool = False
    free: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @property
    def submesh(self) -> Share:
        """The same for any number of layers."""
        return replace(self, layers=0)


@dataclass(frozen=True)
class Layout:
    """Named parallelism, as `autopar.manual` takes it. `free` leaves the plan to the programme, on a mesh of `data x tensor`, under the
    machine's memory if it is `bound` by that.

    `shares` are the stages of a pipeline, `interleave` of them on each submesh; `data` and `tensor` say nothing then. Of `counts` of
    microbatches the fastest that fits was published, `microbatches` says nothing then.
    """

    data: int = 1
    replica: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1
    zero: int = 0
    remat: str = "none"
    sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str = "auto"
    interleave: int = 1
    free: bool = False
    bound: bool = True
    shares: tuple[Share, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        if self.shares:
            return sum(share.devices for share in self.shares) // self.interleave
        return self.data * self.replica * self.tensor * self.expert * self.context


@dataclass(frozen=True)
class Case:
    """One row. Seconds and bytes as published, None where they are not; `fits` is whether it ran, None where that is not said.

    `software` names what ran it, `machine` its hardware in the publisher's words; `group` is what rows share that differ in their plan
    only. `layer`: the seconds are those of one layer, forward and backward.
    """

    file: str
    table: str
    row: int
    usable: str
    software: str
    machine: str
    devices: int
    per_node: int
    model: Model
    layout: Layout
    batch: int
    dtype: str
    step_s: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    group: str = ""
    layer: bool = False


@dataclass(frozen=True)
class Skipped:
    """A row that is not priced, and why."""

    file: str
    table: str
    row: int
    usable: str
    reason: str


@dataclass(frozen=True)
class Software:
    """What a program that ran a row does, as far as prices depend on it.

    `fused`: attention in one kernel, which reaches so much of the peak; 0 where it is written out. `overlaps`: communication that no layer
    waits for runs beside compute, that of `replica` axes too if `hides_replicas`; `decomposes`: what layers wait for is sent in steps
    beside their matmuls. `gathers_each`: parameters in parts are gathered, and gradients scattered, for each microbatch. `master`:
    parameters are narrow, beside a float32 copy (`mixed`). `reruns`: what of a GPT's forward runs again (`parts.Part`) under each kind of
    `remat`; where that is not said, what the plan makes again. `kernels`: scale, mask and softmax are one kernel, bias and activation
    another, dropout a third, and norms are whole on each device of tensor parallelism. `update_bytes`: of each parameter, what the end of
    a step moves beyond one pass over it, its gradient and its state. `waits_sends`: a pipeline stage does nothing while it sends.
    """

    fused: float = 0.0
    overlaps: bool = False
    hides_replicas: bool = True
    decomposes: bool = False
    gathers_each: bool = False
    master: bool = False
    reruns: tuple[tuple[str, str], ...] = ()
    kernels: bool = False
    update_bytes: float = 0.0
    waits_sends: bool = True

    def again(self, case: Case) -> str:
        """What runs again in a case as the software does it, `` where the plan says it."""
        return dict(self.reruns).get(case.layout.remat, "") if case.model.name.startswith("gpt") else ""


_TORCH = (("full", "layers"), ("dots", "cores"))

SOFTWARE = {
    "megatron-2020": Software(overlaps=True, master=True, reruns=_TORCH, kernels=True, update_bytes=32),
    "megatron": Software(overlaps=True, master=True, reruns=_TORCH, kernels=True, update_bytes=32),
    "megatron-core": Software(fused=0.35, overlaps=True, master=True, reruns=_TORCH),
    "alpa": Software(master=True, reruns=(("full", "needed"),)),
    "deepspeed": Software(master=True),
    "llm-foundry": Software(fused=0.36, overlaps=True, gathers_each=True, reruns=_TORCH[:1]),
    "maxtext": Software(overlaps=True, hides_replicas=False, decomposes=True),
    "maxtext-gpu": Software(fused=0.35, overlaps=True),
    "torchtitan": Software(fused=0.35, overlaps=True, gathers_each=True),
    "torchtitan compiled": Software(fused=0.35, overlaps=True, gathers_each=True),
    "torch": Software(overlaps=True, gathers_each=True),
}
"""By name. Megatron's data parallelism is torch's, which sums gradients while backward runs (Li et al. 2020), but not between pipeline
stages; Alpa's compiler of 2022 ran nothing at once. TPU compilers decompose the collectives of tensor parallelism (Wang et al. 2023,
ASPLOS); sums between slices stood at the end of a step. FlashAttention reached 25 to 40 % of the peak on A100 (Dao 2023,
FlashAttention-2, abstract), more at long sequences; its successor 35 % on H100 (Shah et al. 2024, FlashAttention-3, abstract).

Checkpoints of torch run a function's forward again from end to end (its documentation of `torch.utils.checkpoint`). Alpa's keep what enters
a layer and no more, and XLA leaves out what backward does not read. Selective recomputation is that of attention's core (Korthikanti et
al. 2022, section 5). Megatron-LM fuses scale, mask and softmax, bias and GELU, and bias, dropout and sum (Narayanan et al. 2021, section
4.2); its norms are duplicated on all devices of tensor parallelism (Shoeybi et al. 2019, section 3). Its optimiser (`optimizer.py` of 2021)
copies gradients to float32 (6 bytes of each parameter), divides them by the loss scale (8), takes their norm (4), clips them (8), runs
Adam (28) and copies parameters back (6): 60 bytes, where one pass moves 28. Its sends between stages are waited for
(`p2p_communication.py` of 2021), as are those of Alpa before its overlapping runtime (Zhuang et al. 2023)."""
