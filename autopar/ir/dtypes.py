"""Sizes and kinds of dtypes by name, without JAX."""

from __future__ import annotations

import re
from functools import cache

_SIZES = {"bool": 1, "float0": 0, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}
_KEY_BYTES = {"key<fry>": 8, "key<rbg>": 16, "key<urbg>": 16}
_NARROW = frozenset({"bfloat16", "float16"})


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element; PRNG keys by the size of their key data."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, 16)
    if dtype.startswith("float8") or dtype.startswith("float4"):
        return 1
    bits = re.search(r"(\d+)$", dtype)
    return int(bits.group(1)) // 8 if bits else 4


def is_float(dtype: str) -> bool:
    """Real floating point, bfloat16 and the 8-bit floats included."""
    return dtype.startswith(("float", "bfloat")) and dtype != "float0"


def is_inexact(dtype: str) -> bool:
    """Real or complex floating point."""
    return is_float(dtype) or dtype.startswith("complex")


def is_key(dtype: str) -> bool:
    """A typed PRNG key."""
    return dtype.startswith("key<")


def accumulation_dtype(dtype: str) -> str:
    """The dtype in which partial sums of `dtype` are held and reduced: narrow floats in float32, the rest as they are."""
    return "float32" if dtype in _NARROW else dtype
