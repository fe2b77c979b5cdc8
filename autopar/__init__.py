"""autopar: an auto-parallelization planner and compiler for JAX. What you plan is what runs."""

from __future__ import annotations

from autopar.api import Cluster, Options, Plan, manual, parallelize, plan, rule
from autopar.errors import (
    AutoparError,
    CheckError,
    ClusterError,
    InfeasibleError,
    MeshError,
    ModelError,
    PlanError,
    RuleError,
    StateError,
    TraceError,
    UsageError,
)
from autopar.rules import register_rule

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CheckError",
    "Cluster",
    "ClusterError",
    "InfeasibleError",
    "MeshError",
    "ModelError",
    "Options",
    "Plan",
    "PlanError",
    "RuleError",
    "StateError",
    "TraceError",
    "UsageError",
    "manual",
    "parallelize",
    "plan",
    "register_rule",
    "rule",
]
