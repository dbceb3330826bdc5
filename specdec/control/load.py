"""Time under load: what a group's trials, probes and waits are counted in, so that pauses count for nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LoadTime:
    """The time of a group that its rounds account for.

    A review tells of the time since the last one. It counts no longer than the rounds that were heard of meanwhile can
    have taken; while none is heard of it is left open, as a step may take longer than the time between two reviews.

    Attributes:
        now_s: As of the last review; by the clock, less all pauses.
    """

    now_s: float = 0.0
    _reviewed_s: float = math.inf
    _idle_s: float = 0.0
    _num_rounds: int = 0
    _is_paused: bool = False

    def heard(self, num_rounds: int) -> None:
        """So many rounds of the group's sequences have ended."""
        self._num_rounds += num_rounds

    def pause(self) -> None:
        """No sequence may draft, or no drafter is there: what goes by from the last review on is not counted."""
        self._is_paused = True

    def reviewed(self, clock_s: float, num_sequences: int, longest_round_s: float) -> float:
        """A review of so many sequences takes place.

        Args:
            clock_s: Time.
            num_sequences: That may draft.
            longest_round_s: That a round is taken for, of a sequence.

        Returns:
            Seconds under load since the last one.
        """
        gone_s = max(0.0, clock_s - self._reviewed_s)
        if gone_s and not self._num_rounds and not self._is_paused:
            return 0.0
        heard_s = longest_round_s * self._num_rounds / num_sequences if self._num_rounds else 0.0
        counted_s = 0.0 if self._is_paused else min(gone_s, heard_s)
        self._idle_s += gone_s - counted_s
        self._reviewed_s, self._num_rounds, self._is_paused = clock_s, 0, False
        self.now_s = clock_s - self._idle_s
        return counted_s
