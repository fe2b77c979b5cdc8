"""Reads the collectives out of a compiled program's HLO text.

The text is `jax.jit(f).lower(...).compile().as_text()`. Which planned collective an instruction stands for is told by its scope name,
`autopar.c12`, which survives in the metadata also when the compiler combines several collectives into one.

>>> text = '''
... HloModule jit_f, num_partitions=4
... ENTRY %main (p: f32[8,4]) -> f32[8,4] {
...   %p = f32[8,4]{1,0} parameter(0)
...   ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups=[2,2]<=[4], metadata={op_name="jit(f)/autopar.c7/psum"}
... }
... '''
>>> [(c.kind, c.ids, c.nbytes, c.groups) for c in read_collectives(text)]
[('all_reduce', ('c7',), 128, ((0, 1), (2, 3)))]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from autopar.errors import CheckError
from autopar.ir.dtypes import itemsize

Groups = tuple[tuple[int, ...], ...]
Array = tuple[str, tuple[int, ...]]

# HLO's names, and those of plans and of the cost models.
KINDS = {name: name.replace("-", "_") for name in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all")}
KINDS |= {"collective-permute": "permute", "collective-broadcast": "broadcast"}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_COLLECTIVE = re.compile(rf"\b({'|'.join(KINDS)})(-start)?\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ELEMENT = re.compile(r"\bget-tuple-element\((?:[^%)]* )?%?([\w.-]+)\)")
_ID = re.compile(r"\bautopar\.(c\d+)\b")
_ARRAY = re.compile(r"\b(pred|[a-z]\w*)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)

_EXPLICIT_GROUPS = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?"
_IOTA_GROUPS = re.compile(r"\breplica_groups=" + _IOTA)
_MESH_GROUPS = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(((?:\[[\d,]+\]|[^()]|\([\d,]+\))*)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_AXIS = re.compile(r"'?([^',=:]+)'?(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class CompiledCollective:
    """A collective of the compiled program.

    `ids` are the planned collectives it stands for, several where the compiler combined them, none for one that was not planned.
    `operands` are (dtype, local shape) pairs, `nbytes` their bytes together, on one device: of an all-gather the shard, of
    an all-reduce or reduce-scatter the full local operand. `groups` holds device numbers; of a permutation, the devices that its
    `pairs` connect. `times` is how often it runs per call of the program, with 1 for each loop whose trip count is not known.
    """

    name: str
    kind: str
    ids: tuple[str, ...]
    operands: tuple[Array, ...]
    nbytes: int
    groups: Groups
    pairs: Groups
    computation: str
    times: int

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max((len(g) for g in self.groups), default=1)

    def __str__(self) -> str:
        arrays = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in self.operands)
        return f"{self.kind} {self.name} ({arrays}) over {self.group_size} devices, {self.times} times"


@dataclass
class _Computation:
    """The instructions of one computation: name -> text after `name = `."""

    name: str
    is_entry: bool
    instructions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Module:
    computations: dict[str, _Computation]
    num_devices: int

    @cached_property
    def callers(self) -> dict[str, list[tuple[str, int]]]:
        """Computation -> (caller, how often per run of the caller) of every call."""
        found: dict[str, list[tuple[str, int]]] = {}
        for computation in self.computations.values():
            for text in computation.instructions.values():
                for callee, times in _calls(text):
                    found.setdefault(callee, []).append((computation.name, times))
        return found

    def times(self, name: str) -> int:
        """How often a computation runs per run of the program; once where nothing is known to call it."""
        if self.computations[name].is_entry or name not in self.callers:
            return 1
        return sum(self.times(caller) * times for caller, times in self.callers[name])


def read_collectives(text: str) -> tuple[CompiledCollective, ...]:
    """The collectives of a compiled program, in the order of its text; a `-start` and `-done` pair is one.

    Raises `CheckError` where the text is not HLO, or writes device groups in a way that is not known here.
    """
    module = _read_module(text)
    if not any(c.is_entry for c in module.computations.values()):
        raise CheckError("this is not the text of a compiled program: it has no ENTRY. Pass `compiled.as_text()`.")
    return tuple(_collectives(module))


def _read_module(text: str) -> _Module:
    computations: dict[str, _Computation] = {}
    current: _Computation | None = None
    for line in text.splitlines():
        if current is None or not line.startswith((" ", "\t")):
            header = _COMPUTATION.match(line)
            current = _Computation(header[2], bool(header[1])) if header else None
            if current is not None:
                computations[current.name] = current
        elif instruction := _INSTRUCTION.match(line):
            current.instructions[instruction[1]] = line[instruction.end() :]
    partitions = _PARTITIONS.search(text)
    return _Module(computations, int(partitions[1]) if partitions else 1)


def _calls(text: str) -> Iterator[tuple[str, int]]:
    """(computation, times) that an instruction runs. The body that an `all-gather-start` wraps is the same collective again: 0 times."""
    bare = _STRING.sub('""', text)
    wraps = _COLLECTIVE.search(bare) is not None
    trips = _TRIPS.search(text)
    for keyword, callee in _CALLED.findall(bare):
        if wraps:
            yield callee, 0
        elif keyword == "body":
            yield callee, int(trips[1]) if trips else 1
        elif keyword == "condition":
            yield callee, int(trips[1]) + 1 if trips else 1
        else:
            yield callee, 1
    for names in _CALLED_LIST.findall(bare):
        yield from ((name.strip().lstrip("%"), 1) for name in names.split(",") if name.strip())


def _collectives(module: _Module) -> Iterator[CompiledCollective]:
    for computation in module.computations.values():
        for name, text in computation.instructions.items():
            bare = _COMMENT.sub("", _STRING.sub('""', text))
            found = _COLLECTIVE.search(bare)
            if found is None or not (times := module.times(computation.name)):
                continue
            arguments = _arguments(bare, found.end())
            operands = tuple(array for a in arguments for array in _arrays(a, computation))
            pairs = _pairs(bare)
            yield CompiledCollective(
                name=name,
                kind=KINDS[found[1]],
                ids=_ids(text) if len(operands) == 1 else _ids_of_parts(name, text, computation),
                operands=operands,
                nbytes=sum(prod(shape) * itemsize(dtype) for dtype, shape in operands),
                groups=_connected(pairs) if pairs else _groups(bare, module.num_devices),
                pairs=pairs,
                computation="entry" if computation.is_entry else computation.name,
                times=times,
            )


def _ids(text: str) -> tuple[str, ...]:
    names = _OP_NAME.search(text)
    return tuple(dict.fromkeys(_ID.findall(names[1]))) if names else ()


def _ids_of_parts(name: str, text: str, computation: _Computation) -> tuple[str, ...]:
    """The ids of a collective of several operands: its own, and those of the elements taken from its result, which keep theirs."""
    made = {name, *(other for other, what in computation.instructions.items() if re.search(rf"-done\(.*%?{re.escape(name)}\)", what))}
    parts = (what for what in computation.instructions.values() if (taken := _ELEMENT.search(what)) and taken[1] in made)
    return tuple(dict.fromkeys((*_ids(text), *(i for part in parts for i in _ids(part)))))


def _arguments(text: str, start: int) -> list[str]:
    """The operands of a call whose parenthesis opens just before `start`."""
    depth, arguments, begin = 0, [], start
    for i in range(start, len(text)):
        c = text[i]
        if depth == 0 and c in ",)":
            arguments.append(text[begin:i].strip())
            begin = i + 1
            if c == ")":
                break
        depth += (c in "([{") - (c in ")]}")
    return [a for a in arguments if a]


def _arrays(argument: str, computation: _Computation) -> Iterator[Array]:
    """The arrays of an operand: from its type where it is written beside the name, else from the instruction that made it."""
    name = argument.split()[-1].lstrip("%")
    written = argument if len(argument.split()) > 1 else _type(computation.instructions.get(name, ""))
    for dtype, dims in _ARRAY.findall(written):
        if dtype != "token":
            yield _dtype(dtype), tuple(int(d.strip("<=")) for d in dims.split(",") if d)


def _type(text: str) -> str:
    """The type at the beginning of an instruction: `f32[8,4]{1,0}`, or a tuple of such in parentheses."""
    if not text.startswith("("):
        return text.split(" ", 1)[0]
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[: i + 1]
    return text


def _dtype(name: str) -> str:
    """HLO's name of a dtype -> numpy's: `f32` -> `float32`, `s8` -> `int8`, `f8e4m3fn` -> `float8_e4m3fn`."""
    if name == "pred":
        return "bool"
    long = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
    parts = re.fullmatch(r"(bf|[fsuc])(\d+)(\w*)", name)
    if parts is None:
        raise CheckError(f"dtype `{name}` in the compiled program is not known here; add it to autopar/emit/hlo.py.")
    small = f"_{parts[3]}" if parts[3] else ""
    return long[parts[1]] + parts[2] + small


def _pairs(text: str) -> Groups:
    found = _PAIRS.search(text)
    return _numbers(found[1]) if found else ()


def _numbers(text: str) -> Groups:
    """`{0,1},{2,3}` -> ((0, 1), (2, 3))."""
    return tuple(tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", text))


def _connected(pairs: Groups) -> Groups:
    """The sets of devices that a permutation's pairs connect."""
    group: dict[int, set[int]] = {}
    for a, b in pairs:
        joined = group.get(a, {a}) | group.get(b, {b})
        group.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(g)) for g in group.values()}))


def _groups(text: str, num_devices: int) -> Groups:
    """Device groups in any of HLO's ways of writing them: explicit, iota, by the axes of a mesh, or empty for all devices."""
    if mesh := _MESH_GROUPS.search(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if iota := _IOTA_GROUPS.search(text):
        return _rows(_iota(iota[1], iota[2], iota[3]))
    if explicit := _EXPLICIT_GROUPS.search(text):
        return _numbers(explicit[1]) or (tuple(range(num_devices)),)
    if "replica_groups=" not in text:
        return (tuple(range(num_devices)),)
    written = text[text.index("replica_groups=") :][:80]
    raise CheckError(f"device groups written as `{written}` are not known here; add them to autopar/emit/hlo.py.")


def _iota(shape: str, reshape: str, transpose: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: the numbers 0, 1, ... in shape (2, 4), transposed, then read in shape (4, 2)."""
    source = _integers(reshape or shape)
    numbers = np.arange(prod(source)).reshape(source)
    if transpose:
        numbers = numbers.transpose(_integers(transpose))
    return numbers.reshape(_integers(shape) if reshape else -1)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """`mesh['x'=2,'y'=4] {'y'}`: groups along y. `'y':(2)2` is the part of y of size 2 that has 2 more major positions before it."""
    sizes = {name: int(n) for name, n in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    wanted = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(axes)]
    parts = []  # of every axis, (name, size of what is major to the part, size of the part), cut where a wanted part begins or ends
    for name, size in sizes.items():
        bounds = sorted({1, size} | {b for other, before, n in wanted if other == name for b in (before, before * n)})
        parts += [(name, low, high // low) for low, high in zip(bounds, bounds[1:], strict=False)]
    chosen = [parts.index(p) for name, before, n in wanted for p in parts if p[0] == name and before <= p[1] < before * n]
    rest = [i for i in range(len(parts)) if i not in chosen]
    devices = _device_ids(device_ids, prod(sizes.values())).reshape([n for _, _, n in parts])
    return _rows(devices.transpose(rest + chosen).reshape(-1, prod(parts[i][2] for i in chosen)))


def _device_ids(text: str | None, count: int) -> np.ndarray:
    """The devices of a mesh in its order: `0,2,1,3`, or `[2,2]T(1,0)`; counted up where nothing is said."""
    if not text:
        return np.arange(count)
    iota = re.fullmatch(_IOTA, text.strip())
    return _iota(iota[1], iota[2], iota[3]).reshape(-1) if iota else np.array(_integers(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in groups)
