"""`@rule(spec)`: a sharding rule for a function of the user's own."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax

from autopar.errors import RuleError
from autopar.rules import register_rule
from autopar.rules.registry import When

Function = Callable[..., Any]


_NAMED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Decorated functions that are still there, by the name under which their rule is found."""


def rule(spec: str, *, when: When | None = None, local: Function | None = None) -> Callable[[Function], Function]:
    """Decorate a function of arrays with its sharding rule, as in `@rule("b h q d, b h k d, b h k d -> b h q d")`.

    The function comes back jitted, and a plan keeps each call of it as one op that is cut as `spec` says. On one device it then runs on
    local parts: `local(*operands)`, or the function itself, which must be right on parts of the factors that `spec` lets be cut (name
    those in brackets that must stay whole, as in `[k]`). `when(operands, results, params)` limits the rule to some uses; others, and
    derivatives of the function unless it has a `jax.custom_vjp`, are planned by what is inside. Raises `RuleError` for a malformed spec.
    """
    if callable(spec):
        raise RuleError('a rule needs its notation: write @autopar.rule("b i, i o -> b o") above the function.')

    def decorate(function: Function) -> Function:
        plain = _unjitted(function)
        named = _renamed(plain)
        register_rule(f"jit:{named.__name__}", spec, when=when, local=local or plain)
        _NAMED[named.__name__] = jitted = functools.wraps(plain)(jax.jit(named))
        return jitted

    return decorate


def _unjitted(function: Any) -> Function:
    """The function itself, under `jax.jit` or not. Raises `RuleError` for what is none."""
    if not callable(function):
        raise RuleError(f"a rule decorates a function, not {function!r}.")
    return getattr(function, "__wrapped__", function) if hasattr(function, "lower") else function


def _renamed(function: Function) -> Function:
    """The function under a name that no other one has that is still there: rules are found by the name of the call."""
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    name = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    free = next(n for n in itertools.chain((name,), (f"{name}_{k}" for k in itertools.count(2))) if n not in _NAMED)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    named.__name__ = named.__qualname__ = free
    return named
