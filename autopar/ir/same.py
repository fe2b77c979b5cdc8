"""What was found out once is not found out again: answers remembered by what they follow from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

Found = TypeVar("Found")


class Same:
    """An object as part of a key, equal to itself alone: hashing it takes no time, and it stays alive as long as the key."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it


class Memo:
    """Answers by key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """The answer under `key`, made now if it is not known; made each time where the key cannot be hashed."""
        try:
            known: Any = self._known.get(key, self)
        except TypeError:
            return make()
        if known is self:
            known = self._known[key] = make()
        return cast("Found", known)

    def one(self, value: Found) -> Found:
        """The first of all values that are equal to this one."""
        return cast("Found", self._known.setdefault(("one", value), value))
