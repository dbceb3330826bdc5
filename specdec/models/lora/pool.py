"""Which adapters lie on the device: those of the sequences that came first, and else those used last."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import NamedTuple

from specdec.checkpoint.fingerprint import adapter_folder
from specdec.core.errors import ModelLoadError, reason_of
from specdec.core.types import Adapter
from specdec.models.lora.checkpoint import AdapterCheckpoint
from specdec.models.lora.slots import AdapterSlots, Weights

_IDLE_S = 5.0
"""A thread that reads adapters ends after so long without one."""
_SLOW_READ_S = 2.0
"""A file that takes longer to read leaves its slot to others, until it is there."""
_NONE_SERVED = "this worker serves no adapters"


class _Reading(NamedTuple):
    """A file that is being read, or was, and when that began on the monotonic clock."""

    weights: Future[Weights]
    since_s: float

    @property
    def is_slow(self) -> bool:
        return not self.weights.done() and time.monotonic() - self.since_s > _SLOW_READ_S


class AdapterPool:
    """Adapters by what is in them, loaded when a sequence needs them. Used by one thread; each file is read by its own.

    Where there are more than slots, those of the sequences that came first have them, as long as these last; sequences
    with others wait. Of what nobody needs, the least recently used one goes first. A file that hangs holds a
    thread, and no slot.

    Args:
        slots: Of the model; None where it serves no adapters: then all fail.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self._slots = slots
        self._max_loras = 0 if slots is None else slots.room.max_loras
        self._holders: dict[str, tuple[float, str, Adapter]] = {}
        self._first: list[Adapter] = []
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        self._reading: dict[str, _Reading] = {}
        self._failures: dict[str, str] = {}
        self._to_read: SimpleQueue[tuple[Adapter, Future[Weights]]] = SimpleQueue()
        self._idle = Semaphore(0)
        self.num_loads = 0

    def hold(self, key: str, adapter: Adapter | None, arrival_s: float) -> None:
        """A sequence needs its adapter, if it has one, until it is released."""
        if adapter is not None and key not in self._holders:
            self._holders[key] = arrival_s, key, adapter
            self._choose()

    def release(self, key: str) -> None:
        """A sequence needs its adapter no more; unknown keys are ignored."""
        if self._holders.pop(key, None) is not None:
            self._choose()

    def _choose(self) -> None:
        adapters: dict[str, Adapter] = {}
        for _, _, adapter in sorted(self._holders.values()):
            adapters.setdefault(adapter.fingerprint, adapter)
        slow = {name for name, reading in self._reading.items() if reading.is_slow}
        self._first = [one for name, one in adapters.items() if name not in slow][: self._max_loras]
        self._failures = {name: reason for name, reason in self._failures.items() if name in adapters}

    def prepare(self) -> None:
        """Before a step: begin to read what is needed, and copy to the device what has been read."""
        if self._reading:
            self._choose()
        needed = {adapter.fingerprint for adapter in self._first}
        for name in [name for name, reading in self._reading.items() if name not in needed and reading.weights.done()]:
            del self._reading[name]  # until then it is kept, so that a file that hangs holds one thread at most
        for adapter in self._first:
            name = adapter.fingerprint
            if name in self._slot_of:
                self._slot_of.move_to_end(name)
            elif name not in self._failures and name not in self._reading:
                self._reading[name] = _Reading(self._start_reading(adapter), time.monotonic())
            elif name in self._reading and self._reading[name].weights.done():
                self._take(name, self._reading.pop(name).weights, needed)

    def slot(self, adapter: Adapter | None) -> int | None:
        """Where an adapter lies; None where it does not, or there is none."""
        return None if adapter is None else self._slot_of.get(adapter.fingerprint)

    def failure(self, adapter: Adapter | None) -> str:
        """Why an adapter cannot be had; empty where it can, or where nobody knows yet."""
        if adapter is None:
            return ""
        return _NONE_SERVED if self._slots is None else self._failures.get(adapter.fingerprint, "")

    def must_wait(self, adapter: Adapter | None) -> bool:
        """Whether a sequence cannot take part in a step, as its adapter is not on the device."""
        return adapter is not None and adapter.fingerprint not in self._slot_of

    def gauges(self) -> dict[str, float]:
        """What is held now, and how many were loaded since the start."""
        return {"num_loaded_adapters": float(len(self._slot_of)), "num_adapter_loads": float(self.num_loads)}

    def _start_reading(self, adapter: Adapter) -> Future[Weights]:
        """Read beside the step. A file that comes slowly, or never, holds up no other, nor the process's end."""
        reading: Future[Weights] = Future()
        self._to_read.put((adapter, reading))
        if not self._idle.acquire(blocking=False):
            Thread(target=self._read_all, name="adapters", daemon=True).start()
        return reading

    def _read_all(self) -> None:
        """Read what is asked for. A thread is used again: memory that a thread has freed stays with its allocator."""
        while True:
            try:
                adapter, reading = self._to_read.get(timeout=_IDLE_S)
            except Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # something was just asked for
            try:
                reading.set_result(self._read(adapter))
            except BaseException as error:
                reading.set_exception(error)
            del reading
            self._idle.release()

    def _read(self, adapter: Adapter) -> Weights:
        assert self._slots is not None, "nothing is read where nothing is served"
        checkpoint = AdapterCheckpoint(adapter_folder(adapter.path), self._slots.shapes, self._slots.room.max_rank)
        if checkpoint.fingerprint != adapter.fingerprint:
            raise ModelLoadError(f"the adapter {adapter.name} at {adapter.path} is another than when it was loaded")
        return self._slots.staged(checkpoint.weights)

    def _take(self, name: str, reading: Future[Weights], needed: set[str]) -> None:
        assert self._slots is not None, "nothing is read where nothing is served"
        try:
            weights = reading.result()
        except Exception as error:  # whatever a file makes of its reader: it is the adapter's own
            self._failures[name] = str(error) if isinstance(error, ModelLoadError) else reason_of(error)
            return
        free = set(range(self._max_loras)) - set(self._slot_of.values())
        slot = min(free) if free else self._slot_of.pop(next(one for one in self._slot_of if one not in needed))
        self._slots.put(slot, weights)
        self._slot_of[name] = slot
        self.num_loads += 1
