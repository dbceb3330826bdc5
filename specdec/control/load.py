"""Time under load: what a group's trials, probes and waits are counted in, so that pauses count for nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LoadTime:
    """The time in which some round of a group was under way, whether or not a review saw it.

    Attributes:
        now_s: In seconds, as far as rounds have ended.
    """

    now_s: float = 0.0
    _until_s: float = -math.inf

    def heard(self, seconds: float, clock_s: float) -> None:
        """Rounds have ended that took so long, all later than those heard of before; what overlaps counts once."""
        self.now_s += max(0.0, min(seconds, clock_s - self._until_s))
        self._until_s = max(self._until_s, clock_s)
