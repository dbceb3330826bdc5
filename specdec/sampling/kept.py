"""What is worked out once for a request, and kept as long as that lives."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class WhileAlive(Generic[K, V]):
    """A value for each of some objects, found by the object itself rather than by what it equals.

    Hashing a request's parameters may cost as much as using them, and two requests may be equal. An entry goes with
    its object, so there is no bound to choose that many live requests could exceed.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[K], V]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, owner: K) -> V | None:
        """The value of an object; None where it has none."""
        found = self._kept.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def put(self, owner: K, value: V) -> V:
        """Set the value of an object, which must allow weak references; gives the value."""
        kept, key = self._kept, id(owner)

        def drop(ref: weakref.ref[K]) -> None:
            found = kept.get(key)
            if found is not None and found[0] is ref:  # another object may have the id by now
                kept.pop(key, None)

        kept[key] = weakref.ref(owner, drop), value
        return value
