"""Parameters of equations as plain data: tuples, strings and numbers."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from autopar.trace import compat

_DEVICES = frozenset({"mesh", "newly_manual_axes", "manual_axes", "in_specs", "out_specs", "check_vma"})


def normalise(value: Any) -> Any:
    """A parameter as plain data: NamedTuples and dataclasses as (field, value) pairs, enums and dtypes by name."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple((f, normalise(getattr(value, f))) for f in value._fields)
    if isinstance(value, (tuple, list)):
        return tuple(normalise(v) for v in value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return compat.dtype_name(np.dtype(value))
    if isinstance(value, np.ndarray):
        return tuple(value.reshape(-1).tolist()) if value.size < 64 else f"array{value.shape}"
    if isinstance(value, dict):
        return tuple((str(k), normalise(v)) for k, v in sorted(value.items(), key=lambda kv: str(kv[0])))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple((f.name, normalise(getattr(value, f.name))) for f in dataclasses.fields(value))
    return _opaque(value)


def _opaque(value: Any) -> str:
    """A name for what has no plain form: functions by qualified name, jaxprs by their kind (they are sub-graphs)."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return "<jaxpr>"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is not None:
        return f"<{getattr(value, '__module__', '')}.{name}>"
    if hasattr(value, "dtype") or type(value).__module__.startswith(("numpy", "ml_dtypes", "jax")):
        text = str(value)
        return text if " at 0x" not in text else f"<{type(value).__name__}>"
    return f"<{type(value).__name__}>"


def normalise_params(params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """All parameters of an equation, by name in the order in which JAX keeps them. What a scatter applies is written out.

    Devices are left out: a `shard_map`'s mesh matters by its axes (`compat.derived_params`).
    """
    named = {k: str(v) if k == "update_jaxpr" and v is not None else v for k, v in params.items() if k not in _DEVICES}
    return tuple((k, normalise(v)) for k, v in named.items())
