"""The JAX side of a traced program: what emission binds. It is never saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.graph import Graph


@dataclass(frozen=True, eq=False)
class Equation:
    """JAX's own equation, and the values of its literal operands by position."""

    equation: Any
    literals: Mapping[int, Any]


@dataclass(frozen=True, eq=False)
class Program:
    """The equations that ops refer to, the closed-over constants, and the values of literal outputs by position."""

    equations: tuple[Equation, ...]
    constants: tuple[Any, ...]
    literal_outputs: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Flattened:
    """A graph and the program it came from."""

    graph: Graph
    program: Program
