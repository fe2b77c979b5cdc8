"""Leaves of a step that a rewritten step takes and gives in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

Borders = tuple[int, ...]
_PART = re.compile(r"\[(:, )*\d+:\d+\]$")


@dataclass(frozen=True, slots=True)
class Parts:
    """A leaf of the step in parts along a dimension, between `borders`; `positions` are where the parts stand among all leaves."""

    dimension: int
    borders: Borders
    positions: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """From where to where each part reaches."""
        return tuple(pairwise(self.borders))


@dataclass(frozen=True, eq=False)
class Pieces:
    """What became of a step whose scans over layers run in pieces.

    Leaves of the step that are in parts, by position: the first part stands in the leaf's place, the others after all leaves. `borders`
    are where scans are cut, one entry for each length; `notes` say which scans are not, and why.
    """

    inputs: Mapping[int, Parts] = field(default_factory=dict)
    outputs: Mapping[int, Parts] = field(default_factory=dict)
    borders: tuple[Borders, ...] = ()
    notes: tuple[str, ...] = ()


def even_borders(length: int, pieces: int) -> Borders:
    """The borders of so many pieces of some layers, as equal as can be, the larger ones first.

    >>> even_borders(7, 3)
    (0, 3, 5, 7)
    """
    pieces = min(length, pieces)
    each, more = divmod(length, pieces)
    return tuple(each * k + min(k, more) for k in range(pieces + 1))


def part_name(name: str, dimension: int, begin: int, end: int) -> str:
    """The name of a part of a leaf.

    >>> part_name("params['w']", 1, 0, 4)
    "params['w'][:, 0:4]"
    """
    return f"{name}[{':, ' * dimension}{begin}:{end}]"


def whole_name(name: str) -> str:
    """The name of the leaf that has a part of this name.

    >>> whole_name("params['w'][:, 0:4]"), whole_name("params[0]")
    ("params['w']", 'params[0]')
    """
    return _PART.sub("", name)
