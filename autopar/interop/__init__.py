"""Stages: layers, submeshes, and the dynamic programme that puts them together.

`find_layers(ops_of(graph, carried), count)` cuts a program into layers and gives the `Chain` of what they are and what crosses between;
`plan_stages(chain, grid, oracle, formulas)` puts them on submeshes; `place` says which devices those are.
"""

from __future__ import annotations

from autopar.interop.layers import Layers, find_layers, fine_layers, layers_at
from autopar.interop.ops import Ops, ops_of
from autopar.interop.slice import plan_stages
from autopar.interop.stages import Chain, Choice, Grid, Link, Oracle, Stage, StagePlan, crossings
from autopar.interop.submesh import Submesh, place, submeshes

__all__ = [
    "Chain",
    "Choice",
    "Grid",
    "Layers",
    "Link",
    "Ops",
    "Oracle",
    "Stage",
    "StagePlan",
    "Submesh",
    "crossings",
    "find_layers",
    "fine_layers",
    "layers_at",
    "ops_of",
    "place",
    "plan_stages",
    "submeshes",
]
