"""Sharding rules: one per primitive, as data. Importing this package fills the table."""

from autopar.rules import conv, dot, elementwise, index, linalg, manual, random, reduce, region, shape
from autopar.rules.control import OPAQUE, why_whole
from autopar.rules.registry import has_rule, has_user_rule, local_function, primitives, register, register_rule, remove_rule, rule_for

__all__ = [
    "OPAQUE",
    "conv",
    "dot",
    "elementwise",
    "has_rule",
    "has_user_rule",
    "index",
    "linalg",
    "local_function",
    "manual",
    "primitives",
    "random",
    "reduce",
    "region",
    "register",
    "register_rule",
    "remove_rule",
    "rule_for",
    "shape",
    "why_whole",
]
