"""Which layer each op belongs to, once forward is cut, and what crosses between layers.

Forward ops belong where they stand. A backward op belongs with the forward op that it is the derivative of, as far as what it reads tells:
to the last layer that makes or reads its forward operands, weights among them, and to none after those from which its cotangents
come. So cotangents only ever go to the same layer or an earlier one. What reads cotangents alone stays where they come from, unless no more
crosses if it is done where its result is read. A loop stays
together. Ops of the update belong to the layer of the parameter that they lead to (the first one
that reads it, where several do), else to that of the gradient that they read; those of several layers, as a global norm, belong to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from autopar.interop.ops import Ops

JOIN = -1
"""The layer of ops of the update that take from several layers, or from none."""

NUMBER = 16
"""Bytes of the largest number."""


def owners(ops: Ops, begins: Sequence[int]) -> tuple[int, ...]:
    """The layer of each op; layers begin with the first op and with these forward ops."""
    forward = ops.forward
    found = [JOIN] * len(ops.phase)
    for layer, part in enumerate(np.split(forward, np.searchsorted(forward, np.array(begins, np.int64)))):
        for i in part:
            found[int(i)] = layer
    known = _known_in(ops, found)
    readers = _readers_of(ops)
    loose = _follow_cotangents(ops, found, known, len(begins))
    for i in reversed(range(len(ops.phase))):
        if ops.phase[i] == "update":
            found[i] = _leads_to(ops, i, found, known, readers)
        elif i in loose:
            found[i] = _moved(ops, i, found, readers)
    takes: dict[int, set[int]] = {}
    for i, phase in enumerate(ops.phase):
        if phase == "update" and found[i] == JOIN:
            takes[i] = _takes_from(ops, i, found, takes)
            own = takes[i] if len(takes[i]) == 1 else _takes_most_from(ops, i, found)
            if len(own) == 1:
                takes[i], found[i] = own, min(own)
    return tuple(found)


def _known_in(ops: Ops, layer_of: Sequence[int]) -> dict[int, set[int]]:
    """Value -> the layers whose forward makes or reads it."""
    found: dict[int, set[int]] = {}
    for i, phase in enumerate(ops.phase):
        if phase == "forward":
            for value in (*ops.reads[i], *ops.makes[i]):
                found.setdefault(value, set()).add(layer_of[i])
    return found


def _readers_of(ops: Ops) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, values in enumerate(ops.reads):
        for value in values:
            found.setdefault(value, []).append(i)
    return found


def _follow_cotangents(ops: Ops, layer_of: list[int], known: dict[int, set[int]], last: int) -> set[int]:
    """Gives backward ops their layers, and finds those for which nothing but their cotangents speaks."""
    loose = set()
    for first, stop in _groups(ops):
        if stop > first + 1:
            layer_of[first:stop] = [_layer_of_loop(ops, range(first, stop), layer_of, known, last)] * (stop - first)
            continue
        layer = min((layer_of[ops.made[v]] for v in ops.reads[first] if _is_made_in(ops, v, "backward")), default=last)
        told = [value for value in ops.reads[first] if value in known]
        for value in told:
            layer = max((a for a in known[value] if a <= layer), default=layer)
        layer_of[first] = layer
        if not told:
            loose.add(first)
    return loose


def _groups(ops: Ops) -> Iterator[tuple[int, int]]:
    """The backward ops, those of an outermost loop or branch together, as ranges."""
    i = 0
    while i < len(ops.phase):
        stop = next((j for j in range(i + 1, len(ops.phase)) if not ops.joined[j]), len(ops.phase))
        if ops.phase[i] == "backward":
            yield i, stop
        i = stop


def _layer_of_loop(ops: Ops, members: range, layer_of: Sequence[int], known: dict[int, set[int]], last: int) -> int:
    """The layer of a loop of backward: that of most values which it reads of one layer alone, as its residuals and weights are."""
    outer = {v for i in members for v in ops.reads[i] if ops.made[v] not in members}
    most = min((layer_of[ops.made[v]] for v in outer if _is_made_in(ops, v, "backward")), default=last)
    told = [{a for a in known[v] if a <= most} for v in sorted(outer & known.keys())]
    votes = Counter(layer for layers in told for layer in layers if len(layers) == 1) or Counter(max(layers) for layers in told if layers)
    return max(votes, key=lambda layer: (votes[layer], -layer), default=most)


def _moved(ops: Ops, i: int, layer_of: Sequence[int], readers: dict[int, list[int]]) -> int:
    """The layer of a backward op that could stand with its readers too: there, if no more crosses then."""
    layers = [layer_of[u] for v in ops.makes[i] for u in readers.get(v, ()) if layer_of[u] != JOIN]
    low = max(layers, default=layer_of[i])
    if low >= layer_of[i]:
        return layer_of[i]
    crosses = sum(ops.nbytes[v] for v in ops.makes[i])
    instead = sum(
        ops.nbytes[v] for v in set(ops.reads[i]) if not any(layer_of[u] <= low for u in readers[v] if u != i and ops.phase[u] == "backward")
    )
    return low if instead <= crosses else layer_of[i]


def _leads_to(ops: Ops, i: int, layer_of: Sequence[int], known: dict[int, set[int]], readers: dict[int, list[int]]) -> int:
    """The layer of the parameter that an op of the update reads, or of all that reads its results, joins of layers left out."""
    reads = {min(known[v]) for v in ops.reads[i] if ops.made[v] < 0 and v in known}
    found = reads or {layer_of[u] for v in ops.makes[i] for u in readers.get(v, ())} - {JOIN}
    return found.pop() if len(found) == 1 else JOIN


def _takes_from(ops: Ops, i: int, layer_of: Sequence[int], takes: dict[int, set[int]]) -> set[int]:
    """The layers from which an op of the update takes gradients or state, be it through others that lead to no parameter."""
    makers = {int(ops.made[v]) for v in ops.reads[i] if ops.made[v] >= 0 and ops.phase[ops.made[v]] != "forward"}
    return set().union(*(takes.get(m, {layer_of[m]} - {JOIN}) for m in makers))


def _takes_most_from(ops: Ops, i: int, layer_of: Sequence[int]) -> set[int]:
    """The layers whose gradients or state an op of the update reads, if it makes more than a number of them; joins are read by the way."""
    makers = {int(ops.made[v]) for v in ops.reads[i] if ops.made[v] >= 0 and ops.phase[ops.made[v]] != "forward"}
    large = any(ops.nbytes[v] > NUMBER for v in ops.makes[i])
    return {layer_of[m] for m in makers} - {JOIN} if large else set()


def _is_made_in(ops: Ops, value: int, phase: str) -> bool:
    return bool(ops.made[value] >= 0) and ops.phase[ops.made[value]] == phase


def forward_values(ops: Ops, layer_of: Sequence[int]) -> Iterable[tuple[int, int, float]]:
    """Activations that cross borders: (layer that makes it, last layer that reads it in forward, bytes).

    Weights that several layers read are among them: they live in the first of these layers, and go to the others once per step.
    """
    for value, (maker, readers) in _readers(ops, layer_of, "forward").items():
        if max(readers) > maker:
            yield maker, max(readers), float(ops.nbytes[value])
    for value, layers in _known_in(ops, layer_of).items():
        if ops.weights[value] > 0 and len(layers) > 1:
            yield min(layers), max(layers), float(ops.weights[value])


def backward_values(ops: Ops, layer_of: Sequence[int]) -> Iterable[tuple[int, int, float]]:
    """Cotangents that cross borders, the other way: (first layer that reads it, layer that makes it, bytes)."""
    for value, (maker, readers) in _readers(ops, layer_of, "backward").items():
        if min(readers) < maker:
            yield min(readers), maker, float(ops.nbytes[value])


def _readers(ops: Ops, layer_of: Sequence[int], phase: str) -> dict[int, tuple[int, set[int]]]:
    """Values made and read in one phase -> (layer of the maker, layers of the readers)."""
    found: dict[int, tuple[int, set[int]]] = {}
    for i, its in enumerate(ops.phase):
        if its == phase:
            for value in ops.reads[i]:
                if ops.nbytes[value] > 0 and _is_made_in(ops, value, phase):
                    found.setdefault(value, (layer_of[ops.made[value]], set()))[1].add(layer_of[i])
    return found
