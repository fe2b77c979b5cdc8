"""Plans as JSON, and the fingerprint that ties a plan to its program.

A plan file is one JSON object whose keys are the attribute names of `Plan`. It is read strictly: every key must be there, of
its type, and nothing else. Reading only ever builds the dataclasses of `autopar.ir`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from autopar.errors import CheckError, PlanError
from autopar.ir.graph import Aval, Graph, Op, Operand
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import OMITTED, Leaf, Part, Plan, PlannedMove, ShardingPlan
from autopar.ir.sharding import Move, TensorSharding
from autopar.ir.strategy import Strategy

SCHEMA = 3

_AGAIN = "Plan again, or take an intact copy of the file."
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DTYPE = re.compile(
    r"bool|float0|bfloat16|float(16|32|64)|complex(64|128)|u?int(2|4|8|16|32|64)|float(8|6|4)_\w+|key<[\w-]+>",
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as JSON. The file appears whole or not at all, and replaces one that is there."""
    target = Path(path)
    text = _document(plan_to_dict(plan))
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _document(value: Any, depth: int = 0) -> str:
    """JSON in which every entry of the upper levels has a line of its own, so that versions of a plan compare line by line."""
    entries: list[str] = []
    if depth < 3 and isinstance(value, dict) and value:
        entries = [f"{json.dumps(k)}: {_document(v, depth + 1)}" for k, v in value.items()]
    elif depth < 3 and isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        entries = [json.dumps(v, allow_nan=False) for v in value]
    if not entries:
        return json.dumps(value, allow_nan=False)
    inner = ",\n".join(" " * (depth + 1) + entry for entry in entries)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n{inner}\n{' ' * depth}{end}"


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `save_plan` wrote. Raises `PlanError` where the file is absent, cut off, or no plan."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as e:
        raise PlanError(f"the plan {path} cannot be read: {e.strerror}. Give the path of a file that `Plan.save` wrote.") from e
    except (ValueError, RecursionError) as e:
        raise PlanError(f"the plan {path} is not JSON, or was cut off: {e}. {_AGAIN}") from e
    try:
        return plan_from_dict(document)
    except PlanError as e:
        raise PlanError(f"{path}: {e}") from e


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values: its fields by name, `mesh_shape` beside them, and infinities as the strings `inf` and `-inf`."""
    return {"schema": plan.schema, "mesh_shape": plan.mesh_shape} | _encode_fields(plan)


def plan_from_dict(document: Any) -> Plan:
    """The plan that `plan_to_dict` wrote.

    Raises `PlanError` that says what is wrong, where: an unknown schema, a key that is missing, unknown or of another type, a dtype
    that does not exist, an axis that the mesh lacks, a leaf that does not divide.
    """
    if not isinstance(document, Mapping):
        raise PlanError(f"a plan is a JSON object, not {_kind(document)}. {_AGAIN}")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        said = "no schema number" if "schema" not in document else f"schema {schema!r}"
        raise PlanError(f"the plan has {said}; this version of autopar reads schema {SCHEMA}. Plan again with this version.")
    fields = {k: v for k, v in document.items() if k != "mesh_shape"}
    try:
        plan: Plan = _reader(Plan)(fields)
    except _Misfit as misfit:
        raise PlanError(f"plan{''.join(misfit.path)} {misfit}. {_AGAIN}") from misfit
    _check_mesh(plan.mesh, document.get("mesh_shape"))
    _check_axes(plan)
    for leaf in (*plan.inputs, *plan.outputs):
        _check_leaf(leaf, plan.mesh)
        _check_parts(leaf, plan)
    for collective in plan.collectives:
        _check_dtype(collective.dtype, f"collective {collective.id}")
    return plan


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, np.generic):
        return _encode(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    if isinstance(value, (tuple, list)):
        return [_encode(v) for v in value]
    if isinstance(value, (frozenset, set)):
        return [_encode(v) for v in sorted(value)]
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    raise PlanError(f"{_kind(value)} {value!r} cannot be written to a plan file; plans hold numbers, strings, tuples and mappings only.")


def _encode_fields(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    left_out = {name for name, default in _omitted(cls).items() if getattr(value, name) == default}
    return {name: _encode(getattr(value, name)) for name in _hints(cls) if name not in left_out}


@cache
def _omitted(cls: Any) -> dict[str, Any]:
    """The fields that a file leaves out where they have their default."""
    return {f.name: f.default for f in dataclasses.fields(cls) if f.metadata == OMITTED}


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """Field -> type of a dataclass, in order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


class _Misfit(Exception):
    """What is wrong with a value; the readers around it add where it stands."""

    def __init__(self, fact: str):
        super().__init__(fact)
        self.path: list[str] = []


Reader = Callable[[Any], Any]


@cache
def _reader(hint: Any) -> Reader:
    """The function that makes an object of type `hint` of a JSON value, or raises `_Misfit`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _fields_reader(hint)
    if hint is Any:
        return plain
    if origin is frozenset or (origin is tuple and arguments[-1] is Ellipsis):
        return _sequence_reader(origin, _reader(arguments[0]))
    if origin is tuple:
        return _places_reader([_reader(a) for a in arguments])
    if origin is Literal:
        return _choice_reader(arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(_reader(arguments[1]))
    if hint is float:
        return _read_float
    if hint in (int, str, bool):
        return _exact_reader(hint)
    raise CheckError(f"the type {hint} has no form in a plan file; give it one in autopar/ir/serialize.py.")


def _inside(read: Reader, value: Any, key: str) -> Any:
    """`read(value)`, a misfit in it told to stand at `key`."""
    try:
        return read(value)
    except _Misfit as misfit:
        misfit.path.insert(0, key)
        raise


def _fields_reader(cls: Any) -> Reader:
    readers = {name: _reader(hint) for name, hint in _hints(cls).items()}

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mistyped(f"an object with the keys of {cls.__name__}", value)
        value = _omitted(cls) | dict(value)
        if value.keys() != readers.keys():
            for problem, keys in (("lacks", readers.keys() - value.keys()), ("has the unknown", value.keys() - readers.keys())):
                if keys:
                    raise _Misfit(f"{problem} key{'s' * (len(keys) > 1)} {', '.join(map(str, sorted(keys)))}")
        return cls(**{name: _inside(reader, value[name], f".{name}") for name, reader in readers.items()})

    return read


def _sequence_reader(kind: Any, element: Reader) -> Reader:
    """Tuples or sets of one type and any length."""

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _mistyped("a list", value)
        return kind([_inside(element, v, f"[{i}]") for i, v in enumerate(value)])

    return read


def _places_reader(elements: list[Reader]) -> Reader:
    """Tuples with a type for each place."""

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _mistyped("a list", value)
        if len(value) != len(elements):
            raise _Misfit(f"has {len(value)} entries where {len(elements)} belong")
        return tuple([_inside(element, v, f"[{i}]") for i, (element, v) in enumerate(zip(elements, value, strict=True))])

    return read


def _choice_reader(choices: tuple[Any, ...]) -> Reader:
    def read(value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        raise _Misfit(f"is {value!r}, which is none of {', '.join(map(str, choices))}")

    return read


def _mapping_reader(element: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _mistyped("an object", value)
        return {str(k): _inside(element, v, f".{k}") for k, v in value.items()}

    return read


def _exact_reader(kind: Any) -> Reader:
    wanted = {int: "a whole number", str: "a string", bool: "true or false"}[kind]

    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _mistyped(wanted, value)
        return value

    return read


def _read_float(value: Any) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if type(value) not in (int, float):
        raise _mistyped("a number", value)
    return float(value)


def plain(value: Any) -> Any:
    """Free-form data (`cluster`, `options`) as it comes back from a plan file: tuples for lists, keys as strings."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(v) for v in value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return value


def _mistyped(wanted: str, value: Any) -> _Misfit:
    return _Misfit(f"must be {wanted}, not {_kind(value)}")


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list", str: "a string", bool: "true or false"}
    names |= {int: "a number", float: "a number", types.NoneType: "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_mesh(mesh: LogicalMesh, shape: Any) -> None:
    if len(mesh.names) != len(mesh.sizes) or len(set(mesh.names)) != len(mesh.names) or any(n < 1 for n in mesh.sizes):
        raise PlanError(f"plan.sharding.mesh has axes {mesh.names} of sizes {mesh.sizes}: names must differ, sizes be positive. {_AGAIN}")
    if shape != mesh.by_name:
        raise PlanError(f"plan.mesh_shape is {shape} but plan.sharding.mesh is {mesh.by_name}. {_AGAIN}")


def _check_axes(plan: Plan) -> None:
    """Every axis that the plan uses is one of its mesh, or of its stage's, and no sharding uses one twice."""
    _check_sharding(plan.sharding, "")
    meshes = [stage.sharding.mesh for stage in plan.stages] or [plan.mesh]
    for n, stage in enumerate(plan.stages):
        _check_sharding(stage.sharding, f"stages[{n}].")
    for i, c in enumerate(plan.collectives):
        if not 0 <= c.stage < len(meshes):
            raise PlanError(f"collectives[{i}] is of stage {c.stage}, and the plan has {len(meshes)}. {_AGAIN}")
        _check_known(f"collectives[{i}]", [c.axes], meshes[c.stage])


def _check_sharding(sharding: ShardingPlan, where: str) -> None:
    named: dict[str, tuple[Strategy | TensorSharding | PlannedMove, ...]] = {
        "strategies": sharding.strategies,
        "inputs": sharding.inputs,
        "outputs": sharding.outputs,
        "moves": sharding.moves,
    }
    for name, things in named.items():
        for i, thing in enumerate(things):
            _check_known(f"{where}{name}[{i}]", _axes(thing), sharding.mesh)


def _check_known(what: str, groups: Sequence[tuple[str, ...]], mesh: LogicalMesh) -> None:
    for axes in groups:
        if not set(mesh.names).issuperset(axes) or len(set(axes)) != len(axes):
            raise PlanError(f"{what} uses axes {', '.join(axes)}; mesh ({mesh}) has each of its axes once. {_AGAIN}")


def _axes(thing: Strategy | TensorSharding | PlannedMove | Move) -> list[tuple[str, ...]]:
    """The groups of axes in which each may occur once."""
    if isinstance(thing, Strategy):
        return [tuple(a for _, axes in thing.cuts for a in axes) + tuple(a for a, _ in thing.passes)]
    if isinstance(thing, PlannedMove):
        return [thing.move.axes, thing.source.axes, thing.target.axes]
    return [thing.axes]


def _check_leaf(leaf: Leaf, mesh: LogicalMesh) -> None:
    _check_dtype(leaf.dtype, f"leaf {leaf.path}")
    if not mesh.by_name.keys() >= set(leaf.sharding.axes) or not leaf.sharding.fits(leaf.shape, mesh):
        raise PlanError(f"leaf {leaf.path} of shape {leaf.shape} cannot lie as {leaf.sharding} on mesh ({mesh}). {_AGAIN}")


def _check_parts(leaf: Leaf, plan: Plan) -> None:
    """Every part is one that its stage can have, and the parts, in order, are the whole leaf."""
    for p in leaf.parts:
        _check_part(p, leaf, plan)
    dimensions = {p.dimension for p in leaf.parts}
    ends = [0, *(p.end for p in leaf.parts)]
    if leaf.parts and (len(dimensions) > 1 or [*(p.begin for p in leaf.parts), leaf.shape[min(dimensions)]] != ends):
        spans = ", ".join(f"{p.begin}:{p.end} of dimension {p.dimension}" for p in leaf.parts)
        raise PlanError(f"the parts of leaf {leaf.path} of shape {leaf.shape} are not the whole of it: {spans}. {_AGAIN}")


def _check_part(p: Part, leaf: Leaf, plan: Plan) -> None:
    there = 0 <= p.stage < len(plan.stages) and 0 <= p.dimension < len(leaf.shape) and 0 <= p.begin < p.end <= leaf.shape[p.dimension]
    mesh = plan.stages[p.stage].sharding.mesh if there else None
    if mesh is None or not mesh.by_name.keys() >= set(p.sharding.axes):
        raise PlanError(f"leaf {leaf.path} of shape {leaf.shape} has no part {p.begin}:{p.end} on stage {p.stage}. {_AGAIN}")
    shape = (*leaf.shape[: p.dimension], p.end - p.begin, *leaf.shape[p.dimension + 1 :])
    if p.sharding.partial or not p.sharding.fits(shape, mesh):
        part = f"part {p.begin}:{p.end} of leaf {leaf.path}, of shape {shape},"
        raise PlanError(f"{part} cannot lie as {p.sharding} on stage {p.stage}, of mesh ({mesh}). {_AGAIN}")


def _check_dtype(dtype: str, where: str) -> None:
    if not _DTYPE.fullmatch(dtype):
        raise PlanError(f"{where} has dtype `{dtype}`, which does not exist. {_AGAIN}")


def fingerprint(graph: Graph, extra: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the program: primitives, parameters, avals with weak type, literals, topology by position, sub-graphs.

    Two graphs have one fingerprint when they differ in nothing but value numbers, phases, scopes, source lines, names of inputs and
    outputs, and `equation`. Closed-over constants count by shape and dtype, not by content. `extra` is what else changes
    the program's meaning: the threefry option, for one.
    """
    digest = _graph_digest(graph, {})
    settings = _canonical(tuple(sorted(extra.items())))
    return hashlib.sha256(f"autopar graph 1\n{digest}\n{settings}".encode()).hexdigest()


def _graph_digest(graph: Graph, known: dict[int, str]) -> str:
    """SHA-256 of one graph. `known` remembers sub-graphs by identity: a layer's body is one object however often it is called."""
    if id(graph) in known:
        return known[id(graph)]
    position: dict[int, int] = {}
    avals: dict[Aval, str] = {}
    seen: dict[str, str] = {}  # parameters by their `repr`, which costs less than their canonical text

    def parameters(op: Op) -> str:
        written = repr(op.params)
        if written not in seen:
            seen[written] = " ".join(f"{k}={_canonical(v)}" for k, v in sorted(op.params, key=lambda p: p[0]))
        return seen[written]

    def aval(a: Aval) -> str:
        if a not in avals:
            avals[a] = f"{a.dtype}{list(a.shape)}{'~' * a.weak_type}"
        return avals[a]

    def define(v: int) -> str:
        position[v] = len(position)
        return aval(graph.avals[v])

    def use(o: Operand) -> str:
        return str(position[o]) if isinstance(o, int) else f"{_canonical(o.text)}:{aval(o.aval)}"

    lines = [f"in {' '.join(map(define, graph.inputs))} constants {graph.num_constants}"]
    for op in graph.ops:
        operands = " ".join(map(use, op.operands))
        bodies = " ".join(_graph_digest(g, known) for g in op.subgraphs)
        results = " ".join(map(define, op.results))
        where = f" in {op.region}" if op.region >= 0 else ""
        lines.append(f"{op.primitive}{'!' * op.effects} {{{parameters(op)}}} ({operands}) [{bodies}] -> {results}{where}")
    lines += [f"region {r.kind} {r.parent} {r.times}" for r in graph.regions]
    lines.append(f"out {' '.join(map(use, graph.outputs))}")
    known[id(graph)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return known[id(graph)]


def _canonical(value: Any) -> str:
    """A parameter as text that tells apart all that differs (1, 1.0, True, '1') and holds no memory address."""
    kind = type(value)
    if kind is str:
        return repr(_ADDRESS.sub("", value)) if " at 0x" in value else repr(value)
    if kind in (int, float, bool, complex, types.NoneType):
        return repr(value)
    if kind in (tuple, list):
        return f"({','.join(map(_canonical, value))})"
    if isinstance(value, np.generic):
        return _canonical(value.item())
    raise CheckError(f"a parameter holds {value!r} of type {kind.__name__}; tracing should have made it plain data.")
