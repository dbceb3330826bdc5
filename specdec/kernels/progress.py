"""How far a step is: what tells a long step from one that hangs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

_MOST_PENDING = 256
"""Events that are kept: more than most models have layers."""


class StepProgress:
    """Layers that are done, whatever step they belong to. Written by the thread that runs the model, read by any other.

    A GPU runs layers after they are launched. So an event is recorded behind each, and whoever reads asks the newest
    ones: nobody waits. Times are then those of reading, as nobody else looks.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_launched = self._num_done = 0
        self._newest_s = clock()
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_MOST_PENDING)

    def advance(self, device: torch.device) -> None:
        """One more layer, or a whole recorded step, is in the queue of its device; on a CPU it is done."""
        if device.type != "cuda":
            self._num_launched += 1
            self._note_done(self._num_launched)
        elif not torch.cuda.is_current_stream_capturing():  # what is captured is run by others, who count it
            self._num_launched += 1
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._pending.append((self._num_launched, event))

    @property
    def num_layers(self) -> int:
        """Attention layers, convolutions, scans, and recorded steps done so far."""
        self._ask_device()
        return self._num_done

    @property
    def newest_s(self) -> float:
        """When the newest of them was done, or found to be done, by the clock; at first the time of making."""
        self._ask_device()
        return self._newest_s

    def _ask_device(self) -> None:
        for number, event in reversed(list(self._pending)):
            if number <= self._num_done:
                return
            try:
                is_done = event.query()  # type: ignore[no-untyped-call]
            except RuntimeError:  # the device is lost, as the step's own thread will find
                return
            if is_done:
                self._note_done(number)
                return

    def _note_done(self, number: int) -> None:
        self._num_done, self._newest_s = number, self._clock()
