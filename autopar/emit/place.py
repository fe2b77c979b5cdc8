"""Where a device stands, and an op as one device calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.emit.collectives import apply_move, named, permute
from autopar.ir.graph import Aval, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import Factor, ShardingRule
from autopar.ir.sharding import Axes, Move
from autopar.ir.strategy import Strategy, dim_axes

Bind = Callable[[dict[str, Any], Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Place:
    """Where a device stands: `index(axes)` is its row-major position along these axes, traced or a number. `platform` as JAX names it."""

    mesh: LogicalMesh
    index: Callable[[tuple[str, ...]], Any]
    platform: str = ""


@dataclass(frozen=True)
class Call:
    """An op on one device: `params` are for local shapes, `whole_params` as traced. `wide`: partial sums are held in float32.

    `equation` is JAX's own; `ids` names the collectives that the op itself contains, in order; `received` holds what those of other
    ops have brought, by name. `widen` takes operands that came narrow to what `wide` asks for, where the method does so itself.
    """

    op: Op
    equation: Any
    bind: Bind
    params: dict[str, Any]
    whole_params: dict[str, Any]
    rule: ShardingRule
    strategy: Strategy
    avals_in: tuple[Aval, ...]
    out_shapes: list[tuple[int, ...]]
    place: Place
    wide: bool
    ids: tuple[str, ...] = ()
    received: dict[str, Any] = field(default_factory=dict)
    widen: Callable[[Sequence[Any]], list[Any]] = list

    @property
    def primitive(self) -> str:
        return self.op.primitive

    def gather(self, n: int, x: Any, axes: Axes, dim: int) -> Any:
        """All parts of a value along `dim`, by the op's n-th collective."""
        return self._named(n, lambda: apply_move(Move("all_gather", axes, dim=dim), x, self.place.mesh.size(axes), self.place.index))

    def shift(self, n: int, x: Any, axes: Axes, by: int) -> Any:
        """What the device `by` places before this one along `axes` has, by the op's n-th collective; zero where there is none."""
        size = self.place.mesh.size(axes)
        pairs = [(i, i + by) for i in range(size) if 0 <= i + by < size]
        return self._named(n, lambda: permute(x, axes, pairs, self.place.mesh.by_name))

    def _named(self, n: int, collective: Callable[[], Any]) -> Any:
        """The n-th collective, unless another op has run it already."""
        name = self.ids[n] if self.ids else ""
        if not name or name not in self.received:
            self.received[name] = named(name, collective)
        return self.received[name]

    def operand_axes(self, operand: int, d: int) -> Axes:
        """Mesh axes that cut dimension d of an operand."""
        return dim_axes(self.rule.operands[operand][d], self.strategy)

    def start(self, factor: Factor, local_size: int) -> tuple[Any, int]:
        """Where this device's part of a factor begins, and the factor's global size."""
        axes = self.strategy.axes(factor)
        return (self.place.index(axes) * local_size if axes else 0), self.rule.size[factor]
