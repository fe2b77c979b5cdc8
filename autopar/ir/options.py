"""What a value of an option may be. Each check returns the value in its one form, or raises `UsageError` that says what to give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from autopar.errors import UsageError


def number(name: str, value: Any, wanted: str, *, low: float = 0.0, high: float = math.inf, above: bool = False) -> float:
    """A finite number in `[low, high]`, or in `(low, high]` with `above`. `wanted` says in words what is expected."""
    fits = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not low <= value <= high or (above and value == low):
        raise UsageError(f"{name} must be {wanted}, not {value!r}.")
    return float(value)


def count_or_auto(name: str, value: Any) -> int | str:
    """A whole number from 1 on, or "auto"."""
    if value == "auto" and isinstance(value, str):
        return "auto"
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be a positive whole number or 'auto', not {value!r}.")
    return int(value)


def stages(value: Any) -> int | str:
    """A number of pipeline stages, "auto", or "off"."""
    if isinstance(value, str) and value in ("auto", "off"):
        return value
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UsageError(f"stages must be a positive whole number, 'auto' or 'off', not {value!r}.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as such."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}.")
    return value


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}.")
    return value


def zero_level(value: Any) -> int | str:
    """`auto`, or a level of ZeRO."""
    if value == "auto":
        return "auto"
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) in range(4):
        return int(value)
    raise UsageError(f"zero must be 'auto', 0, 1, 2 or 3, not {value!r}.")


def axis_names(value: Any) -> tuple[str, ...]:
    """At least one name, all different, none empty."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError(f"axis_names must be a tuple of names, not {value!r}. For one axis write axis_names=({value!r},).")
    names = tuple(value)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"axis_names must be one or more names that are not empty, such as ('data', 'model'), not {names!r}.")
    if len(set(names)) != len(names):
        raise UsageError(f"axis_names must differ from each other, not {names!r}.")
    return names


def argument_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Positions of arguments: whole numbers, or one alone."""
    numbers = _tuple_of(Integral, value)
    if numbers is None or any(isinstance(n, bool) for n in numbers):
        raise UsageError(f"{name} must be the position of an argument or a tuple of positions, not {value!r}.")
    return tuple(map(int, numbers))


def argument_names(name: str, value: Any) -> tuple[str, ...]:
    """Names of arguments, or one alone."""
    names = _tuple_of(str, value)
    if names is None:
        raise UsageError(f"{name} must be the name of an argument or a tuple of names, not {value!r}.")
    return names


def _tuple_of(kind: Any, value: Any) -> tuple[Any, ...] | None:
    """Items of this kind, or one alone, as a tuple; None where there is anything else among them."""
    if value is None:
        return ()
    if isinstance(value, kind):
        return (value,)
    found = tuple(value) if isinstance(value, Iterable) else (value,)
    return found if all(isinstance(item, kind) for item in found) else None


def pins(value: Any) -> dict[str, Any]:
    """Patterns of paths to specs; a sharding stands for its spec."""
    if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
        raise UsageError(f"pins must map patterns of paths to PartitionSpecs, as in {{\"params['w']\": P('x', None)}}, not {value!r}.")
    return {pattern: _spec(pattern, spec) for pattern, spec in value.items()}


def _spec(pattern: str, given: Any) -> Any:
    """A spec that can be read dimension by dimension and uses no axis twice."""
    spec = getattr(given, "spec", given)
    axes = [axis for entry in spec_entries(pattern, spec) for axis in entry]
    twice = [axis for axis in dict.fromkeys(axes) if axes.count(axis) > 1]
    if twice:
        raise UsageError(f"pin {pattern!r} uses axis {', '.join(twice)} twice in {spec}: an axis cuts one dimension at most.")
    return spec


def spec_entries(pattern: str, spec: Any) -> tuple[tuple[str, ...], ...]:
    """The axes of each dimension that a PartitionSpec, or a tuple like it, names."""
    if spec is None:
        return ()
    if isinstance(spec, (str, bytes, Mapping)) or not isinstance(spec, Iterable):
        raise UsageError(f"pin {pattern!r} must be a PartitionSpec (or a tuple with the axes of each dimension), not {spec!r}.")
    return tuple(_entry(pattern, spec, entry) for entry in spec)


def _entry(pattern: str, spec: Any, entry: Any) -> tuple[str, ...]:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
        raise UsageError(f"pin {pattern!r} has {entry!r} in {spec}: each dimension takes an axis, a tuple of axes, or None to stay whole.")
    return tuple(axes)
