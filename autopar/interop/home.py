"""How a leaf whose layers belong to several stages lies between steps, as one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import STAGE_AXIS, Part
from autopar.ir.sharding import TensorSharding


@dataclass(frozen=True)
class Home:
    """Groups of devices, in the order in which a leaf's blocks lie on them, and its sharding over an axis for them and those of the stages.

    Each stage finds its part where it needs it.
    """

    groups: tuple[int, ...]
    sharding: TensorSharding


def home_of(parts: Sequence[Part], group_of: Sequence[int]) -> Home | None:
    """Where a leaf lies if each group of devices keeps its own part; None where no array can lie so, since parts are not equal, do not
    lie alike, or a group has several of them. `group_of[stage]` is the group of a stage.
    """
    groups = tuple(group_of[p.stage] for p in parts)
    sizes, shardings = {p.end - p.begin for p in parts}, {p.sharding for p in parts}
    if len(set(groups)) < len(groups) or len(sizes) > 1 or len(shardings) > 1:
        return None
    (inner,) = shardings
    d = parts[0].dimension
    return Home(groups, TensorSharding((*inner.dims[:d], (STAGE_AXIS, *inner.dims[d]), *inner.dims[d + 1 :])))


def spread_over(shape: Sequence[int], mesh: LogicalMesh) -> TensorSharding:
    """An array cut over as many axes of a mesh as it divides by, its first dimensions first."""
    left, dims = list(shape), [list[str]() for _ in shape]
    for axis, n in zip(mesh.names, mesh.sizes, strict=True):
        d = next((d for d, size in enumerate(left) if n > 1 and size % n == 0 and size), None)
        if d is not None:
            left[d] //= n
            dims[d].append(axis)
    return TensorSharding(tuple(map(tuple, dims)))
