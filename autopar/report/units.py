"""Sizes, times and axes as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_text(nbytes: float) -> str:
    """Three digits and a binary unit.

    >>> bytes_text(0), bytes_text(1000), bytes_text(1536), bytes_text(80 * 2**30)
    ('0 B', '1000 B', '1.50 KiB', '80.0 GiB')
    """
    size, unit = float(nbytes), 0
    while abs(size) >= 1023.5 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_three_digits(size)} {_BINARY[unit]}"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit from ns to s.

    >>> seconds_text(0), seconds_text(0.01234), seconds_text(4.2e-5), seconds_text(75)
    ('0 s', '12.3 ms', '42.0 us', '75.0 s')
    """
    if not seconds or not math.isfinite(seconds):
        return "0 s" if not seconds else f"{seconds} s"
    factor, unit = next(((f, u) for f, u in _TIMES if abs(seconds) >= 0.9995 * f), _TIMES[-1])
    return f"{_three_digits(seconds / factor)} {unit}"


def count_text(count: float, unit: str = "") -> str:
    """Three digits and a decimal prefix.

    >>> count_text(1.5e12, "FLOP"), count_text(12)
    ('1.50 TFLOP', '12')
    """
    factor, prefix = next(((f, p) for f, p in _COUNTS if abs(count) >= 0.9995 * f), (1.0, ""))
    number = f"{count:.0f}" if factor == 1.0 else _three_digits(count / factor)
    return f"{number} {prefix}{unit}".rstrip()


def percent_text(part: float) -> str:
    """A share as a percentage.

    >>> percent_text(0.1234), percent_text(0)
    ('12.3 %', '0.0 %')
    """
    return f"{100 * part:.1f} %" if math.isfinite(part) else "unbounded"


def axes_text(axes: Sequence[str]) -> str:
    """Axes joined as in a sharding: `x+y`."""
    return "+".join(axes) or "-"


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.2f}" if size < 9.995 else f"{number:.1f}" if size < 99.95 else f"{number:.0f}"
