"""What people do by hand, priced beside a plan on the same cost models: data parallelism, ZeRO, FSDP, and the data x tensor grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from autopar.api.clusters import ClusterLike, resolve_cluster
from autopar.api.manual import named_mesh
from autopar.api.plans import Plan, axes_of, check_arguments, check_callable, options_or, plan_traced, static_options, timed_trace
from autopar.compiler import Options, logical_meshes
from autopar.errors import InfeasibleError, SolverError
from autopar.ir.restriction import Role
from autopar.report.compare import Row
from autopar.trace.trace import Traced

ROUNDING = 1e-6
"""Share by which a plan may be slower than a baseline beside the gap that it is allowed: sums of seconds in another order."""
REMAT = (("none",), ("dots", "full"))
"""What is made again: what fits without is fastest without, so the others are tried only where it does not fit."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """A way to parallelise by name, as `autopar.manual` takes it."""

    name: str
    data: int
    tensor: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    remat: str = ""

    def __str__(self) -> str:
        words = [f"data={self.data}", f"tensor={self.tensor}", f"zero={self.zero}"]
        words += ["sequence_parallel"] * self.sequence_parallel + [f"remat={self.remat}"] * (self.remat not in ("", "none"))
        return " ".join(words)


@dataclass(frozen=True)
class Baseline:
    """A setting's best plan: seconds per step, bytes per device. `ratio` is its time over the plan's.

    `status` is `planned`, `does not fit`, or `no answer` in the time given; without a plan the time is infinite.
    """

    setting: Setting
    step_time_s: float
    peak_bytes: int
    ratio: float
    status: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """A plan beside its baselines; of the grid the best one alone, `tried` says of how many."""

    plan: Plan
    baselines: tuple[Baseline, ...]
    tried: int

    @property
    def best(self) -> Baseline:
        """The fastest baseline."""
        return min(self.baselines, key=lambda b: b.step_time_s)

    @property
    def passed(self) -> bool:
        """Whether the plan is not slower than the best of them, but for the gap that its solve was allowed."""
        gap = float(self.plan.data.options.get("gap", 0.0))
        return self.best.ratio >= 1.0 - gap - ROUNDING

    @property
    def rows(self) -> tuple[Row, ...]:
        """The plan, and then each baseline."""
        p = self.plan.data.predicted
        mine = ("autopar", f"{self.plan.data.mesh} remat={self.plan.data.remat}", p.step_time_s, p.peak_bytes, 1.0, "planned")
        return (mine, *((b.setting.name, str(b.setting), b.step_time_s, b.peak_bytes, b.ratio, b.status) for b in self.baselines))


def baselines(
    function: Callable[..., Any],
    args: Sequence[Any],
    cluster: ClusterLike = None,
    *,
    options: Options | None = None,
    kwargs: Mapping[str, Any] | None = None,
    target: str = "",
    progress: Progress | None = None,
) -> Comparison:
    """Plan `function`, and price the baselines beside it. Nothing runs. The function is traced once.

    `options` are those of the plan; baselines take its memory, solver and donation. Raises what `plan` raises.
    """
    say = progress or (lambda text: None)
    check_callable(function)
    check_arguments(args, kwargs)
    asked = static_options(function, options_or(options))
    priced, meshes, _ = resolve_cluster(cluster)
    meshes = meshes or logical_meshes(priced, asked.axis_names)
    traced, seconds = timed_trace(function, args, kwargs or {}, asked, axes_of(meshes, asked))
    plan = plan_traced(traced, priced, meshes, asked, target, progress, seconds)
    attempt = Attempt(traced, priced, asked, plan.predicted.step_time_s, say)
    named = [attempt.best(each) for each in by_name(priced.num_devices)]
    grid = list(grid_of(priced.num_devices))
    found = [*named, *([attempt.best_of(grid)] if grid else [])]
    return Comparison(plan, tuple(found), len(named) + len(grid))


def by_name(devices: int) -> tuple[Setting, ...]:
    """The baselines that have names. FSDP is ZeRO-3 as it is usually run, each block's activations made again."""
    zero = (Setting(f"ZeRO-{level}", devices, zero=level) for level in (1, 2, 3))
    return (Setting("data parallel", devices), *zero, Setting("FSDP", devices, zero=3, remat="full"))


def grid_of(devices: int) -> Iterator[Setting]:
    """The data x tensor grid with some tensor parallelism. ZeRO-1 communicates as ZeRO-2 does, and holds more."""
    for tensor in range(2, devices + 1):
        if devices % tensor == 0:
            for zero in (0, 2, 3) if tensor < devices else (0,):
                for sequence in (False, True):
                    yield Setting("grid", devices // tensor, tensor, zero, sequence)


@dataclass(frozen=True)
class Attempt:
    """Plans settings of one traced function; `seconds` are those of the plan that they are compared with."""

    traced: Traced
    cluster: Any
    options: Options
    seconds: float
    say: Progress

    def best_of(self, settings: Iterable[Setting]) -> Baseline:
        """The fastest of several settings."""
        return min(map(self.best, settings), key=lambda b: b.step_time_s)

    def best(self, setting: Setting) -> Baseline:
        """The fastest way to make values again under a setting, of those that fit."""
        found: list[Baseline] = []
        for modes in ((setting.remat,),) if setting.remat else REMAT:
            found = [self._priced(replace(setting, remat=mode)) for mode in modes]
            if any(b.status == "planned" for b in found):
                break
        return min(found, key=lambda b: b.step_time_s)

    def _priced(self, setting: Setting) -> Baseline:
        sizes: dict[Role, int] = {"data": setting.data, "tensor": setting.tensor, "expert": 1, "context": 1}
        mesh, restriction = named_mesh(sizes, self.cluster.num_devices, setting.zero, setting.sequence_parallel)
        options = replace(self.options, remat=setting.remat, zero=setting.zero, pins={})
        self.say(f"{setting.name}: {setting}")
        try:
            plan = plan_traced(self.traced, self.cluster, (mesh,), options, restriction=restriction, least=False)
        except InfeasibleError:
            return Baseline(setting, inf, 0, inf, "does not fit")
        except SolverError:
            return Baseline(setting, inf, 0, inf, "no answer")
        seconds = plan.predicted.step_time_s
        return Baseline(setting, seconds, plan.predicted.peak_bytes, seconds / self.seconds, "planned")
