"""Layers: where a program may be cut into stages, so that little crosses and each part costs about as much.

The border before a forward op is crossed by the values that are made before it and read from it on. A *narrow place* is a border that
less crosses than those around it, up to a rise on both sides: the residual stream between two blocks, a level of a U-Net with its skips.
Layers are cut there, all blocks alike, since equal blocks are narrow at equal places; only where there are fewer narrow places than
borders wanted, anywhere. Among cuts whose dearest layer costs little more than it must, those that least crosses are taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError
from autopar.interop.belong import JOIN, backward_values, forward_values, owners
from autopar.interop.ops import Ops
from autopar.interop.stages import Chain, crossings
from autopar.ir.problem import Floats, Ints

Flags = NDArray[np.bool_]

RISE = 1.2
"""A place is narrow where more than so many times its bytes cross on both sides of it."""

MOST = 1_000
"""Borders that are weighed where any will do: those that least crosses."""

@dataclass(frozen=True)
class Layers:
    """`layer_of[i]` is op i's layer, or `belong.JOIN`. `begins` are the forward ops with which layers begin, the first op left out.

    `costs` are those of the forward ops of each layer. `chain` is what the dynamic programme takes.
    """

    layer_of: tuple[int, ...]
    begins: tuple[int, ...]
    costs: tuple[float, ...]
    chain: Chain


def find_layers(ops: Ops, count: int, begins: Sequence[int] = (), slack: float = 0.2) -> Layers:
    """Cuts a program into `count` layers, one of which begins at each op of `begins`.

    The dearest layer costs at most `1 + slack` times what the dearest one of the most even cut does, and the cheapest at least half of
    what it can then. Raises `UsageError` for more layers than
    there are borders, or an op of `begins` that no layer can begin with.
    """
    forward = ops.forward
    height = crossing_bytes(ops)
    may = ~np.array([ops.joined[i] for i in forward], bool)
    given = _given(ops, forward, begins, may)
    if not 1 <= len(given) + 1 <= count <= int(may[1:].sum()) + 1:
        raise UsageError(
            f"{count} layers cannot be cut: the program has {int(may[1:].sum())} borders, of which {len(given)} are given. "
            f"Ask for {len(given) + 1} to {int(may[1:].sum()) + 1} layers."
        )
    places = _places(height, may, given, count)
    borders = _best_cut(np.append(0.0, np.cumsum(ops.cost[forward])), height, places, given, count, slack)
    return layers_at(ops, [int(forward[p]) for p in borders])


def layers_at(ops: Ops, begins: Sequence[int]) -> Layers:
    """The layers that begin with the first op and with these forward ops, in order."""
    layer_of = owners(ops, begins)
    count = len(begins) + 1
    members: list[list[int]] = [[] for _ in range(count)]
    work = [0.0] * count
    for i, layer in enumerate(layer_of):
        if layer != JOIN:
            members[layer].append(i)
            work[layer] += float(ops.cost[i]) * (ops.phase[i] == "forward")
    classes = _contents(ops, members)
    there, back = (crossings(count, values(ops, layer_of)) for values in (forward_values, backward_values))
    return Layers(layer_of, tuple(begins), tuple(work), Chain(classes, there, back))


def _contents(ops: Ops, members: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Equal numbers for layers whose ops are equal one by one and read each other alike."""
    numbers: dict[Hashable, int] = {}
    found = []
    for some in members:
        place = {value: n for n, i in enumerate(some) for value in ops.makes[i]}
        key = tuple((int(ops.classes[i]), tuple(place.get(v, JOIN) for v in ops.reads[i])) for i in some)
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def crossing_bytes(ops: Ops) -> Floats:
    """For each forward op, the bytes that cross the border before it: made by forward ops before, read by it or later ones."""
    forward = ops.forward
    step = np.full(len(ops.phase), -1)
    step[forward] = np.arange(len(forward))
    last = np.full(len(ops.made), -1)
    for i in forward:
        last[list(ops.reads[i])] = step[i]
    steps = np.zeros(len(forward) + 1)
    for value in np.flatnonzero((last >= 0) & (ops.made >= 0)):
        at = step[ops.made[value]]
        if at >= 0:
            steps[at + 1] += ops.nbytes[value]
            steps[last[value] + 1] -= ops.nbytes[value]
    return np.maximum(np.cumsum(steps[:-1]), 0.0)


def narrow_places(height: Sequence[float]) -> list[int]:
    """Places that are lower than all up to a rise by the factor `RISE` on both sides; of equals the first. The ends count as rises."""
    return [p for p in range(1, len(height)) if _is_narrow(height, p, -1) and _is_narrow(height, p, 1)]


def _is_narrow(height: Sequence[float], p: int, step: int) -> bool:
    q = p + step
    while 0 < q < len(height) and height[q] <= RISE * height[p]:
        if height[q] < height[p] or (step < 0 and height[q] == height[p]):
            return False
        q += step
    return True


def _given(ops: Ops, forward: Ints, begins: Sequence[int], may: Flags) -> list[int]:
    """The borders that are asked for, as places among forward ops."""
    place = {int(i): p for p, i in enumerate(forward)}
    for i in begins:
        if place.get(i, 0) == 0 or not may[place[i]]:
            raise UsageError(f"no layer can begin with op {i}: it must be a forward op, not the first one, outside of loops.")
    return sorted({place[i] for i in begins})


def _places(height: Floats, may: Flags, given: Sequence[int], count: int) -> list[int]:
    """Borders among which to choose: the narrow places if there are enough of them, else the lowest of all."""
    free = np.flatnonzero(may)
    free = free[free > 0]
    level = [0.0, *height[free]]
    narrow = {int(free[p - 1]) for p in narrow_places(level)} | set(given)
    if len(narrow) >= count - 1:
        return sorted(narrow)
    lowest = free[np.argsort(height[free], kind="stable")[: max(MOST, count)]]
    return sorted({int(p) for p in lowest} | narrow)


def _best_cut(total: Floats, height: Floats, places: Sequence[int], given: Sequence[int], count: int, slack: float) -> list[int]:
    """The borders that least crosses, by dynamic programming over places; among equals the most even ones.

    `total[p]` is the cost of all before place p. The unevenness is scaled to less than one byte.
    """
    ends = np.array([0, *places, len(total) - 1])
    part = total[ends][None, :] - total[ends][:, None]
    part[_skips(ends, given)] = np.inf
    cap = _most_even(part, count) * (1 + slack)
    part = np.where(part <= cap, part, np.inf)
    part = np.where(part >= _least_share(part, count) / 2, part, np.inf)
    mean = max(float(total[-1]) / count, np.finfo(float).tiny)
    uneven = np.square(part / mean - 1)
    scale = 0.5 / (count * (1.0 + np.max(uneven, where=np.isfinite(uneven), initial=0.0)))
    price = np.append(0.0, np.append(height[list(places)], 0.0))[None, :] + scale * uneven
    best, back = price[0], []
    for _ in range(count - 1):
        through = best[:, None] + price
        back.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    at, found = len(ends) - 1, []
    for pointers in reversed(back):
        at = int(pointers[at])
        found.append(int(ends[at]))
    return found[::-1]


def _skips(ends: Ints, given: Sequence[int]) -> Flags:
    """Which pairs of places are no layer: not in order, or with a given border between them."""
    passed = np.searchsorted(np.array(given, np.int64), ends, side="left")
    upto = np.searchsorted(np.array(given, np.int64), ends, side="right")
    return (ends[:, None] >= ends[None, :]) | (upto[:, None] < passed[None, :])


def _most_even(part: Floats, count: int) -> float:
    """The least cost that the dearest of so many layers can have; infinite parts are none."""
    best = part[0]
    for _ in range(count - 1):
        best = np.min(np.maximum(best[:, None], part), axis=0)
    return float(best[-1])


def _least_share(part: Floats, count: int) -> float:
    """The most that the cheapest of so many layers can cost."""
    worth = np.where(np.isfinite(part), part, -1.0)
    best = worth[0]
    for _ in range(count - 1):
        best = np.max(np.minimum(best[:, None], worth), axis=0)
    return float(best[-1])
