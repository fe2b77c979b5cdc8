"""The public interface: `plan`, `manual`, `parallelize`, `Plan`, `Cluster`."""

from __future__ import annotations

from autopar.api.clusters import ClusterLike, cluster_of_devices, resolve_cluster
from autopar.api.compare import Baseline, Comparison, Setting, baselines
from autopar.api.manual import manual
from autopar.api.plans import Plan, check_program, plan
from autopar.api.rule import rule
from autopar.api.step import ParallelStep, parallelize
from autopar.compiler import Options
from autopar.runtime.executable import executable_for as _executable  # noqa: F401  (autopar.cli)
from cost_models import Cluster

__all__ = [
    "Baseline",
    "Cluster",
    "ClusterLike",
    "Comparison",
    "Options",
    "ParallelStep",
    "Plan",
    "Setting",
    "baselines",
    "check_program",
    "cluster_of_devices",
    "manual",
    "parallelize",
    "plan",
    "resolve_cluster",
    "rule",
]
