"""How far a step is: what tells a long step from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepProgress:
    """Layers done, whatever step they belong to; written by the thread that runs the model, read by any.

    Args:
        clock: Monotonic time in seconds.

    Attributes:
        num_layers: Attention layers, convolutions and scans done so far.
        newest_s: When the newest of them was done, by ``clock``; at first the time of making.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_layers = 0
        self.newest_s = clock()

    def advance(self) -> None:
        """One more layer is done."""
        self.num_layers += 1
        self.newest_s = self._clock()
