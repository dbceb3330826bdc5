"""How messages are pickled: by their fields in order, and made anew by their constructor.

What ``dataclasses`` gives a frozen class with slots walks over its fields in Python each way; a batch of 64 messages
then takes about twice as long, at the very moment when the next step should begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any


class Compact:
    """Base of a frozen dataclass with slots and more than one field."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """See :meth:`object.__reduce__`."""
        kind: Any = type(self)
        return kind, _fields_of(kind)(self)


@cache
def _fields_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Reads all fields of a class in order."""
    return attrgetter(*(field.name for field in fields(kind)))
