"""A strategy: mesh axes assigned to the factors of a rule."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import IllegalStrategyError
from autopar.ir.mesh import LogicalMesh
from autopar.ir.rule import Dim, Factor, ShardingRule
from autopar.ir.sharding import Axes, Reduction, TensorSharding


@dataclass(frozen=True, slots=True)
class Strategy:
    """`cuts` gives the mesh axes of each cut factor, major to minor; `passes` the rule's pass used over an axis.

    An axis occurs once at most: it cuts one factor, carries one partial value, or is idle (the op then repeats along it).
    """

    cuts: tuple[tuple[Factor, Axes], ...] = ()
    passes: tuple[tuple[str, int], ...] = ()

    @property
    def by_factor(self) -> dict[Factor, Axes]:
        return dict(self.cuts)

    @property
    def is_whole(self) -> bool:
        return not self.cuts and not self.passes

    def axes(self, factor: Factor) -> Axes:
        """Mesh axes that cut `factor`."""
        for f, axes in self.cuts:
            if f == factor:
                return axes
        return ()

    def __str__(self) -> str:
        parts = [f"{f}:{'+'.join(axes)}" for f, axes in self.cuts] + [f"partial{i}:{a}" for a, i in self.passes]
        return " ".join(parts) or "whole"


WHOLE = Strategy()


def dim_axes(dim: Dim, strategy: Strategy) -> Axes:
    """Mesh axes that cut a dimension made of `dim`'s factors."""
    return tuple(a for f in dim for a in strategy.axes(f))


def operand_sharding(rule: ShardingRule, strategy: Strategy, position: int) -> TensorSharding:
    """The sharding in which the op needs operand `position`."""
    partial: list[tuple[str, Reduction]] = []
    for axis, index in strategy.passes:
        if position in rule.passes[index].operands:
            partial.append((axis, rule.passes[index].kind))
    return TensorSharding(tuple(dim_axes(d, strategy) for d in rule.operands[position]), tuple(sorted(partial)))


def result_sharding(rule: ShardingRule, strategy: Strategy, position: int) -> TensorSharding:
    """The sharding in which the op leaves result `position`.

    A cut factor that this result lacks leaves it partial if no result has the factor, or if the rule gives a reduction for
    it. Otherwise (a barrier over several values) this result has nothing to do with the factor and repeats along its axes.
    """
    partial: dict[str, Reduction] = {axis: rule.passes[index].kind for axis, index in strategy.passes}
    here = {f for d in rule.results[position] for f in d}
    for factor, axes in strategy.cuts:
        if factor in rule.reduced and factor not in here:
            partial |= dict.fromkeys(axes, rule.reduction(factor))
    return TensorSharding(tuple(dim_axes(d, strategy) for d in rule.results[position]), tuple(sorted(partial.items())))


def check_strategy(rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> None:
    """Raise `IllegalStrategyError` unless the strategy obeys the rule on this mesh."""
    used = [a for _, axes in strategy.cuts for a in axes] + [a for a, _ in strategy.passes]
    if len(set(used)) != len(used) or any(a not in mesh.by_name for a in used):
        raise IllegalStrategyError(f"strategy `{strategy}` uses an axis twice, or one that mesh ({mesh}) lacks.")
    for factor, axes in strategy.cuts:
        if factor not in rule.factors:
            raise IllegalStrategyError(f"factor `{factor}` of rule `{rule}` must not be cut.")
        if rule.size[factor] % mesh.size(axes):
            raise IllegalStrategyError(f"factor `{factor}` of size {rule.size[factor]} does not divide by {mesh.size(axes)}.")
    if any(strategy.axes(f) for f in rule.manual) and any(strategy.axes(f) != (f,) or mesh.size((f,)) != rule.size[f] for f in rule.manual):
        raise IllegalStrategyError(f"factors {sorted(rule.manual)} are mesh axes: each is cut by itself, all or none: {strategy}.")
    for dims in (*rule.operands, *rule.results):
        for dim in dims:
            if not _contiguous(dim, strategy, rule, mesh):
                raise IllegalStrategyError(f"dimension ({' '.join(dim)}) would be cut inside a factor that is not fully cut.")
    if any(not 0 <= index < len(rule.passes) for _, index in strategy.passes):
        raise IllegalStrategyError(f"rule `{rule}` has no such way of passing partial values: {strategy}.")
    for position in range(len(rule.results)):
        kinds = {kind for _, kind in result_sharding(rule, strategy, position).partial}
        if len(kinds) > 1:
            raise IllegalStrategyError(f"a result would be partial in two ways at once ({', '.join(sorted(kinds))}): {strategy}.")


def is_legal(rule: ShardingRule, strategy: Strategy, mesh: LogicalMesh) -> bool:
    """Whether `check_strategy` passes."""
    try:
        check_strategy(rule, strategy, mesh)
    except IllegalStrategyError:
        return False
    return True


def _contiguous(dim: Dim, strategy: Strategy, rule: ShardingRule, mesh: LogicalMesh) -> bool:
    """A merged dimension is cut in contiguous blocks only if every factor before its last cut one is cut to the end."""
    cut = [bool(strategy.axes(f)) for f in dim]
    if True not in cut:
        return True
    last = len(cut) - 1 - cut[::-1].index(True)
    return all(rule.size[f] == mesh.size(strategy.axes(f)) for f in dim[:last])
