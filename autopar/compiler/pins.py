"""Where pins put the inputs of a program."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.compiler.compilation import Compilation
from autopar.errors import UsageError
from autopar.intraop.reshard import border_shardings
from autopar.ir import options
from autopar.ir.graph import Aval, Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.sharding import TensorSharding
from autopar.trace.parts import whole_name


def pin_of(c: Compilation, name: str) -> str:
    """What pins an input, as text: inputs pinned alike may be folded together."""
    found = [f"{pattern}={spec}" for pattern, spec in _pins_on(c, name)]
    if name in c.fixed:
        found.append(str(c.fixed[name]))
    return ";".join(found)


def _pins_on(c: Compilation, name: str) -> list[tuple[str, Any]]:
    """The pins that count for an input, pattern and spec: the one on its whole path, or else all whose pattern matches."""
    pins = c.options.pins
    return [(name, pins[name])] if name in pins else [(p, spec) for p, spec in pins.items() if _matches(name, p)]


def input_pins(c: Compilation, mesh: LogicalMesh) -> dict[int, tuple[TensorSharding, ...]]:
    """Graph input value -> the shardings that pins leave it. Raises `UsageError` for a pin that cannot hold."""
    graph = c.program.graph
    found: dict[int, tuple[TensorSharding, ...]] = {}
    for v, name in zip(graph.inputs, graph.input_names, strict=True):
        if name in c.fixed:
            found[v] = (c.fixed[name],)
        pinned = {pattern: _pin(pattern, spec, name, graph.avals[v], mesh) for pattern, spec in _pins_on(c, name)}
        if len(set(pinned.values())) > 1:
            raise UsageError(
                f"{name} is pinned in more than one way: {', '.join(f'{p!r} says {s}' for p, s in pinned.items())}. "
                "Give these patterns one spec, or pin the leaf by its whole path, which outranks patterns."
            )
        if pinned:
            found[v] = (next(iter(pinned.values())),)
    _check_used(c.options.pins, graph.input_names)
    return found


def stage_pins(c: Compilation, graph: Graph, mesh: LogicalMesh) -> dict[int, tuple[TensorSharding, ...]]:
    """The same for the inputs of one pipeline stage, as the user pins them."""
    found: dict[int, tuple[TensorSharding, ...]] = {}
    for v, part in zip(graph.inputs, graph.input_names, strict=True):
        name = whole_name(part)
        if name in c.fixed:
            found[v] = (c.fixed[name],)
        for pattern, spec in _pins_on(c, name):
            found[v] = (_pin(pattern, spec, name, graph.avals[v], mesh),)
    _check_used(c.options.pins, c.traced.graph.input_names)
    return found


def _pin(pattern: str, spec: Any, name: str, aval: Aval, mesh: LogicalMesh) -> TensorSharding:
    """A pin as the sharding of one leaf."""
    pin = sharding_of_spec(spec, aval.ndim)
    if any(a not in mesh.names for a in pin.axes):
        raise UsageError(f"pin {pattern!r} names axis of {spec}, but the mesh has ({mesh}). Set `axis_names` or pass a Mesh.")
    if pin not in border_shardings(aval, mesh):
        raise UsageError(f"pin {pattern!r} to {spec} does not fit {name} {aval} on mesh ({mesh}): a dimension does not divide.")
    return pin


def _check_used(pins: Mapping[str, Any], names: Sequence[str]) -> None:
    unused = [p for p in pins if not any(_matches(name, p) for name in names)]
    if unused:
        known = ", ".join(names[:5])
        raise UsageError(f"no parameter path matches the pins {', '.join(unused)}. Paths look like: {known}.")


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern with `*` and `?`. Paths hold brackets (`params['w']`), which a pattern means literally."""
    return pattern == name or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def sharding_of_spec(spec: Any, ndim: int) -> TensorSharding:
    """A PartitionSpec, or a tuple of axis names per dimension, as a sharding of `ndim` dimensions."""
    entries = options.spec_entries("", spec)
    if len(entries) > ndim:
        raise UsageError(f"PartitionSpec {spec} has more entries than the {ndim} dimensions of what it pins.")
    return TensorSharding(entries + ((),) * (ndim - len(entries)))
