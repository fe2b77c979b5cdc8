"""All that is known of a compile, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from autopar.compiler.options import Options
from autopar.intraop.choose import Chosen, Progress
from autopar.intraop.remat import Variants
from autopar.intraop.shape import Shape
from autopar.intraop.solvers.bases import Bases
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Plan
from autopar.ir.restriction import Restriction
from autopar.ir.rule import ShardingRule
from autopar.ir.serialize import fingerprint, plain
from autopar.ir.sharding import TensorSharding
from autopar.trace.roles import leaves_at
from autopar.trace.trace import Traced


@dataclass(frozen=True, eq=False)
class Compilation:
    """What is known so far: the steps fill it from top to bottom.

    `fixed` pins inputs by their path beyond `options.pins` (another batch shape keeps the state where it is). `restriction` says what
    the axes of the one mesh are for, if the user does. An interleaved schedule deals out `interleave` chunks of layers to each device.
    `least` has a refusal say what would fit, which may take long. `divided` is the
    program that runs the step as `microbatches`; plans whose steps take `below` seconds or more are of no use; `tried` says what was found
    with fewer microbatches. `bases` are where solves have ended.
    """

    traced: Traced
    cluster: Any
    meshes: tuple[LogicalMesh, ...]
    options: Options
    target: str = ""
    fixed: Mapping[str, TensorSharding] = field(default_factory=dict)
    restriction: Restriction | None = None
    interleave: int = 2
    least: bool = True
    progress: Progress = lambda text: None
    trace_s: float = 0.0
    microbatches: int = 1
    below: float | None = None
    tried: tuple[str, ...] = ()
    divided: Traced | None = None
    rules: tuple[ShardingRule, ...] = ()
    variants: Variants | None = None
    shape: Shape | None = None
    chosen: Chosen | None = None
    candidates: tuple[tuple[str, float], ...] = ()
    plan: Plan | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    bases: Bases = field(default_factory=Bases)

    @property
    def program(self) -> Traced:
        """The program that is planned."""
        return self.divided or self.traced

    @property
    def seconds_per_step(self) -> float:
        """What the chosen plan takes."""
        assert self.chosen is not None
        return self.chosen.price.total_s

    @property
    def makes_again(self) -> bool:
        """Whether the chosen plan recomputes for want of memory."""
        return self.chosen is not None and self.options.remat == "auto" and bool(self.chosen.recomputed)


def budget_of(c: Compilation) -> float:
    """Bytes that a plan may use on each device."""
    if c.options.memory_bytes is not None:
        return float(c.options.memory_bytes)
    return float(int(c.cluster.device.usable_bytes(c.options.memory_fraction)))


def roles_of(traced: Traced) -> list[str]:
    """`state`, `batch` or `constant` for each graph input. What neither is state nor closed over counts as batch."""
    state = {i for i, _ in traced.roles.carried}
    count = len(traced.graph.inputs) - traced.graph.num_constants
    return ["state" if i in state else "batch" if i < count else "constant" for i in range(len(traced.graph.inputs))]


def fingerprint_of(traced: Traced) -> str:
    """The program's fingerprint: a plan belongs to exactly one."""
    threefry = bool(getattr(jax.config, "jax_threefry_partitionable", True))
    return fingerprint(traced.graph, {"threefry_partitionable": threefry, "carried": traced.roles.carried})


def restriction_of(c: Compilation) -> Restriction | None:
    """What the user restricts: the roles of axes, or by `zero` alone what may be kept in parts."""
    if c.restriction is not None or c.options.zero == "auto":
        return c.restriction
    return Restriction(int(c.options.zero))


def batch_of(c: Compilation) -> tuple[int, ...] | None:
    """The graph inputs that hold the batch, by position; None where the user does not say."""
    return leaves_at(c.traced.signature, c.options.batch_argnums) if c.options.batch_argnums else None


def plain_options(options: Options) -> Mapping[str, Any]:
    """The options of a plan as its file keeps them."""
    kept = {k: v for k, v in asdict(options).items() if isinstance(v, (str, int, float, bool, tuple, type(None)))}
    return dict(plain(kept))


def logical_meshes(cluster: Any, axis_names: Sequence[str], max_axes: int = 2) -> tuple[LogicalMesh, ...]:
    """The logical meshes worth searching on a cluster, of one and two axes."""
    shapes = [s for s in cluster.mesh_shapes(max_axes) if len(s) <= len(axis_names)] or [(cluster.num_devices,)]
    return tuple(LogicalMesh(tuple(axis_names[: len(s)]), tuple(s)) for s in shapes)
