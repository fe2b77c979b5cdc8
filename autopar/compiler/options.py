"""What a user may ask of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import UsageError
from autopar.intraop.remat import MODES
from autopar.ir import options
from autopar.schedule.formulas import NAMES


@dataclass(frozen=True)
class Options:
    """What a user may ask of a plan. Every field has a default that is right for most.

    `memory_bytes` per device overrides `memory_fraction` of the device's memory. `pins` maps a pattern of parameter paths to a
    PartitionSpec (or a NamedSharding, or a tuple of axis names per dimension); a whole path outranks a pattern, patterns that
    match one leaf must agree. `axis_names` names the axes of the logical mesh that is searched. `microbatches` says in how many parts, one
    after the other, the batch runs: a number that divides it, or as many as memory asks for (`auto`); `accumulate_dtype` in what the sums
    of narrow floats over them are kept, `float32` or `as_written`. `batch_argnums` are the arguments that hold the batch, where that is not
    plain. `stages` asks for so many pipeline stages, as many as are fastest (`auto`) or none (`off`); `schedule` orders their microbatches:
    `gpipe`, `1f1b`, `eager_1f1b`, `interleaved`, `zero_bubble`, `forward`, or the fastest (`auto`). `static_argnums` and
    `static_argnames` are those of `jax.jit`. `donate` lets a step reuse the memory of state that it returned before. `remat` says
    what is made again after forward rather than kept: what memory asks for (`auto`), `none`, all but the results of matmuls with
    weights (`dots`), or all but what crosses the program's narrow places (`full`). `zero` says what may be kept in more parts than it is
    used in, and gathered or scattered for that: nothing (0), the optimiser's state (1), gradients too (2), parameters too (3, as
    `auto`). `reduce_dtype` says in what partial sums of narrow
    floats are reduced: `float32`, or `as_written`. `solver` is `highs` or `pulp`, `time_limit_s` per logical mesh (None: no limit),
    `gap` the relative gap at which an answer counts as optimal. `emitter` is `shard_map` (explicit collectives) or `jit` (sharding
    constraints, the compiler finds the collectives). A value that makes no sense raises
    `UsageError`.
    """

    memory_bytes: int | None = None
    memory_fraction: float = 0.9
    microbatches: int | str = "auto"
    stages: int | str = "off"
    schedule: str = "auto"
    remat: str = "auto"
    zero: int | str = "auto"
    pins: Mapping[str, Any] = field(default_factory=dict)
    axis_names: tuple[str, ...] = ("x", "y", "z")
    batch_argnums: tuple[int, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate: bool = True
    reduce_dtype: str = "float32"
    accumulate_dtype: str = "float32"
    pad_state: bool = False
    microbatch_statistics: bool = False
    solver: str = "highs"
    time_limit_s: float | None = 120.0
    gap: float = 1e-4
    emitter: str = "shard_map"

    def __post_init__(self) -> None:
        options.one_of("reduce_dtype", self.reduce_dtype, ("float32", "as_written"))
        options.one_of("accumulate_dtype", self.accumulate_dtype, ("float32", "as_written"))
        options.one_of("remat", self.remat, MODES)
        options.one_of("schedule", self.schedule, ("auto", *NAMES))
        self._set("stages", options.stages(self.stages))
        if self.schedule != "auto" and self.stages in ("off", 1):
            raise UsageError(f"schedule={self.schedule!r} orders the microbatches of pipeline stages: ask for these with `stages`.")
        self._set("microbatches", options.count_or_auto("microbatches", self.microbatches))
        options.one_of("solver", self.solver, ("highs", "pulp"))
        options.one_of("emitter", self.emitter, ("shard_map", "jit"))
        self._set("memory_fraction", options.number("memory_fraction", self.memory_fraction, "a number in (0, 1]", high=1.0, above=True))
        self._set("gap", options.number("gap", self.gap, "a number that is not negative, such as 1e-4"))
        if self.memory_bytes is not None:
            wanted = "a positive number of bytes, such as 40 * 2**30"
            self._set("memory_bytes", int(options.number("memory_bytes", self.memory_bytes, wanted, low=1.0)))
        if self.time_limit_s is not None:
            wanted = "a positive number of seconds, or None for no limit"
            self._set("time_limit_s", options.number("time_limit_s", self.time_limit_s, wanted, above=True))
        options.flag("donate", self.donate)
        self._set("zero", options.zero_level(self.zero))
        self._set("axis_names", options.axis_names(self.axis_names))
        self._set("pins", options.pins(self.pins))
        for name in ("batch_argnums", "static_argnums"):
            self._set(name, options.argument_numbers(name, getattr(self, name)))
        self._set("static_argnames", options.argument_names("static_argnames", self.static_argnames))
        self._not_yet()

    def _set(self, name: str, value: Any) -> None:
        """A field in its one form: of what a user may write, the rest of the compile sees tuples and specs."""
        object.__setattr__(self, name, value)

    def _not_yet(self) -> None:
        """Options of the interface whose passes do not exist yet are refused, never ignored."""
        refused = {
            "pad_state": (self.pad_state, (False,)),
            "microbatch_statistics": (self.microbatch_statistics, (False,)),
        }
        for name, (value, allowed) in refused.items():
            if value not in allowed:
                raise UsageError(f"{name}={value!r} is not supported yet; use {' or '.join(map(repr, allowed))}.")
