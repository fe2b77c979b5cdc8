"""A published measurement in words of ours: a model, a plan, a machine, and what was measured."""

from __future__ import annotations

from dataclasses import dataclass
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
class Layout:
    """Named parallelism, as `autopar.manual` takes it. `free` leaves the plan to the programme, on a mesh of `data x tensor`."""

    data: int = 1
    replica: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    zero: int = 0
    remat: str = "none"
    sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str = "auto"
    interleave: int = 1
    free: bool = False

    @property
    def devices(self) -> int:
        return self.data * self.replica * self.tensor * self.pipeline * self.expert * self.context


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
    parameters are narrow, beside a float32 copy (`mixed`).
    """

    fused: float = 0.0
    overlaps: bool = False
    hides_replicas: bool = True
    decomposes: bool = False
    gathers_each: bool = False
    master: bool = False


SOFTWARE = {
    "megatron-2020": Software(overlaps=True, master=True),
    "megatron": Software(overlaps=True, master=True),
    "megatron-core": Software(fused=0.35, overlaps=True, master=True),
    "alpa": Software(master=True),
    "deepspeed": Software(master=True),
    "llm-foundry": Software(fused=0.36, overlaps=True, gathers_each=True),
    "maxtext": Software(overlaps=True, hides_replicas=False, decomposes=True),
    "maxtext-gpu": Software(fused=0.35, overlaps=True),
    "torchtitan": Software(fused=0.35, overlaps=True, gathers_each=True),
    "torchtitan compiled": Software(fused=0.35, overlaps=True, gathers_each=True),
    "torch": Software(overlaps=True, gathers_each=True),
}
"""By name. Megatron's data parallelism is torch's, which sums gradients while backward runs (Li et al. 2020); Alpa's compiler of 2022 ran
nothing at once. TPU compilers decompose the collectives of tensor parallelism (Wang et al. 2023, ASPLOS); sums between slices stood at the
end of a step. FlashAttention reached 25 to 40 % of the peak on A100 (Dao 2023, FlashAttention-2, abstract), more at long sequences; its
successor 35 % on H100 (Shah et al. 2024, FlashAttention-3, abstract)."""
