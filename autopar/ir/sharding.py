"""How one tensor lies on the mesh, and the elementary moves between two ways of lying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal as OneOf

from autopar.errors import IllegalStrategyError
from autopar.ir.dtypes import accumulation_dtype, itemsize
from autopar.ir.graph import Aval
from autopar.ir.mesh import LogicalMesh

Axes = tuple[str, ...]
Reduction = OneOf["sum", "max", "min", "and", "or"]
MoveKind = OneOf["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "to_partial"]
COMMUNICATING = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """Mesh axes per dimension, major to minor, and the axes over which the value is partial.

    An axis occurs at most once. `partial` is sorted by axis: `(("x", "sum"),)` says that the true value is the sum over x.
    """

    dims: tuple[Axes, ...]
    partial: tuple[tuple[str, Reduction], ...] = ()

    @staticmethod
    def replicated(ndim: int) -> TensorSharding:
        return TensorSharding(((),) * ndim)

    @property
    def axes(self) -> Axes:
        """All axes in use."""
        return tuple(a for d in self.dims for a in d) + tuple(a for a, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        return not self.partial and not any(self.dims)

    @property
    def is_sum(self) -> bool:
        """Partial with a sum: narrow floats are then held wider."""
        return any(kind == "sum" for _, kind in self.partial)

    def without_partial(self) -> TensorSharding:
        return TensorSharding(self.dims) if self.partial else self

    def shards(self, mesh: LogicalMesh) -> int:
        """Into how many different parts the value is cut."""
        return mesh.size(a for d in self.dims for a in d)

    def local_shape(self, shape: tuple[int, ...], mesh: LogicalMesh) -> tuple[int, ...]:
        """Shape of the part on one device."""
        return tuple(n // mesh.size(axes) if axes else n for n, axes in zip(shape, self.dims, strict=True))

    def fits(self, shape: tuple[int, ...], mesh: LogicalMesh) -> bool:
        """Whether every cut dimension divides and no axis is used twice."""
        used = self.axes
        if len(self.dims) != len(shape) or len(set(used)) != len(used):
            return False
        return all(not axes or (n > 0 and n % mesh.size(axes) == 0) for n, axes in zip(shape, self.dims, strict=True))

    def local_dtype(self, dtype: str, as_written: bool = False) -> str:
        """Dtype of the local part: narrow floats that are partial sums are held in float32 unless `as_written`."""
        return accumulation_dtype(dtype) if self.is_sum and not as_written else dtype

    def local_bytes(self, aval: Aval, mesh: LogicalMesh, as_written: bool = False) -> int:
        """Bytes of the part on one device."""
        return aval.size // self.shards(mesh) * itemsize(self.local_dtype(aval.dtype, as_written))

    def __str__(self) -> str:
        cuts = ", ".join("+".join(d) or "-" for d in self.dims)
        return f"[{cuts}]" + "".join(f" {kind}({axis})" for axis, kind in self.partial)


@dataclass(frozen=True, slots=True)
class Move:
    """One elementary step from a sharding to another.

    `all_gather` joins `dim`'s minor-most `axes`; `slice` cuts `dim` further by `axes`; `all_to_all` takes `axes` from the
    minor end of `dim` and puts them at the minor end of `to_dim`; `all_reduce` resolves partial `axes`; `reduce_scatter`
    resolves them and cuts `to_dim`; `to_partial` keeps the value on index 0 of `axes` and the reduction's identity elsewhere.
    """

    kind: MoveKind
    axes: Axes
    dim: int = -1
    to_dim: int = -1
    reduction: Reduction = "sum"

    @property
    def communicates(self) -> bool:
        return self.kind in COMMUNICATING

    def apply(self, source: TensorSharding) -> TensorSharding:
        """The sharding after the move. Raises `IllegalStrategyError` where it does not apply."""
        dims, partial = list(source.dims), dict(source.partial)
        if self.kind in ("all_gather", "all_to_all"):
            if dims[self.dim][len(dims[self.dim]) - len(self.axes) :] != self.axes:
                raise IllegalStrategyError(f"{self} does not apply to {source}: the axes are not minor-most there.")
            dims[self.dim] = dims[self.dim][: len(dims[self.dim]) - len(self.axes)]
        if self.kind in ("all_reduce", "reduce_scatter"):
            if any(partial.pop(a, None) != self.reduction for a in self.axes):
                raise IllegalStrategyError(f"{self} does not apply to {source}: it is not partial there.")
        if self.kind in ("all_to_all", "reduce_scatter", "slice"):
            to = self.dim if self.kind == "slice" else self.to_dim
            dims[to] = dims[to] + self.axes
        if self.kind == "to_partial":
            partial |= dict.fromkeys(self.axes, self.reduction)
        target = TensorSharding(tuple(dims), tuple(sorted(partial.items())))
        if len(set(target.axes)) != len(target.axes):
            raise IllegalStrategyError(f"{self} does not apply to {source}: an axis would be used twice.")
        return target

    def __str__(self) -> str:
        where = {"all_to_all": f" {self.dim}->{self.to_dim}", "reduce_scatter": f" ->{self.to_dim}"}
        where |= {"all_gather": f" {self.dim}", "slice": f" {self.dim}"}
        return f"{self.kind}({'+'.join(self.axes)}{where.get(self.kind, '')})"
