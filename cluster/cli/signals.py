"""Ctrl-C and SIGTERM: the first asks to stop, the second insists."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequested(KeyboardInterrupt):
    """The user, or whoever runs this process, wants it to stop; raised in the main thread."""


class StopForced(KeyboardInterrupt):
    """Asked a second time."""


class StopSignals:
    """Turns SIGINT and SIGTERM into exceptions of the main thread."""

    def __init__(self) -> None:
        self._is_asked = False

    def install(self) -> None:
        """Take the signals over; to be called again after a library has taken them."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_asked:
            raise StopForced
        self._is_asked = True
        raise StopRequested
