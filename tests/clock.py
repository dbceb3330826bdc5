"""A clock for tests of what takes its time by the clock."""

from __future__ import annotations


class VirtualClock:
    """See :class:`benchmarks.emulation.Clock`. Only sleeping moves it: computing takes no time by it."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def reset(self) -> None:
        """Begin at 0 again."""
        self._now_s = 0.0

    def now_s(self) -> float:
        """See :meth:`Clock.now_s`."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """See :meth:`Clock.sleep`."""
        self._now_s += duration_s
