"""The table: primitive name -> function from avals and normalised parameters to a sharding rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from autopar.errors import RuleError
from autopar.ir.graph import Aval, Constant, Op, Operand
from autopar.ir.rule import ShardingRule
from autopar.rules.notation import Notation, instantiate, parse, whole_rule

Avals = tuple[Aval, ...]
RuleFunction = Callable[..., ShardingRule]
When = Callable[[Avals, Avals, Mapping[str, Any]], bool]

_RULES: dict[str, RuleFunction] = {}
_USER_RULES: dict[str, tuple[Notation, When | None, Callable | None]] = {}


def register(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Decorate a pure function `(operands, results, *, constants, **params) -> ShardingRule` as the rule of `primitives`.

    `constants` holds the text of each literal operand, None for values.
    """

    def keep(function: RuleFunction) -> RuleFunction:
        for name in primitives:
            if name in _RULES:
                raise RuleError(f"`{name}` has a rule already.")
            _RULES[name] = function
        return function

    return keep


def register_rule(name: str, spec: str, *, when: When | None = None, local: Callable | None = None) -> None:
    """Add a rule of the user's own, in the notation of `rules.notation`; it is looked up before the table.

    `name` is a primitive, or `jit:f` for calls of a jitted function `f`, which is then one op. `when(operands, results,
    params)` limits it to some uses. `local(*operands, **params)` computes the results on one device from its local
    operands; without it the primitive is bound on them with its parameters as they are. A jitted function was traced at
    global shapes, so `jit:f` needs `local`, which then gets operands only. Raises `RuleError`.
    """
    if not isinstance(name, str) or not name:
        raise RuleError(f"a rule is registered for the name of a primitive or `jit:f`, not {name!r}.")
    for what, given in (("when", when), ("local", local)):
        if given is not None and not callable(given):
            raise RuleError(f"`{what}` of the rule for `{name}` must be a function, not {given!r}.")
    notation = parse(spec)
    if name.startswith("jit:") and local is None:
        raise RuleError(f"rule `{spec}` for `{name}` needs `local=`, the function that one device runs on its part.")
    _USER_RULES[name] = (notation, when, local)
    _rule.cache_clear()


def remove_rule(name: str) -> None:
    """Forget a rule added by `register_rule`."""
    _USER_RULES.pop(name, None)
    _rule.cache_clear()


def has_user_rule(name: str, operands: Sequence[Aval], results: Sequence[Aval]) -> bool:
    """Whether a user's rule under this name fits these avals. (The derivative of a jitted function has its name, and other operands.)"""
    if name not in _USER_RULES:
        return False
    try:
        instantiate(_USER_RULES[name][0], operands, results)
    except RuleError:
        return False
    return True


def has_rule(op: Op) -> bool:
    """Whether the table or the user has a rule for `op`; otherwise it runs whole."""
    return op.primitive in _RULES or user_name(op) in _USER_RULES


def local_function(op: Op, operands: Avals, results: Avals) -> Callable | None:
    """The user's per-device function for `op`, where a rule with one applies."""
    name = user_name(op)
    if name not in _USER_RULES or not _applies(name, operands, results, op.params):
        return None
    return _USER_RULES[name][2]


def primitives() -> tuple[str, ...]:
    """Names of all primitives in the table, sorted."""
    return tuple(sorted(_RULES))


def rule_for(op: Op, aval: Callable[[Operand], Aval]) -> ShardingRule:
    """The sharding rule of `op`; the whole rule where there is none. `aval` looks up an operand, as `Graph.aval` does.

    Raises `RuleError`, naming the op, where a rule does not fit.
    """
    operands = tuple(aval(o) for o in op.operands)
    results = tuple(aval(r) for r in op.results)
    constants = tuple(o.text if isinstance(o, Constant) else None for o in op.operands)
    try:
        return _lookup(user_name(op), op.primitive, op.params, operands, results, constants)
    except Exception as error:
        where = f" at {op.source}" if op.source else ""
        shapes = f"({', '.join(map(str, operands))}) -> ({', '.join(map(str, results))})"
        raise RuleError(f"the sharding rule of `{op.primitive}`{where} does not fit {shapes}: {error}") from error


def user_name(op: Op) -> str:
    """The name under which a user's rule for `op` is registered."""
    return f"jit:{op.param('name')}" if op.primitive in ("jit", "pjit") else op.primitive


def _lookup(name: str, *key: Any) -> ShardingRule:
    try:
        hash(key)
    except TypeError:
        return _rule.__wrapped__(name, *key)
    return _rule(name, *key)


@lru_cache(maxsize=65536)
def _rule(name: str, primitive: str, params: tuple, operands: Avals, results: Avals, constants: tuple) -> ShardingRule:
    if name in _USER_RULES and _applies(name, operands, results, params):
        return instantiate(_USER_RULES[name][0], operands, results)
    if any(not a.size for a in (*operands, *results)):
        return whole_rule(operands, results)  # no work to share, and compilers fold away what would be moved
    if primitive in _RULES:
        return _RULES[primitive](operands, results, constants=constants, **dict(params))
    return whole_rule(operands, results)


def _applies(name: str, operands: Avals, results: Avals, params: tuple) -> bool:
    when = _USER_RULES[name][1]
    return when is None or when(operands, results, dict(params))
