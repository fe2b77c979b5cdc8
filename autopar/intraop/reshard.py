"""Conversions between shardings of one value: elementary moves, and the cheapest sequence of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations

from autopar.ir.dtypes import is_inexact, is_key
from autopar.ir.graph import Aval
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import Move, Reduction, TensorSharding

Price = Callable[[Move, TensorSharding, Aval], float]


@lru_cache(maxsize=200_000)
def moves_from(
    source: TensorSharding, aval: Aval, mesh: LogicalMesh, partials: tuple[Reduction, ...] = ()
) -> tuple[tuple[Move, TensorSharding], ...]:
    """Every move that applies to `source`, with where it leads; `partials` lists the kinds of partial value worth making."""
    found = []
    for move in (*_gathers(source), *_exchanges(source), *_cuts(source, mesh), *_reductions(source), *_partials(source, mesh, partials)):
        target = move.apply(source)
        if target.fits(aval.shape, mesh) and _dtype_allows(move, aval):
            found.append((move, target))
    return tuple(found)


def _dtype_allows(move: Move, aval: Aval) -> bool:
    if move.kind == "to_partial" and move.reduction == "sum":
        return aval.dtype != "bool" and not is_key(aval.dtype) and aval.dtype != "float0"
    return True


def _gathers(source: TensorSharding) -> Iterator[Move]:
    for d, axes in enumerate(source.dims):
        for k in range(1, len(axes) + 1):
            yield Move("all_gather", axes[-k:], d)


def _exchanges(source: TensorSharding) -> Iterator[Move]:
    for d, axes in enumerate(source.dims):
        for to in range(len(source.dims)):
            if axes and to != d:
                yield Move("all_to_all", axes[-1:], d, to)


def _cuts(source: TensorSharding, mesh: LogicalMesh) -> Iterator[Move]:
    idle = [a for a, n in zip(mesh.names, mesh.sizes, strict=True) if n > 1 and a not in source.axes]
    for d in range(len(source.dims)):
        for a in idle:
            yield Move("slice", (a,), d)


def _reductions(source: TensorSharding) -> Iterator[Move]:
    for kind in sorted({k for _, k in source.partial}):
        axes = [a for a, k in source.partial if k == kind]
        for n in range(1, len(axes) + 1):
            for some in combinations(axes, n):
                yield Move("all_reduce", some, reduction=kind)
        if kind == "sum":
            for n in range(1, len(axes) + 1):
                for order in permutations(axes, n):
                    for d in range(len(source.dims)):
                        yield Move("reduce_scatter", order, to_dim=d, reduction="sum")


def _partials(source: TensorSharding, mesh: LogicalMesh, kinds: Iterable[Reduction]) -> Iterator[Move]:
    for a, n in zip(mesh.names, mesh.sizes, strict=True):
        if n > 1 and a not in source.axes:
            for kind in kinds:
                yield Move("to_partial", (a,), reduction=kind)


@dataclass(frozen=True)
class Path:
    """A sequence of moves, the shardings after each, and its price in seconds."""

    seconds: float
    moves: tuple[Move, ...]
    shardings: tuple[TensorSharding, ...]


def cheapest(
    sources: Iterable[tuple[TensorSharding, float]], target: TensorSharding, aval: Aval, mesh: LogicalMesh, price: Price
) -> tuple[TensorSharding, Path]:
    """The cheapest way to `target` from any of `sources` (sharding, seconds already spent): the source taken and the path.

    Dijkstra's algorithm over shardings; ties go to fewer moves.
    """
    kinds = tuple(sorted({k for _, k in target.partial}))
    best: dict[TensorSharding, tuple[float, int]] = {}
    back: dict[TensorSharding, tuple[TensorSharding, Move] | None] = {}
    queue: list[tuple[float, int, int, TensorSharding]] = []
    count = 0
    for start, spent in sources:
        if start not in best or (spent, 0) < best[start]:
            best[start], back[start] = (spent, 0), None
            heapq.heappush(queue, (spent, 0, count, start))
            count += 1
    while queue:
        cost, steps, _, here = heapq.heappop(queue)
        if (cost, steps) > best[here]:
            continue
        if here == target:
            return _path(here, back, cost)
        for move, there in moves_from(here, aval, mesh, kinds):
            new = (cost + price(move, here, aval), steps + 1)
            if there not in best or new < best[there]:
                best[there], back[there] = new, (here, move)
                heapq.heappush(queue, (*new, count, there))
                count += 1
    raise AssertionError(f"no way to {target} for {aval} on mesh ({mesh})")


def _path(
    end: TensorSharding, back: dict[TensorSharding, tuple[TensorSharding, Move] | None], cost: float
) -> tuple[TensorSharding, Path]:
    moves, shardings, here = [], [], end
    while (step := back[here]) is not None:
        shardings.append(here)
        here = step[0]
        moves.append(step[1])
    return here, Path(cost, tuple(reversed(moves)), tuple(reversed(shardings)))


def border_shardings(aval: Aval, mesh: LogicalMesh) -> tuple[TensorSharding, ...]:
    """The shardings that a value may have where the step begins or ends: no partial, every cut dimension divides."""
    found: dict[TensorSharding, None] = {}

    def extend(sharding: TensorSharding) -> None:
        if sharding in found:
            return
        found[sharding] = None
        for move in _cuts(sharding, mesh):
            target = move.apply(sharding)
            if target.fits(aval.shape, mesh):
                extend(target)

    if aval.size and not is_key(aval.dtype) and aval.dtype != "float0":
        extend(TensorSharding.replicated(aval.ndim))
    return tuple(found) or (TensorSharding.replicated(aval.ndim),)


def carries_partial(aval: Aval) -> bool:
    """Whether sums of this dtype may be held partial at all."""
    return is_inexact(aval.dtype) or aval.dtype.startswith(("int", "uint"))
