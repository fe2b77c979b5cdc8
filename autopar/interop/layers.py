"""Layers: where a program may be cut into stages, so that little crosses and each part costs about as much.

The border before a forward op is crossed by the values that are made before it and read from it on. A *narrow place* is a border that
less crosses than those around it, up to a rise on both sides: the residual stream between two blocks, a level of a U-Net with its skips.
Layers are cut there, all blocks alike, since equal blocks are narrow at equal places; only where there are fewer narrow places than
borders wanted, or where they cut very unevenly, anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import UsageError
from autopar.interop.belong import JOIN, backward_values, forward_values, owners
from autopar.interop.cut import Flags, Line, best_cut
from autopar.interop.ops import Ops
from autopar.interop.stages import Chain, crossings
from autopar.ir.problem import Floats, Ints

RISE = 1.2
"""A place is narrow where more than so many times its bytes cross on both sides of it."""

AROUND = 32
"""Ops on either side of a place by which it is known again in other blocks."""

UNEVEN = 1.5
"""Where the dearest layer between narrow places costs so many times its share, borders that are not narrow are weighed too: a plain
perceptron is as narrow everywhere as at the end of its first layer."""

FEW = 16
"""Layers into which a program is cut that has fewer blocks alike."""

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

    `slack` is how much dearer than it must be the dearest layer may be (`cut.best_cut`). Raises `UsageError` for more layers than there
    are borders, or an op of `begins` that no layer can begin with.
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
    narrow, lowest = _places(height, may, given, count)
    line = Line(np.append(0.0, np.cumsum(ops.cost[forward])), height, tuple(given), _kinds(ops, forward))
    borders = best_cut(line, narrow if len(narrow) >= count - 1 else lowest, count, slack)
    if line.dearest(borders) > UNEVEN * line.total[-1] / count:
        borders = min(borders, best_cut(line, lowest, count, slack), key=line.dearest)
    return layers_at(ops, [int(forward[p]) for p in borders])


def fine_layers(ops: Ops, least: int, chunks: int = 1) -> Layers:
    """As many layers as the program has blocks alike, or `FEW` where it has fewer; `least` of them or more, and a multiple of `chunks`.

    Raises `UsageError` where it cannot be cut into `least`.
    """
    may = ~np.array([ops.joined[i] for i in ops.forward], bool)
    narrow, _ = _places(crossing_bytes(ops), may, [], 1)
    kinds = _kinds(ops, ops.forward)
    alike = max(Counter(kinds[p] for p in narrow).values(), default=0)
    most = int(may[1:].sum()) + 1
    wanted = (alike, alike + 1) if alike >= FEW else (FEW,)
    found = [find_layers(ops, count) for count in sorted({max(least, min(n, most) // chunks * chunks) for n in wanted})]
    return min(found, key=lambda layers: max(layers.costs) * len(layers.costs))


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
    """Equal numbers for layers whose ops are equal one by one and read each other alike; the update's in any order."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(_content(ops, some), len(numbers)) for some in members)


def _content(ops: Ops, members: Sequence[int]) -> Hashable:
    """What a layer's ops do, as far as it does not depend on which layer it is. Leaves of state may be updated in another order."""
    names: dict[int, Hashable] = {}
    rows: list[Hashable] = []
    updates: list[int] = []
    for n, i in enumerate(members):
        row = (int(ops.classes[i]), tuple(names.get(v, JOIN) for v in ops.reads[i]))
        name = hash(row) if ops.phase[i] == "update" else n
        names.update({v: (name, k) for k, v in enumerate(ops.makes[i])})
        if ops.phase[i] == "update":
            updates.append(name)
        else:
            rows.append(row)
    return tuple(rows), tuple(sorted(updates))


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


def _places(height: Floats, may: Flags, given: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Borders among which to choose: the narrow places, and the lowest of all with them."""
    free = np.flatnonzero(may)
    free = free[free > 0]
    level = [0.0, *height[free]]
    narrow = {int(free[p - 1]) for p in narrow_places(level)} | set(given)
    lowest = free[np.argsort(height[free], kind="stable")[: max(MOST, count)]]
    return sorted(narrow), sorted({int(p) for p in lowest} | narrow)


def _kinds(ops: Ops, forward: Ints) -> list[tuple[int, ...]]:
    """For each place among forward ops what the ops around it do."""
    classes = ops.classes[forward].tolist()
    return [tuple(classes[max(0, p - AROUND) : p + AROUND]) for p in range(len(classes))]
