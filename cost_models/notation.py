"""`PRESET:NODESxDEVICES`, taken apart."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from cost_models.errors import ClusterError

FORM = "PRESET:NODESxDEVICES, such as h100-sxm:2x8, v5e:16x16 or host:8, or the path of a .toml profile"


def split(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and shape; the shape is empty where none is given. Raises `ClusterError` for a shape that is none.

    >>> split("h100-sxm:2x8"), split("host")
    (('h100-sxm', (2, 8)), ('host', ()))
    """
    if text.endswith(".toml"):
        return text, ()
    name, colon, shape = text.rpartition(":")
    if not colon:
        return text, ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ClusterError(f"{shape!r} in {text!r} is no shape; write {FORM}.")
    return name, tuple(int(size) for size in shape.split("x"))


def unknown(name: str, known: Iterable[str]) -> ClusterError:
    """The error for a name that is no preset, with the ones that look like it."""
    names = tuple(known)
    folded = name.lower().replace("_", "-")
    close = difflib.get_close_matches(folded, names, n=3, cutoff=0.4) or [each for each in names if each.startswith(folded[:2])]
    hint = f"Did you mean {' or '.join(close)}? " if close else f"Known are {', '.join(names)}. "
    return ClusterError(f"unknown cluster {name!r}. {hint}Write {FORM}.")
