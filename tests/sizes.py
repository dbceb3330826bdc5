"""How much of what has no end is tested: draws, seeds, families, mutations."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
WHOLE = False
"""Set by ``pytest --whole``, before any test is collected."""


def sized(small: T, whole: T) -> T:
    """What a run takes by default, and what with ``--whole``."""
    return whole if WHOLE else small
