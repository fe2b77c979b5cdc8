"""A `Restriction` on one program: which strategies, border shardings and moves are left of those that the rules allow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.intraop.labels import Labels, Pieces, cut_labels, find_labels
from autopar.ir.graph import MATMULS, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.restriction import HOME, Label, Restriction
from autopar.ir.rule import ShardingRule
from autopar.ir.sharding import Axes, MoveKind, TensorSharding
from autopar.ir.strategy import Strategy

Barred = frozenset[tuple[MoveKind, str]]
"""Moves that must not be: kind, and an axis that they move over."""
Cuts = list[tuple[str, frozenset[Label]]]


@dataclass(frozen=True)
class Choices:
    """The choices of a cluster as functions of member and choice; members with equal keys choose alike."""

    op: Callable[[int, int], Strategy]
    input: Callable[[int, int], TensorSharding]
    key: Callable[[int], Hashable]


@dataclass(frozen=True, eq=False)
class Limits:
    """What a restriction leaves of a program's choices.

    Wishes (that the batch is cut, that state is kept in parts) are followed wherever some choice follows them, and else let go.
    """

    restriction: Restriction
    graph: Graph
    rules: Sequence[ShardingRule]
    labels: Labels
    carried: tuple[tuple[int, int], ...]
    _tags: dict[int, Hashable] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> frozenset[int]:
        """State that forward or backward reads."""
        state = [self.graph.inputs[i] for i, _ in self.carried]
        return frozenset(v for v in state if any(self.graph.ops[u].phase != "update" for u, _ in self.graph.uses.get(v, ())))

    @cached_property
    def other_state(self) -> frozenset[int]:
        """State that only the update reads, as the optimiser's."""
        return frozenset(self.graph.inputs[i] for i, _ in self.carried) - self.parameters

    @cached_property
    def next_state(self) -> frozenset[int]:
        """The state's next values."""
        return frozenset(o for _, k in self.carried if isinstance(o := self.graph.outputs[k], int))

    def tag(self, i: int) -> Hashable:
        """All that decides what op i may do: ops with equal tags, rules and phases may do the same."""
        if i not in self._tags:
            op = self.graph.ops[i]
            held = tuple(isinstance(o, int) and o in self.labels.weights for o in op.operands)
            self._tags[i] = (tuple(self.labels.factors[i].items()), held)
        return self._tags[i]

    def allows(self, i: int, strategy: Strategy, mesh: LogicalMesh, updating: bool = False) -> bool:
        """Whether op i may take this strategy. `updating` ops lie with others of the update."""
        updating = updating or self.graph.ops[i].phase == "update"
        return all(self._may_cut(i, axis, labels, updating) for axis, labels in self._cuts(i, strategy, mesh))

    def _cuts(self, i: int, strategy: Strategy, mesh: LogicalMesh) -> Cuts:
        return [c for f, axes in strategy.cuts for c in _labels_of(self.labels.factors[i].get(f, ()), axes, mesh)]

    def _may_cut(self, i: int, axis: str, labels: frozenset[Label], updating: bool) -> bool:
        role = self.restriction.role(axis)
        if role is None:
            return True
        if role == "tensor":
            return self._tensor_may_cut(i, labels)
        if role == "expert" and self._is_expert(i):
            return labels == {"expert"}
        return len(labels) == 1 and labels <= HOME[role] or (role != "replica" and self._is_state_work(i, axis, updating))

    def _tensor_may_cut(self, i: int, labels: frozenset[Label]) -> bool:
        """The batch where no parameter is; the sequence if it is asked for, and not in matmuls with parameters."""
        op = self.graph.ops[i]
        if op.phase == "update" or not labels & {"batch", "sequence"}:
            return True
        if "sequence" in labels and (not self.restriction.sequence_parallel or (op.primitive in MATMULS and self._with_parameters(i))):
            return False
        return "batch" not in labels or not self._with_parameters(i)

    def _with_parameters(self, i: int) -> bool:
        """Whether op i reads parameters, or sums over the batch what becomes a gradient."""
        op = self.graph.ops[i]
        if any(isinstance(o, int) and o in self.labels.weights for o in op.operands):
            return True
        return op.phase == "backward" and self.labels.has(i, "batch") and not any(self.labels.carries(r, "batch") for r in op.results)

    def _is_expert(self, i: int) -> bool:
        """Whether op i multiplies by the weights of experts."""
        if self.graph.ops[i].primitive not in MATMULS:
            return False
        sides = [{f for d in dims for f in d} for dims in self.rules[i].operands[:2]]
        return any(("expert", self.rules[i].size[f]) in self.labels.factors[i][f] for f in sides[0] & sides[1])

    def _is_state_work(self, i: int, axis: str, updating: bool) -> bool:
        """Whether op i works on state or gradients that `zero` lets this axis share out: nothing in it belongs to one example."""
        op, zero = self.graph.ops[i], self.restriction.zero
        if self.labels.has(i, "batch"):
            return False
        if updating:
            return zero >= 1
        if any(self.labels.has(i, word) for word in self._home(axis)):
            return False
        if op.inputs and all(o in self.labels.weights or o in self.graph.free for o in op.inputs):
            return zero >= 3
        return op.phase == "backward" and zero >= 2

    def _home(self, axis: str) -> frozenset[Label]:
        role = self.restriction.role(axis)
        return HOME[role] if role else frozenset()

    def left(self, ops: Sequence[int], inputs: Sequence[int], count: int, choices: Choices, mesh: LogicalMesh) -> list[int]:
        """The choices of a cluster that are left, of `count`, when wishes are followed where they can be.

        `choices.op(j, s)` is the strategy of its j-th op, `choices.input(n, s)` the sharding of its n-th input.
        """
        first: dict[Hashable, int] = {}
        for j, i in enumerate(ops):
            first.setdefault((id(self.rules[i]), self.graph.ops[i].phase, self.tag(i), choices.key(j)), j)
        some = list(first.values())
        updating = any(self.graph.ops[i].phase == "update" for i in ops)
        allowed = [s for s in range(count) if all(self.allows(ops[j], choices.op(j, s), mesh, updating) for j in some)]
        kept = _where(allowed, range(count))  # a user's constraint in the program outranks what axes are for
        for axis in mesh.names:
            role = self.restriction.role(axis)
            if role is None:
                continue
            wishing = [j for j in some if self._wishes(ops[j], axis)]
            kept = _where([s for s in kept if all(axis in _axes(choices.op(j, s)) for j in wishing)], kept) if wishing else kept
            for n, v in enumerate(inputs):
                if axis in self.restriction.sharing and v in self.other_state and self.restriction.zero >= 1:
                    kept = _where([s for s in kept if axis in choices.input(n, s).axes], kept)
        return kept

    def _wishes(self, i: int, axis: str) -> bool:
        """Whether op i had better be cut over an axis, whatever the programme thinks of it."""
        op, role = self.graph.ops[i], self.restriction.role(axis)
        if role == "tensor":
            return self.restriction.sequence_parallel and op.phase != "update" and self.labels.has(i, "sequence")
        if op.phase == "update" and not self.labels.has(i, "batch"):
            return self.restriction.zero >= 2 and role != "replica"
        return any(self.labels.has(i, word) for word in self._home(axis))

    def border(
        self, value: int, shardings: Sequence[TensorSharding], mesh: LogicalMesh, going_in: bool = True
    ) -> tuple[TensorSharding, ...]:
        """The shardings of an input or an output that are left where the step begins or ends."""
        kept = [s for s in shardings if all(self._may_lie(value, a, labels, going_in) for a, labels in self._lies(value, s, mesh))]
        spread = [axis for axis, role in self.restriction.roles if role != "tensor"] if going_in else []
        for axis in spread:
            shared = axis in self.restriction.sharing and self._in_parts(value)
            if shared or any(self.labels.carries(value, word) for word in self._home(axis)):
                kept = _where([s for s in kept if axis in s.axes], kept)
        return tuple(kept) or tuple(shardings)

    def _lies(self, value: int, sharding: TensorSharding, mesh: LogicalMesh) -> Cuts:
        dims = self.labels.dims[value]
        return [c for d, axes in enumerate(sharding.dims) for c in _labels_of(dims[d], axes, mesh)]

    def _in_parts(self, value: int) -> bool:
        """Whether a piece of state is to be kept in parts."""
        return (value in self.parameters and self.restriction.zero >= 3) or (value in self.other_state and self.restriction.zero >= 1)

    def _may_lie(self, value: int, axis: str, labels: frozenset[Label], going_in: bool) -> bool:
        role = self.restriction.role(axis)
        if role is None or (role == "tensor" and (value in self.parameters or value in self.other_state or not going_in)):
            return True
        if role == "tensor":
            return "batch" not in labels
        return (len(labels) == 1 and labels <= HOME[role]) or (role != "replica" and self._in_parts(value))

    def barred(self, value: int, mesh: LogicalMesh) -> Barred:
        """The moves that must not be made of a value: those that `zero` rules out, and what would
        leave activations in parts over `tensor` axes where those are not to cut the sequence."""
        found: set[tuple[MoveKind, str]] = set()
        zero, op = self.restriction.zero, self._maker(value)
        if (value in self.labels.weights and zero < 3) or (value in self.next_state and zero < 1):
            found |= {(kind, a) for kind in ("all_gather", "all_to_all") for a in mesh.names}
        if op != "forward" and zero < 2 and not self.labels.carries(value, "batch"):
            found |= {("reduce_scatter", a) for a in mesh.names}
        if not self.labels.carries(value, "batch"):
            replicas = [a for a, role in self.restriction.roles if role == "replica"]
            found |= {(kind, a) for kind in ("all_gather", "reduce_scatter", "all_to_all") for a in replicas}
        if not self.restriction.sequence_parallel:
            found |= {(kind, a) for kind in ("reduce_scatter", "all_to_all") for a in self.restriction.tensor}
        return frozenset(found)

    def _maker(self, value: int) -> str:
        p = self.graph.producer.get(value)
        return "forward" if p is None else self.graph.ops[p].phase


def limits_of(
    restriction: Restriction | None,
    graph: Graph,
    rules: Sequence[ShardingRule],
    carried: Sequence[tuple[int, int]],
    batch: Sequence[int] | None = None,
    known: Mapping[int, tuple[Pieces, ...]] | None = None,
) -> Limits | None:
    """What a restriction means for a program; None where it means nothing. `batch` and `known` are as `find_labels` takes them."""
    if restriction is None or restriction.is_void:
        return None
    experts = any(role == "expert" for _, role in restriction.roles)
    return Limits(restriction, graph, rules, find_labels(graph, rules, carried, experts, batch, known), tuple(carried))


def _labels_of(pieces: Pieces, axes: Axes, mesh: LogicalMesh) -> Cuts:
    """What each of these axes, major to minor, cuts of a dimension in pieces."""
    found, before = [], 1
    for axis in axes:
        parts = mesh.by_name[axis]
        found.append((axis, cut_labels(pieces, before, parts)))
        before *= parts
    return found


def _axes(strategy: Strategy) -> set[str]:
    """The axes that an op is cut over, or carries a partial value over."""
    return {a for _, axes in strategy.cuts for a in axes} | {a for a, _ in strategy.passes}


def _where(kept: list, otherwise: Iterable) -> list:
    """Those that follow a wish, or all of them where none does."""
    return kept or list(otherwise)
