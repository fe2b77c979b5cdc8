"""What was decided, as data: strategies per op, conversions per value, and what they are predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import Axes, Move, TensorSharding
from autopar.ir.strategy import Strategy

STAGE_AXIS = "stage"
"""The axis of a plan's mesh along which its stages stand, and by which a user's mesh says so."""


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move applied to one value. Forms of a value are told apart by sharding and generation.

    Generation 0 is made at the first use; a later one is made again, after the op `gate` has its other operands (so that the
    compiler neither merges it with the first nor starts it early). `id` names collectives: `c0`, `c1`, ...; moves
    without communication have none.
    """

    value: int
    move: Move
    source: TensorSharding
    target: TensorSharding
    id: str = ""
    generation: int = 0
    source_generation: int = 0
    gate: int = -1


@dataclass(frozen=True)
class ShardingPlan:
    """A strategy for each op, the shardings at the border, and the moves between.

    `inputs` and `outputs` follow the graph's. A use, `(op index, operand position)`, reads generation 0 of its operand in the
    sharding that its strategy needs, or the one that `regenerated` lists as `(op index, operand position, generation)`. Outputs
    count as uses of op `len(ops)`.
    """

    mesh: LogicalMesh
    strategies: tuple[Strategy, ...]
    inputs: tuple[TensorSharding, ...]
    outputs: tuple[TensorSharding, ...]
    moves: tuple[PlannedMove, ...] = ()
    regenerated: frozenset[tuple[int, int, int]] = frozenset()

    @cached_property
    def _generations(self) -> Mapping[tuple[int, int], int]:
        return {(i, k): generation for i, k, generation in self.regenerated}

    def generation(self, op: int, position: int) -> int:
        """The generation that a use reads."""
        return self._generations.get((op, position), 0)

    @cached_property
    def moves_of(self) -> Mapping[int, tuple[PlannedMove, ...]]:
        """Value -> its moves, each after the moves that it builds on."""
        found: dict[int, list[PlannedMove]] = {}
        for m in self.moves:
            found.setdefault(m.value, []).append(m)
        return {v: tuple(ms) for v, ms in found.items()}


OMITTED = {"omitted": True}
"""Metadata of a field that a plan's file leaves out where it has its default."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a leaf that a pipeline stage has: from `begin` to before `end` along `dimension`, on the stage's mesh."""

    stage: int
    dimension: int
    begin: int
    end: int
    sharding: TensorSharding


@dataclass(frozen=True)
class Leaf:
    """One input or output of the step: its path in the argument tree, what it is for, and where it lies.

    `stage` is the pipeline stage on whose devices it lies; the first one, where several read it. A leaf whose layers belong to several
    stages has `parts`; `sharding` is then how it lies between steps: along the stages too where these have equal parts, in turn.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    sharding: TensorSharding
    stage: int = 0
    parts: tuple[Part, ...] = field(default=(), metadata=OMITTED)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages on whose devices it lies."""
        return tuple(sorted({p.stage for p in self.parts})) or (self.stage,)


@dataclass(frozen=True)
class Collective:
    """A planned collective. `nbytes` is the operand's on one device, in the dtype that moves; `times` per step.

    Ids are unique within a stage.
    """

    id: str
    kind: str
    axes: Axes
    group_size: int
    nbytes: int
    dtype: str
    times: int
    seconds: float
    purpose: str
    phase: str
    source: str
    stage: int = 0


@dataclass(frozen=True)
class WholeOp:
    """An op that every device runs whole, for want of a rule or of a strategy that is worth it."""

    primitive: str
    source: str
    count: int
    flops: float
    seconds: float
    has_rule: bool


@dataclass(frozen=True)
class Predicted:
    """Predictions per step and per device: seconds, bytes, FLOPs (whole program), model FLOPs utilisation in [0, 1]."""

    step_time_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_communication_s: float = 0.0
    bubble_s: float = 0.0
    peak_bytes: int = 0
    argument_bytes: int = 0
    temp_bytes: int = 0
    flops: float = 0.0
    mfu: float = 0.0


@dataclass(frozen=True)
class Solve:
    """How the programme was solved. `scope` says for what the bound holds: the whole `program`, or within its `fold`."""

    solver: str = "none"
    status: str = "none"
    objective: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    variables: int = 0
    constraints: int = 0
    scope: str = "program"


@dataclass(frozen=True)
class Timings:
    """Seconds that planning took."""

    trace_s: float = 0.0
    enumerate_s: float = 0.0
    solve_s: float = 0.0
    stages_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    """What a stage gives stage `target`: `values` whole arrays of `nbytes` bytes in all, `before` the microbatches, in `each`, or `after`.

    `seconds` is what it takes each time.
    """

    target: int
    when: str
    values: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: layers from the first to before the last of `layers`, on `devices` (first, number).

    `sharding` is for the graph of the stage's share of the step, with the values `recomputed` made again. Seconds are predicted, per step
    `before_s` and `after_s` and per microbatch `forward_s`, `input_s` (backward as far as cotangents for other stages need it) and
    `weight_s` (the rest of it). Bytes are those of one device: all in all at the peak, and what one microbatch keeps from forward to
    backward, of which `in_flight` stand there at once.
    """

    layers: tuple[int, int]
    devices: tuple[int, int]
    sharding: ShardingPlan
    recomputed: tuple[int, ...]
    before_s: float
    forward_s: float
    input_s: float
    weight_s: float
    after_s: float
    argument_bytes: int
    peak_bytes: int
    residual_bytes: int
    in_flight: int
    sends: tuple[Sent, ...]


@dataclass(frozen=True)
class Plan:
    """All of a plan. A plan refers to ops and leaves by canonical index and path; `fingerprint` ties it to its program.

    `cost_split` gives predicted seconds by kind (`matmul`, `memory-bound`, `all_reduce`, ...), `live` what fills the memory
    peak as (what, bytes), `candidates` the logical meshes tried with the objective of each. `recomputed` are the values of the
    program's graph that are made again after forward, as `remat` says or `auto` chose; `sharding` is for the graph with them.

    A plan in pipeline stages has them in `stages`; `layers` are the forward ops with which its layers begin, the first op left out. Its own
    `sharding` has no strategies then, and an axis `stage` before those of each stage's mesh. `scans` are where scans over layers are cut
    beforehand, the first and last layer's borders included: one entry for each length of such scans.
    """

    fingerprint: str
    target: str
    cluster: Mapping[str, Any]
    sharding: ShardingPlan
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    collectives: tuple[Collective, ...]
    whole: tuple[WholeOp, ...]
    predicted: Predicted
    solve: Solve
    timings: Timings
    cost_split: tuple[tuple[str, float], ...] = ()
    live: tuple[tuple[str, int], ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    jax_version: str = ""
    stages: tuple[Stage, ...] = ()
    layers: tuple[int, ...] = ()
    microbatches: int = 1
    schedule: str = "none"
    remat: str = "none"
    recomputed: tuple[int, ...] = ()
    schema: int = 3
    scans: tuple[tuple[int, ...], ...] = field(default=(), metadata=OMITTED)

    @property
    def mesh(self) -> LogicalMesh:
        return self.sharding.mesh

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis name -> size."""
        return dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
