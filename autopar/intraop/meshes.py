"""The search for a plan: every logical mesh, and on each what is made again; the fastest plan that fits is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.costs import Pricer, pricer_of
from autopar.errors import InfeasibleError, SolverError
from autopar.intraop.choose import Chosen, Progress, SolveOptions, TooSlow, choose_on
from autopar.intraop.enumerate import Pins, enumerate_problem
from autopar.intraop.evaluate import Infeasible
from autopar.intraop.remat import Advice, Promise, Variants, least_held
from autopar.intraop.solvers.highs import relaxed
from autopar.intraop.solvers.scaled import LARGE_COLUMNS
from autopar.ir.mesh import LogicalMesh

MARGINS = (0.98, 0.9, 0.8)
"""Shares of the budget under which it is sought what to make again, one after the other until a whole answer fits."""

WORTHWHILE = 2e-3
"""Share of the step time that making values again must promise to save where a plan fits without."""

ADVICE_SHARE = 0.25
"""Share of a mesh's time limit that advice on what to make again may take."""

BOUND_SHARE = 0.25
"""Share of a mesh's time limit after which its bound is not waited for."""

REFUSAL_S = 20.0
"""Seconds after which no more logical meshes, or numbers of microbatches, are looked at for what would fit."""

RELIABLE = 0.03
"""Share by which a plan may be slower than promised, for what is promised on other meshes to count."""

OVERFULL = 1.2
"""From so many times the budget, proven on one logical mesh, none with as many axes is looked at: all have as many devices."""

NONE = Promise()
Values = frozenset[int]


class Overfull(InfeasibleError):
    """A mesh on which far more memory is needed than there is, whatever is made again."""


@dataclass(frozen=True, eq=False)
class Search:
    """What is sought: a plan of one of the `variants` under `budget` bytes per device. `pins` are by mesh, `clock` is in seconds.

    Plans that take `below` seconds or more are of no use.
    """

    variants: Variants
    cluster: Any
    budget: float | None
    pins: Callable[[LogicalMesh], Pins]
    options: SolveOptions
    progress: Progress
    clock: Callable[[], float]
    as_written: bool = False
    below: float | None = None

    def plan(self, mesh: LogicalMesh, values: Values, least: bool, below: float = float("inf")) -> Chosen:
        """The best plan on a mesh that makes these values again and takes less than `below` seconds.

        Raises `InfeasibleError`, which says what would fit if `least`.
        """
        shape, pricer = self.variants.shape(values), self.pricer(mesh)
        found = choose_on(shape, pricer, self.budget, self.pins(mesh), self.options, self.progress, self.clock, least, below)
        return replace(found, recomputed=tuple(sorted(values)))

    def pricer(self, mesh: LogicalMesh) -> Pricer:
        return pricer_of(self.cluster, mesh, self.as_written)

    def best(self, mesh: LogicalMesh, least: bool = True, below: float = float("inf"), other: Promise = NONE) -> Chosen:
        """The best plan on a mesh, with values made again as `variants.mode` says: where memory asks for it, if it is `auto`.

        Where nothing fits, what holds least is tried and, if it does not fit either, named by `InfeasibleError`; without `least`
        nothing more is tried, and plans that take `below` seconds or more are of no use. Where advice on what to make again promises no
        fewer seconds than on the `other` mesh with a plan, those here would hardly be faster than that, and take long to find.
        """
        if self.variants.mode != "auto" or self.budget is None:
            return self.plan(mesh, self.variants.asked, least, below)
        every = self.variants.every()
        if not every:
            return self.plan(mesh, every, least, below)
        plain = self._plain(mesh, below)
        if plain is not None and not plain.memory_rows:
            return plain
        try:
            again = self._again(mesh, below if plain is None else min(below, plain.price.total_s * (1 - WORTHWHILE)), other)
        except Overfull:
            if plain is None and not least:
                raise
            again = None
        found = [c for c in (plain, again) if c is not None]
        if found:
            return min(found, key=lambda c: c.price.total_s)
        if not least:
            raise InfeasibleError(f"no plan on mesh ({mesh}) that was looked for fits {self.budget:,.0f} bytes per device.")
        return self._least(mesh)

    def _plain(self, mesh: LogicalMesh, below: float) -> Chosen | None:
        """The best plan that makes nothing again, if one fits and takes less than `below` seconds."""
        assert self.budget is not None
        if self.variants.held_at_least(mesh.num_devices) > self.budget:
            return None
        try:
            return self.plan(mesh, frozenset(), False, below)
        except InfeasibleError:
            return None

    def _again(self, mesh: LogicalMesh, below: float, other: Promise) -> Chosen | None:
        """The best plan found that makes values again, with a step that promises to take less than `below` seconds and than on the `other`
        mesh. Raises `Overfull` where no mesh like this one may have a plan.

        What to make again comes from relaxations under the budget, and from ones under less where the answers do not fit whole. A large
        program is planned once, since that takes long and parts of its classes are many layers.
        """
        assert self.budget is not None
        limit = None if self.options.time_limit_s is None else ADVICE_SHARE * self.options.time_limit_s
        advice = Advice(self.variants, self.pricer(mesh), self.budget, self.pins(mesh), limit, self.options.bases)
        found: list[Chosen] = []
        try:
            promise = Promise(advice.all_again_s)
        except (Infeasible, SolverError):
            return None
        if promise.all_again_s >= other.all_again_s * (1 - WORTHWHILE):
            return None
        for n, ask in enumerate(_questions(advice)):
            if found and (n > 1 or found[0].solve.variables > LARGE_COLUMNS):
                break
            self.progress(f"mesh {mesh}: what to make again, try {n + 1}")
            try:
                values, seconds = ask()
                promise = replace(promise, seconds=min(promise.seconds, seconds))
                if seconds > below or promise.seconds >= other.seconds * (1 - WORTHWHILE):
                    break  # nor would it be faster with less memory
                found.append(replace(self.plan(mesh, values, False, below), promise=promise))
            except Infeasible as error:
                if n == 0 and error.floor_bytes > OVERFULL * self.budget:
                    raise Overfull(f"on mesh {mesh} everything takes {error.floor_bytes:,.0f} bytes at least.") from None
                break  # nor would less memory do
            except (InfeasibleError, SolverError):
                continue
        return min(found, key=lambda c: c.price.total_s, default=None)

    def _least(self, mesh: LogicalMesh) -> Chosen:
        """A plan that holds as little as can be; `InfeasibleError` where even that is too much."""
        held = least_held(self.variants, self.pricer(mesh), self.pins(mesh), self.options.time_limit_s)
        refused = []
        for values in (held,) if held is not None else dict.fromkeys((self.variants.every(), Values())):
            try:
                return self.plan(mesh, values, True)
            except InfeasibleError as error:
                refused.append(error)
        raise _smallest(refused)

    def bound(self, mesh: LogicalMesh) -> float | None:
        """Seconds that no plan on this mesh can be faster than, whatever memory there is; None where that takes long to know."""
        problem, _ = enumerate_problem(self.variants.shape(self.variants.asked), self.pricer(mesh), None, self.pins(mesh))
        limit = self.options.time_limit_s
        try:
            found = relaxed(problem, time_limit_s=None if limit is None else BOUND_SHARE * limit, bases=self.options.bases)
        except Infeasible:
            return 0.0
        seconds = None if found is None else found[1]
        known = "it takes long to say what it costs at least" if seconds is None else f"at least {seconds * 1e3:.3f} ms"
        self.progress(f"mesh {mesh}: {known}, whatever memory there is")
        return seconds


def _questions(advice: Advice) -> Iterator[Callable[[], tuple[Values, float]]]:
    yield partial(advice.values, 1.0, round)
    yield advice.whole
    for share in MARGINS:
        yield partial(advice.values, share)


def choose(search: Search, meshes: Sequence[LogicalMesh], least: bool = True) -> tuple[Chosen, tuple[tuple[str, float], ...]]:
    """The best plan over `meshes`, and the objective on each (infinite where none was found, a bound where it was passed over).

    The mesh on which the program is fastest if memory does not matter comes first, those where that is not known last, and those on
    which even that is slower than a plan that was found are passed over. Raises the least bad `InfeasibleError` when none fits, which
    says what would if `least`, and `SolverError` when time ran out everywhere.
    """
    hopeless = search.budget is not None and search.variants.needed_at_least(meshes[0].num_devices) > search.budget
    if hopeless and not least:
        raise InfeasibleError("whatever is made again, this takes more memory.")
    if len(meshes) == 1 and search.below is None:
        alone = search.best(meshes[0], least)
        _tell(search, alone)
        return alone, ((str(meshes[0]), alone.price.total_s),)
    if hopeless:
        _at_last(search, sorted(meshes, key=lambda m: len(m.sizes)))  # refuses, or what is about the least that is needed was too much
    looked = _Looked(search)
    bounds = {mesh: search.bound(mesh) for mesh in meshes}
    for mesh in sorted(meshes, key=lambda m: _rank(bounds[m])):
        looked.look(mesh, bounds[mesh] or 0.0)
    found, tried = looked.found, looked.tried
    if not found and looked.unanswered:
        raise looked.unanswered[0]
    if not found and not looked.refused:
        raise TooSlow("no plan can be as fast as what is known.")
    if not found and not least:
        raise InfeasibleError("no plan that was looked for fits, or is as fast as what is known.")
    if not found:
        found.append(_at_last(search, looked.refused))
        tried[str(found[0].pricer.mesh)] = found[0].price.total_s
    best = min(found, key=lambda c: c.price.total_s)
    total = replace(best, enumerate_s=sum(c.enumerate_s for c in found), solve_s=sum(c.solve_s for c in found))
    return total, tuple(tried.items())


class _Looked:
    """What has been found on the meshes so far: plans, seconds by mesh, meshes on which nothing fits or is as fast, and solves without an
    answer.

    `overfull` are numbers of axes of meshes on which far more memory is needed than there is.
    """

    def __init__(self, search: Search):
        self.search = search
        self.found: list[Chosen] = []
        self.tried: dict[str, float] = {}
        self.refused: list[LogicalMesh] = []
        self.unanswered: list[SolverError] = []
        self.overfull: set[int] = set()

    def look(self, mesh: LogicalMesh, bound: float) -> None:
        """Look for a plan on a mesh on which none takes less than `bound` seconds."""
        below = min([c.price.total_s for c in self.found] or [_most(self.search)])
        if bound > below * (1 - self.search.options.gap):
            self.tried[f"{mesh}, at least"] = bound
            return
        self.tried[str(mesh)] = float("inf")
        if len(mesh.sizes) in self.overfull:
            self.refused.append(mesh)
            return
        try:
            chosen = self.search.best(mesh, False, below, _kept_promise(self.found))
        except InfeasibleError as error:
            self.refused.append(mesh)
            if isinstance(error, Overfull):
                self.overfull.add(len(mesh.sizes))
        except SolverError as error:
            self.search.progress(f"mesh {mesh}: {error}")
            self.unanswered.append(error)
        else:
            self.found.append(chosen)
            self.tried[str(mesh)] = chosen.price.total_s
            _tell(self.search, chosen)


def _kept_promise(found: Sequence[Chosen]) -> Promise:
    """The promise of the fastest plan, if it came out as promised: then what is promised on other meshes says how fast they are."""
    fastest = min(found, key=lambda c: c.price.total_s, default=None)
    kept = fastest is not None and fastest.price.total_s <= fastest.promise.seconds * (1 + RELIABLE)
    return fastest.promise if fastest is not None and kept else NONE


def _most(search: Search) -> float:
    """Seconds that a plan may take to be of use."""
    return float("inf") if search.below is None else search.below


def _rank(bound: float | None) -> float:
    """Bounds in order, those that are equal but for rounding alike, unknown ones last."""
    return float("inf") if bound is None else float(f"{bound:.4g}")


def _tell(search: Search, chosen: Chosen) -> None:
    seconds, solve = chosen.price.total_s, chosen.solve
    search.progress(f"mesh {chosen.pricer.mesh}: {seconds * 1e3:.3f} ms, {solve.status}, gap {solve.gap:.2g}")


def _at_last(search: Search, meshes: Sequence[LogicalMesh]) -> Chosen:
    """A plan that what holds least may still allow; else the least bad `InfeasibleError`, of as many meshes as there is time for."""
    begin, refused = search.clock(), list[InfeasibleError]()
    for mesh in meshes:
        try:
            return search.best(mesh)
        except InfeasibleError as error:
            refused.append(error)
        if search.clock() - begin > REFUSAL_S:
            break
    raise _smallest(refused)


def _smallest(refused: Sequence[InfeasibleError]) -> InfeasibleError:
    """The refusal that asks for the least memory; 0 says that there was no time to find the least."""
    return min(refused, key=lambda e: e.peak_bytes or float("inf"))
