"""The choices of one cluster: mesh axes assigned to classes of tied factors, or carrying a partial sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from math import gcd
from typing import Any

from autopar.intraop.clusters import Cluster
from autopar.intraop.restrict import Choices, Limits
from autopar.intraop.strategies import enumerate_strategies
from autopar.ir.graph import Aval, Graph, Op
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import ShardingRule
from autopar.ir.same import Memo, Same
from autopar.ir.sharding import Axes, TensorSharding
from autopar.ir.strategy import Strategy, is_legal, operand_sharding, result_sharding

_Cell = tuple[int, str]
INPUT = -1


@dataclass(frozen=True, eq=False)
class Space:
    """The strategies of a cluster, each as one `Strategy` per member op.

    `rules[j]` is the rule of the j-th op. `assignments[s]` gives the axes of each class of factors, and the axes that carry a
    partial sum. An input that lies with the cluster has its own tuple of classes, one per dimension (-1: not cut).
    """

    rules: tuple[ShardingRule, ...]
    classes: tuple[dict[str, int], ...]
    input_classes: tuple[tuple[int, ...], ...]
    assignments: tuple[tuple[tuple[Axes, ...], Axes], ...]
    passes: tuple[int, ...] = ()
    single: tuple[Strategy, ...] = ()
    memo: Memo = field(default_factory=Memo)
    _cache: dict[tuple[int, int], Strategy] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.single or self.assignments)

    def strategy(self, position: int, choice: int) -> Strategy:
        """Strategy of the op at `position` when the cluster takes `choice`."""
        if self.single:
            return self.single[choice]
        found = self._cache.get((position, choice))
        if found is None:
            axes, partial = self.assignments[choice]
            mine = self.classes[position]
            cuts = tuple((f, axes[mine[f]]) for f in self.rules[position].factors if f in mine and axes[mine[f]])
            passes = tuple((a, self.passes[position]) for a in partial)
            found = self._cache[position, choice] = Strategy(cuts, passes)
        return found

    def operand(self, position: int, k: int) -> tuple[TensorSharding, ...]:
        """By choice: the sharding in which the op at `position` needs operand k."""
        return self._all(operand_sharding, position, k)

    def result(self, position: int, k: int) -> tuple[TensorSharding, ...]:
        """By choice: the sharding in which the op at `position` leaves result k."""
        return self._all(result_sharding, position, k)

    def _all(
        self, sharding: Callable[[ShardingRule, Strategy, int], TensorSharding], position: int, k: int
    ) -> tuple[TensorSharding, ...]:
        rule = self.rules[position]
        key = sharding, k, self.choices_of(position)
        return self.memo.get(key, lambda: self.memo.one(tuple(sharding(rule, self.strategy(position, s), k) for s in range(len(self)))))

    def choices_of(self, position: int) -> Hashable:
        """What decides the strategies of the op at `position`."""
        rule = Same(self.rules[position])
        if self.single:
            return rule, Same(self._chosen)
        mine = self.classes[position]
        passes = self.passes[position] if self.passes else -1
        return rule, tuple(mine.get(f, -1) for f in self.rules[position].factors), passes, Same(self._chosen)

    @cached_property
    def _chosen(self) -> tuple[Any, ...]:
        """The choices, those of another space where they are equal."""
        return self.memo.one(self.single or self.assignments)

    def input(self, index: int) -> tuple[TensorSharding, ...]:
        """By choice: the sharding of the cluster's `index`-th input."""
        classes = self.input_classes[index]
        key = "input", classes, Same(self._chosen)
        return self.memo.get(key, lambda: self.memo.one(tuple(_lying(classes, axes) for axes, _ in self.assignments)))

    @cached_property
    def cut_axes(self) -> tuple[frozenset[str], ...]:
        """By choice: the mesh axes that divide the work."""
        if self.single:
            return tuple(frozenset(a for _, axes in s.cuts for a in axes) for s in self.single)
        return tuple(frozenset(a for axes in cuts for a in axes) for cuts, _ in self.assignments)


def _lying(classes: tuple[int, ...], axes: tuple[Axes, ...]) -> TensorSharding:
    return TensorSharding(tuple(axes[c] if c >= 0 else () for c in classes))


def build_space(
    graph: Graph,
    rules: Sequence[ShardingRule],
    cluster: Cluster,
    mesh: LogicalMesh,
    limits: Limits | None = None,
    memo: Memo | None = None,
) -> Space:
    """The choices of a cluster on a mesh that `limits` leave; without any all of them, the whole one first.

    `memo` remembers what follows from choices on this mesh.
    """
    space = replace(_all_choices(graph, rules, cluster, mesh), memo=memo or Memo(), _cache={})
    return space if limits is None else _within(space, cluster, mesh, limits)


def _within(space: Space, cluster: Cluster, mesh: LogicalMesh, limits: Limits) -> Space:
    choices = Choices(
        space.strategy,
        lambda n, s: space.input(n)[s],
        lambda j: tuple(sorted(space.classes[j].items())),
    )
    kept = limits.left(cluster.ops, cluster.inputs, len(space), choices, mesh)
    if space.single:
        return replace(space, single=tuple(space.single[s] for s in kept))
    return replace(space, assignments=tuple(space.assignments[s] for s in kept), _cache={})


def _all_choices(graph: Graph, rules: Sequence[ShardingRule], cluster: Cluster, mesh: LogicalMesh) -> Space:
    if len(cluster.ops) == 1 and not cluster.inputs:
        rule = rules[cluster.ops[0]]
        every = enumerate_strategies(rule, mesh)
        single = tuple(s for s in every if all(rule.passes[p].kind == "sum" for _, p in s.passes))
        single = _as_pinned(graph.ops[cluster.ops[0]], rule, single)
        return Space((rule,), ({},), (), (), (), single)
    return _Builder(graph, rules, cluster, mesh).space()


def _as_pinned(op: Op, rule: ShardingRule, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """The strategies that a sharding constraint allows; all of them where the mesh has other axes, or they do not divide."""
    spec = op.param("spec")
    if op.primitive != "pin" or spec is None:
        return strategies
    dims = [result_sharding(rule, s, 0).dims for s in strategies]
    kept = tuple(s for s, ds in zip(strategies, dims, strict=True) if all(w is None or w == d for w, d in zip(spec, ds, strict=True)))
    return kept or strategies


class _Builder:
    """Ties factors through the values inside the cluster, then enumerates assignments of axes to the classes."""

    def __init__(self, graph: Graph, rules: Sequence[ShardingRule], cluster: Cluster, mesh: LogicalMesh):
        self.graph, self.cluster, self.mesh = graph, cluster, mesh
        self.rules = tuple(rules[i] for i in cluster.ops)
        self.position = {i: j for j, i in enumerate(cluster.ops)}
        self.parent: dict[_Cell, _Cell] = {}
        self.ties: list[tuple[int, int, int, int]] = []
        self.inside = {v: n for n, v in enumerate(cluster.inputs)}

    def find(self, cell: _Cell) -> _Cell:
        parent = self.parent
        parent.setdefault(cell, cell)
        while parent[cell] != cell:
            parent[cell] = parent[parent[cell]]
            cell = parent[cell]
        return cell

    def join(self, a: _Cell, b: _Cell) -> None:
        self.parent[self.find(a)] = self.find(b)

    def space(self) -> Space:
        self._tie()
        names: dict[_Cell, int] = {}
        classes = tuple(
            {f: names.setdefault(self.find((j, f)), len(names)) for f in rule.factors} for j, rule in enumerate(self.rules)
        )
        inputs = tuple(self._input_classes(n, v, names) for n, v in enumerate(self.cluster.inputs))
        passes = self._passes() if self.cluster.linear else ()
        divisor = self._divisors(names, len(names))
        space = Space(self.rules, classes, inputs, tuple(self._assignments(divisor, bool(passes))), passes)
        keep = [s for s in range(len(space)) if self._consistent(space, s)]
        return Space(self.rules, classes, inputs, tuple(space.assignments[s] for s in keep), passes)

    def _tie(self) -> None:
        for j, i in enumerate(self.cluster.ops):
            for k, o in enumerate(self.graph.ops[i].operands):
                if not isinstance(o, int):
                    continue
                mine = self.rules[j].operands[k]
                if o in self.inside:
                    for d, dim in enumerate(mine):
                        if dim:
                            self.join((INPUT - self.inside[o], f"d{d}"), (j, dim[0]))
                p = self.position.get(self.graph.producer.get(o, -1))
                if p is None:
                    continue
                r = self.graph.ops[self.cluster.ops[p]].results.index(o)
                theirs = self.rules[p].results[r]
                self._tie_dims(p, theirs, j, mine)
                if any(len(d) > 1 for d in (*mine, *theirs)):
                    self.ties.append((p, r, j, k))
        for i, e in self.graph.goes_round:
            if i in self.position:
                p, j = self.position[i], self.position[e]
                self._tie_dims(p, self.rules[p].results[0], j, self.rules[j].operands[0])

    def _tie_dims(self, p: int, theirs: tuple[tuple[str, ...], ...], j: int, mine: tuple[tuple[str, ...], ...]) -> None:
        for a, b in zip(theirs, mine, strict=True):
            for n, (f, g) in enumerate(zip(a, b, strict=False)):
                same = self.rules[p].size[f] == self.rules[j].size[g]
                if n == 0 or same:
                    self.join((p, f), (j, g))
                if not same:
                    break

    def _input_classes(self, n: int, value: int, names: dict[_Cell, int]) -> tuple[int, ...]:
        found = []
        for d in range(self.graph.avals[value].ndim):
            cell = (INPUT - n, f"d{d}")
            found.append(names.get(self.find(cell), -1) if cell in self.parent else -1)
        return tuple(found)

    def _passes(self) -> tuple[int, ...]:
        """Per op the pass in which all its full-size operands are partial; nothing if some op has none."""
        found = []
        for j, i in enumerate(self.cluster.ops):
            op = self.graph.ops[i]
            size = self.graph.avals[op.results[0]].size
            values = [o for o in op.inputs if o not in self.graph.free]
            if op.primitive in ("mul", "div"):
                values = [o for o in values if self.graph.avals[o].size == size]
            values = list(op.inputs) if op.primitive == "loop_carry" else values  # what comes in may be zeros
            wanted = {k for k, o in enumerate(op.operands) if isinstance(o, int) and o in values}
            index = next((n for n, p in enumerate(self.rules[j].passes) if p.kind == "sum" and set(p.operands) == wanted), None)
            if index is None:
                return ()
            found.append(index)
        return tuple(found)

    def _divisors(self, names: dict[_Cell, int], count: int) -> list[int]:
        """Per class the greatest number of parts it may be cut into: 1 where an op ties two of its factors or forbids the cut."""
        found = [0] * count
        for cell in list(self.parent):
            c = names.get(self.find(cell))
            if c is None:
                continue
            j, f = cell
            if j < 0:
                size = self.graph.avals[self.cluster.inputs[INPUT - j]].shape[int(f[1:])]
            else:
                size = self.rules[j].size[f] if f in self.rules[j].factors else 1
            found[c] = gcd(found[c], size)
        for j, rule in enumerate(self.rules):
            mine = [names[self.find((j, f))] for f in rule.factors]
            for c in set(mine):
                found[c] = gcd(found[c], rule.size[rule.factors[mine.index(c)]]) if mine.count(c) == 1 else 1
        return found

    def _assignments(self, divisor: list[int], partial: bool) -> list[tuple[tuple[Axes, ...], Axes]]:
        options: list[list[int | None]] = []
        for n in self.mesh.sizes:
            cuts: list[int | None] = [c for c, d in enumerate(divisor) if d % n == 0]
            options.append([None, *cuts, *([-1] if partial else [])] if n > 1 else [None])
        found: dict[tuple[tuple[Axes, ...], Axes], None] = {}
        for combination in product(*options):
            chosen = dict(zip(self.mesh.names, combination, strict=True))
            carried = tuple(a for a, c in chosen.items() if c == -1)
            for axes in self._orders(chosen, len(divisor)):
                if all(d % self.mesh.size(a) == 0 for a, d in zip(axes, divisor, strict=True) if a):
                    found[axes, carried] = None
        return list(found)

    def _orders(self, chosen: dict[str, int | None], count: int) -> list[tuple[Axes, ...]]:
        members: dict[int, list[str]] = {}
        for a, c in chosen.items():
            if c is not None and c >= 0:
                members.setdefault(c, []).append(a)
        found = []
        for orders in product(*(permutations(axes) for axes in members.values())):
            axes: list[Axes] = [()] * count
            for c, order in zip(members, orders, strict=True):
                axes[c] = tuple(order)
            found.append(tuple(axes))
        return found

    def _consistent(self, space: Space, choice: int) -> bool:
        """Merged dimensions are cut in contiguous blocks, and alike on both sides of a value inside the cluster."""
        for p, r, j, k in self.ties:
            for position in (p, j):
                if not is_legal(self.rules[position], space.strategy(position, choice), self.mesh):
                    return False
            left = result_sharding(self.rules[p], space.strategy(p, choice), r)
            if left.dims != operand_sharding(self.rules[j], space.strategy(j, choice), k).dims:
                return False
        for j, rule in enumerate(self.rules):
            if any(len(d) > 1 for t in (*rule.operands, *rule.results) for d in t):
                if not is_legal(rule, space.strategy(j, choice), self.mesh):
                    return False
        return True


def aval_key(aval: Aval) -> tuple[tuple[int, ...], str]:
    return aval.shape, aval.dtype
