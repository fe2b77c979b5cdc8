"""Which dimensions hold the batch, the sequence and the experts: labels that spread from the inputs through the rules, both ways.

A dimension may merge several, as in `(b s)`. So each has *pieces*, major to minor: `(("batch", 8), ("sequence", 1024))`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from autopar.ir.dtypes import is_key
from autopar.ir.graph import MATMULS, Graph
from autopar.ir.restriction import Label
from autopar.ir.rule import Dim, Factor, ShardingRule

Pieces = tuple[tuple[Label, int], ...]


@dataclass(frozen=True, eq=False)
class Labels:
    """Pieces of each value's dimensions, and of each op's factors. `weights` are the values that follow from state and constants."""

    dims: tuple[tuple[Pieces, ...], ...]
    factors: tuple[Mapping[Factor, Pieces], ...]
    weights: frozenset[int]

    def has(self, i: int, label: Label) -> bool:
        """Whether some factor of op i counts this."""
        return any(word == label for pieces in self.factors[i].values() for word, _ in pieces)

    def carries(self, value: int, label: Label) -> bool:
        """Whether some dimension of a value counts this."""
        return any(word == label for pieces in self.dims[value] for word, _ in pieces)


def cut_labels(pieces: Pieces, before: int, parts: int) -> frozenset[Label]:
    """What an axis of size `parts` cuts in a dimension that axes of size `before` together cut already.

    >>> sorted(cut_labels((("batch", 4), ("sequence", 8)), 2, 2)), sorted(cut_labels((("batch", 4), ("sequence", 8)), 2, 4))
    (['batch'], ['batch', 'sequence'])
    """
    found: set[Label] = set()
    start = 1
    for label, size in pieces:
        if before < start * size and before * parts > start:
            found.add(label)
        start *= size
    return frozenset(found)


def find_labels(
    graph: Graph,
    rules: Sequence[ShardingRule],
    carried: Sequence[tuple[int, int]],
    experts: bool = False,
    batch: Sequence[int] | None = None,
    known: Mapping[int, tuple[Pieces, ...]] | None = None,
) -> Labels:
    """The labels of a program. The inputs at the positions `batch` hold the batch in their leading dimension; where None is given,
    those that are neither state nor closed over, and of these the ones with the usual leading size (others are keys, schedules).

    The second dimension of inputs of whole numbers, or of those with features behind it, is the sequence. `experts` looks for the
    dimension that a matmul shares with a parameter and with its result. Where the pieces of all inputs are `known`, by value, as for a
    part of a program, nothing is guessed.
    """
    state = {i for i, _ in carried}
    weights = _weights(graph, state)
    spread = _Spread(graph, rules)
    seeds = known if known is not None else _seeds(graph, _likely(graph, state) if batch is None else batch)
    for v, dims in seeds.items():
        spread.label(v, dims)
    spread.run()
    if experts:
        for i, f in _expert_factors(graph, rules, weights, spread):
            spread.name(i, f, "expert")
        spread.run()
    batched = {v for v, dims in enumerate(spread.dims) if any(word == "batch" for pieces in dims for word, _ in pieces)}
    return Labels(tuple(spread.dims), tuple(spread.factors(i) for i in range(len(graph.ops))), frozenset(weights - batched))


def _likely(graph: Graph, state: set[int]) -> list[int]:
    """Positions of the inputs that seem to hold the batch."""
    count = len(graph.inputs) - graph.num_constants
    avals = [graph.avals[v] for v in graph.inputs[:count]]
    leaves = [n for n, aval in enumerate(avals) if n not in state and aval.ndim and not is_key(aval.dtype)]
    usual = Counter(avals[n].shape[0] for n in leaves).most_common(1)
    return [n for n in leaves if avals[n].shape[0] == usual[0][0]]


def _seeds(graph: Graph, batch: Sequence[int]) -> dict[int, tuple[Pieces, ...]]:
    """Input value -> its pieces."""
    found: dict[int, tuple[Pieces, ...]] = {}
    for n in batch:
        aval = graph.avals[graph.inputs[n]]
        ordered = aval.ndim > 2 or (aval.ndim == 2 and aval.dtype.startswith(("int", "uint")))
        words: list[Label] = ["batch", "sequence" if ordered else ""]
        found[graph.inputs[n]] = tuple(((words[d] if d < 2 else "", n),) for d, n in enumerate(aval.shape))
    return found


def _weights(graph: Graph, state: set[int]) -> set[int]:
    """Values that follow from state and constants, in loops too; what goes round a loop is none."""
    count = len(graph.inputs) - graph.num_constants
    found = {v for n, v in enumerate(graph.inputs) if n in state or n >= count}
    for op in graph.ops:
        inputs = [o for o in op.inputs if o not in graph.free]
        if inputs and op.phase != "update" and op.primitive != "loop_carry" and all(o in found for o in inputs):
            found.update(op.results)
    return found


def _expert_factors(graph: Graph, rules: Sequence[ShardingRule], weights: set[int], spread: _Spread) -> list[tuple[int, Factor]]:
    found = []
    for i, op in enumerate(graph.ops):
        if op.primitive not in MATMULS or len(op.operands) < 2:
            continue
        sides = [{f for d in dims for f in d} for dims in rules[i].operands[:2]]
        held = any(isinstance(o, int) and o in weights for o in op.operands[:2])
        labelled = {f for f, pieces in spread.factors(i).items() if any(word for word, _ in pieces)}
        if held:
            found += [(i, f) for f in sorted(sides[0] & sides[1] & set(rules[i].in_results) - labelled)]
    return found


class _Spread:
    """Labels on their way: an op whose operands or results learn something tells the others."""

    def __init__(self, graph: Graph, rules: Sequence[ShardingRule]):
        self.graph, self.rules = graph, rules
        self.dims: list[tuple[Pieces, ...]] = [tuple((("", n),) for n in a.shape) for a in graph.avals]
        self.named: dict[int, dict[Factor, Pieces]] = {}
        self.queue: deque[int] = deque()
        self.waiting: set[int] = set()
        self.round: dict[int, list[int]] = {}
        for i, j in graph.goes_round:
            self.round.setdefault(i, []).append(j)
            self.round.setdefault(j, []).append(i)

    def label(self, value: int, dims: tuple[Pieces, ...]) -> None:
        """Add what is known of a value, and wake the ops that have it."""
        merged = tuple(map(_better, self.dims[value], dims))
        if merged == self.dims[value]:
            return
        self.dims[value] = merged
        p = self.graph.producer.get(value)
        for i in (*(() if p is None else (p,)), *(u for u, _ in self.graph.uses.get(value, ()))):
            self._wake(i)

    def name(self, i: int, factor: Factor, label: Label) -> None:
        """Add what is known of a factor."""
        self.named.setdefault(i, {})[factor] = ((label, self.rules[i].size[factor]),)
        self._wake(i)

    def _wake(self, i: int) -> None:
        if i not in self.waiting:
            self.waiting.add(i)
            self.queue.append(i)

    def run(self) -> None:
        while self.queue:
            i = self.queue.popleft()
            self.waiting.discard(i)
            for other in (i, *self.round.get(i, ())):
                self._tell(i, other)

    def _tell(self, i: int, other: int) -> None:
        """What the factors of op i are, told to the tensors of another with the same factors."""
        factors, rule, op = self.factors(i), self.rules[other], self.graph.ops[other]
        for values, tensors in ((op.operands, rule.operands), (op.results, rule.results)):
            for v, dims in zip(values, tensors, strict=True):
                if isinstance(v, int) and v not in self.graph.free:
                    known = zip(dims, self.dims[v], strict=True)
                    self.label(v, tuple(_join(d, factors, old) for d, old in known))

    def factors(self, i: int) -> dict[Factor, Pieces]:
        """Pieces of an op's factors, as far as its tensors tell."""
        rule, op = self.rules[i], self.graph.ops[i]
        found = {f: self.named.get(i, {}).get(f, (("", n),)) for f, n in rule.sizes}
        for values, tensors in ((op.operands, rule.operands), (op.results, rule.results)):
            for v, dims in zip(values, tensors, strict=True):
                for dim, known in zip(dims, self.dims[v], strict=True) if isinstance(v, int) else ():
                    for f, pieces in _split(dim, known, rule.size).items():
                        found[f] = _better(found[f], pieces)
        return found


def _split(dim: Dim, pieces: Pieces, size: Mapping[Factor, int]) -> dict[Factor, Pieces]:
    """The pieces of a dimension, dealt out to its factors; what does not divide has no label."""
    found: dict[Factor, Pieces] = {}
    rest = list(pieces)
    for f in dim:
        mine: list[tuple[Label, int]] = []
        room = size[f]
        while room > 1 and rest:
            label, n = rest.pop(0)
            part = gcd(room, n)
            if part < min(room, n):
                return found
            mine.append((label, part))
            room //= part
            if n > part:
                rest.insert(0, (label, n // part))
        found[f] = _tidy(mine)
    return found


def _join(dim: Dim, factors: Mapping[Factor, Pieces], old: Pieces) -> Pieces:
    """The pieces of a dimension that is made of these factors."""
    return _tidy([piece for f in dim for piece in factors[f]]) if dim else old


def _tidy(pieces: Sequence[tuple[Label, int]]) -> Pieces:
    """Neighbours of one label as one, without pieces of size one."""
    found: list[tuple[Label, int]] = []
    for label, n in pieces:
        if found and found[-1][0] == label:
            found[-1] = (label, found[-1][1] * n)
        elif n > 1:
            found.append((label, n))
    return tuple(found) or (("", 1),)


def _better(a: Pieces, b: Pieces) -> Pieces:
    """Whichever says more."""
    return b if _said(b) > _said(a) else a


def _said(pieces: Pieces) -> int:
    return prod(n for label, n in pieces if label)
