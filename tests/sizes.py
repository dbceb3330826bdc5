"""How much of what has no end is tested: draws, seeds, families, mutations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")
WHOLE = False
"""Set by ``pytest --whole``, before any test is collected."""


def sized(small: T, whole: T) -> T:
    """What a run takes by default, and what with ``--whole``."""
    return whole if WHOLE else small


def some(values: Iterable[T], count: int = 1) -> list[T]:
    """So many of several values, from one end to the other; all with ``--whole``. Of one, the last."""
    found = list(values)
    if WHOLE or count >= len(found):
        return found
    return [found[(i + 1) * len(found) // count - 1] for i in range(count)] if count > 1 else found[-1:]


def one_of_each(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each parameter stands once at least; all combinations with ``--whole``."""
    if WHOLE:
        return list(dict.fromkeys(product(*values)))
    return [tuple(of[i % len(of)] for of in values) for i in range(max(map(len, values)))]
