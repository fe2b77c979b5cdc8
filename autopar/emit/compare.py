"""Planned collectives beside compiled ones: by id, then kind, group and bytes.

What a backend is known to rewrite is data, `REWRITES`, and is applied to the plan before it is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal as OneOf

from autopar.emit.hlo import KINDS, CompiledCollective
from autopar.ir.dtypes import itemsize
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import Collective

ANY_KIND = frozenset(KINDS.values())


@dataclass(frozen=True)
class Rewrite:
    """What the compiler of `backends` makes of a planned collective, without changing what it computes.

    `dtype`: collectives of these kinds that move a dtype whose name begins with `planned` are compiled to move `compiled`.
    `narrow`: a value that is cast to half the size after such a collective of `planned` is cast before it.
    `combine`: several collectives of one such kind over the same groups become one with several operands.
    """

    name: str
    change: OneOf["dtype", "combine", "narrow"]
    backends: frozenset[str]
    reason: str
    kinds: frozenset[str] = ANY_KIND
    planned: str = ""
    compiled: str = ""

    def applies(self, backend: str, kind: str) -> bool:
        return backend in self.backends and kind in self.kinds


CPU = frozenset({"cpu"})
EVERYWHERE = frozenset({"cpu", "cuda", "rocm", "tpu"})

REWRITES: tuple[Rewrite, ...] = (
    Rewrite("bfloat16 moves as float32", "dtype", CPU, "the CPU compiler widens bfloat16 everywhere", ANY_KIND, "bfloat16", "float32"),
    Rewrite("float8 moves as float16", "dtype", CPU, "the CPU compiler widens the 8-bit floats", ANY_KIND, "float8", "float16"),
    Rewrite(
        *("cast before it moves", "narrow", frozenset({"cuda", "tpu"}), "what is cast after it moved is moved in half the bytes"),
        *(frozenset({"all_gather", "all_reduce"}), "float32"),
    ),
    Rewrite("combined", "combine", EVERYWHERE, "one call with several operands pays the latency once"),
)


@dataclass(frozen=True)
class Difference:
    """What does not agree between planned and compiled collectives of the same ids: `kind`, `group`, `bytes` or `combined`."""

    ids: tuple[str, ...]
    what: str
    planned: str
    compiled: str

    def __str__(self) -> str:
        return f"{'+'.join(self.ids)}: {self.what} is {self.compiled} in the compiled program, {self.planned} in the plan"


@dataclass(frozen=True)
class CollectiveCheck:
    """Whether the collectives of the compiled program are those of the plan; bytes are per device and step.

    `planned_bytes` are those of the plan as `backend` compiles them. `rewrites` names those that were needed for agreement.
    """

    agree: bool
    missing: tuple[Collective, ...]
    unexpected: tuple[CompiledCollective, ...]
    differing: tuple[Difference, ...]
    planned_bytes: int
    compiled_bytes: int
    rewrites: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"collectives {'agree' if self.agree else 'differ'}: {self.planned_bytes} bytes planned, {self.compiled_bytes} compiled"]
        lines += [f"  not in the compiled program: {c.id} {c.kind} over {'+'.join(c.axes)}, {c.purpose} {c.source}" for c in self.missing]
        lines += [f"  not in the plan: {c}" for c in self.unexpected]
        return "\n".join([*lines, *(f"  {d}" for d in self.differing)])


def compare_collectives(
    planned: Sequence[Collective],
    compiled: Sequence[CompiledCollective],
    backend: str,
    mesh: LogicalMesh | None = None,
    rewrites: Sequence[Rewrite] = REWRITES,
) -> CollectiveCheck:
    """Compare a plan's collectives with those that `read_collectives` found in a program compiled for `backend`.

    Planned collectives that the compiler combined are compared together with what they became. With `mesh`, the devices of each
    group are compared too, not its size alone. Bytes are `nbytes` times `times`: a collective moved out of its loop differs.
    """
    known = {c.id for c in planned}
    unexpected = tuple(c for c in compiled if not known.intersection(c.ids))
    differing: list[Difference] = []
    missing: list[Collective] = []
    used: dict[str, None] = {}
    total = 0
    for wanted, found in _together(planned, compiled):
        sizes = [_compiled_bytes(c, backend, rewrites) for c in wanted]
        total += sum(nbytes for nbytes, _ in sizes)
        if not found:
            missing += wanted
            continue
        differences = _differences(wanted, found, sum(nbytes for nbytes, _ in sizes), mesh)
        combine = _combining(wanted, found, backend, rewrites)
        if combine is None:
            joined = max((c for c in found), key=lambda c: len(c.ids))
            differences.append(Difference(joined.ids, "combined", "apart", f"one {joined.kind}"))
        narrow = _narrowing(wanted, found, differences, backend, rewrites)
        if narrow:
            differences = [d for d in differences if d.what != "bytes"]
            used[narrow] = None
        differing += differences
        used |= dict.fromkeys(name for _, name in sizes if name) | dict.fromkeys([combine] if combine else [])
    compiled_bytes = sum(c.nbytes * c.times for c in compiled)
    agree = not (missing or unexpected or differing)
    return CollectiveCheck(agree, tuple(missing), unexpected, tuple(differing), total, compiled_bytes, tuple(used))


def _together(
    planned: Sequence[Collective], compiled: Sequence[CompiledCollective]
) -> Iterable[tuple[list[Collective], list[CompiledCollective]]]:
    """Planned and compiled collectives in sets that share ids: one and one, unless the compiler combined or repeated some."""
    leader = {c.id: c.id for c in planned}

    def find(i: str) -> str:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    of_compiled = [[i for i in c.ids if i in leader] for c in compiled]
    for ids in of_compiled:
        for i in ids[1:]:
            leader[find(i)] = find(ids[0])
    sets: dict[str, tuple[list[Collective], list[CompiledCollective]]] = {}
    for wanted in planned:
        sets.setdefault(find(wanted.id), ([], []))[0].append(wanted)
    for found, ids in zip(compiled, of_compiled, strict=True):
        if ids:
            sets[find(ids[0])][1].append(found)
    return sets.values()


def _compiled_bytes(wanted: Collective, backend: str, rewrites: Sequence[Rewrite]) -> tuple[int, str]:
    """Bytes per step that a planned collective is compiled to move, and the rewrite that changed them."""
    for r in rewrites:
        if r.change == "dtype" and wanted.dtype.startswith(r.planned) and r.applies(backend, wanted.kind):
            return wanted.nbytes * wanted.times * itemsize(r.compiled) // itemsize(wanted.dtype), r.name
    return wanted.nbytes * wanted.times, ""


def _combining(wanted: Sequence[Collective], found: Sequence[CompiledCollective], backend: str, rewrites: Sequence[Rewrite]) -> str | None:
    """The rewrite by which several planned collectives became one; empty where none was needed, None where none is known."""
    if len(wanted) == 1:
        return ""
    names = [r.name for r in rewrites if r.change == "combine" and all(r.applies(backend, c.kind) for c in found)]
    return names[0] if names else None


def _narrowing(
    wanted: Sequence[Collective],
    found: Sequence[CompiledCollective],
    differences: Sequence[Difference],
    backend: str,
    rewrites: Sequence[Rewrite],
) -> str:
    """The rewrite that moves the planned elements in fewer bytes, where that is all that differs; empty where there is none."""
    elements = sum(c.nbytes * c.times // itemsize(c.dtype) for c in wanted)
    if sum(prod(shape) * c.times for c in found for _, shape in c.operands) != elements:
        return ""
    least = sum(c.nbytes * c.times // (2 if c.dtype == "float32" else 1) for c in wanted)
    most, moved = sum(c.nbytes * c.times for c in wanted), sum(c.nbytes * c.times for c in found)
    names = [r.name for r in rewrites if r.change == "narrow" and all(r.applies(backend, c.kind) for c in found)]
    return names[0] if names and {d.what for d in differences} == {"bytes"} and least <= moved < most else ""


def _differences(
    wanted: Sequence[Collective], found: Sequence[CompiledCollective], nbytes: int, mesh: LogicalMesh | None
) -> list[Difference]:
    ids = tuple(c.id for c in wanted)
    compared = [
        ("kind", {c.kind for c in wanted}, {c.kind for c in found}),
        ("group", {_planned_group(c, mesh) for c in wanted}, {_compiled_group(c, wanted, mesh) for c in found}),
        ("bytes", {str(nbytes)}, {str(sum(c.nbytes * c.times for c in found))}),
    ]
    return [Difference(ids, what, " and ".join(sorted(a)), " and ".join(sorted(b))) for what, a, b in compared if a != b]


def _planned_group(wanted: Collective, mesh: LogicalMesh | None) -> str:
    """The devices that take part: `2 devices`, or with a mesh the groups themselves."""
    if mesh is None:
        return f"{wanted.group_size} devices"
    return _written(_axis_groups(wanted.axes, mesh))


def _compiled_group(found: CompiledCollective, wanted: Sequence[Collective], mesh: LogicalMesh | None) -> str:
    """As for planned ones; a permutation need not connect all of the devices along its axes."""
    if mesh is None:
        return f"{found.group_size} devices"
    for c in wanted if found.kind == "permute" else ():
        along = list(map(set, _axis_groups(c.axes, mesh)))
        if c.kind == "permute" and all(any(group.issuperset(g) for group in along) for g in found.groups):
            return _planned_group(c, mesh)
    return _written(found.groups)


def _axis_groups(axes: Sequence[str], mesh: LogicalMesh) -> list[tuple[int, ...]]:
    """Device numbers that differ along `axes` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(mesh.num_devices):
        place = tuple(device // mesh.stride(a) % mesh.by_name[a] for a in mesh.names if a not in axes)
        groups.setdefault(place, []).append(device)
    return [tuple(g) for g in groups.values()]


def _written(groups: Iterable[Iterable[int]]) -> str:
    return str(sorted(sorted(g) for g in groups))
