"""What outlives an ingress: stored responses, and the adapters loaded at run time. One store for all ingresses.

This module is imported by the process that holds the store, so it imports nothing that is large.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from cluster.config.limits import ResponsesStore

Version = tuple[str, int]
"""A store's own id, which differs after it has lost what it kept, and the number of changes to its names so far."""
NOTHING: Version = ("", 0)
"""The version of whoever has read nothing yet."""
_SPARE = 1024


class Changes(NamedTuple):
    """Names that have changed, and what each means now.

    Attributes:
        version: Of the store; the next question starts from it.
        is_all: Whether these are all names: any other one means nothing.
        values: By name; None where the name means nothing any more.
    """

    version: Version
    is_all: bool
    values: dict[str, bytes | None]


class Store(Protocol):
    """Two tables: records by owner and name, bounded; and names that everybody watches.

    Every method raises :class:`specdec.core.errors.ServiceUnavailableError` where the store does not answer.
    """

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        """Keep a record; False where it is larger than all records together may be."""
        ...

    async def get(self, owner: str, name: str) -> bytes | None:
        """A record of that owner; None where there is none, or none any more."""
        ...

    async def delete(self, owner: str, name: str) -> bool:
        """Drop a record; returns whether there was one."""
        ...

    async def assign(self, name: str, value: bytes | None) -> bool:
        """Let a name mean a value from now on, or nothing; returns whether it meant anything. The last write wins."""
        ...

    async def changes(self, since: Version, wait_s: float) -> Changes:
        """The names that have changed since a version; waits up to ``wait_s`` seconds while there are none."""
        ...


@dataclass(slots=True)
class _Owned:
    """One owner's records: their names, oldest first, and their size."""

    names: OrderedDict[str, None] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class MemoryStore:
    """A :class:`Store` in this process.

    Beyond a bound the owner with the most bytes loses its oldest record, so no owner can push out another's by keeping
    many. One eviction takes time logarithmic in the number of owners, whatever the number of records.

    Args:
        bounds: How many records, how large together, and for how long.
        clock: Monotonic, in seconds.
    """

    def __init__(self, bounds: ResponsesStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._records: OrderedDict[tuple[str, str], tuple[float, bytes]] = OrderedDict()
        self._owners: dict[str, _Owned] = {}
        self._largest: list[tuple[int, str]] = []  # a heap by -num_bytes; entries that are out of date are skipped
        self._id = uuid.uuid4().hex
        self._version = self._complete_since = 0
        self._names: dict[str, tuple[int, bytes]] = {}  # in the order of their versions, like the next
        self._gone: dict[str, int] = {}
        self._news = asyncio.Event()
        self.num_bytes = 0

    def __len__(self) -> int:
        self._drop_old()
        return len(self._records)

    async def set_bounds(self, bounds: ResponsesStore) -> None:
        """Apply other bounds from now on."""
        self._bounds = bounds
        self._make_room(("", ""))

    async def put(self, owner: str, name: str, value: bytes) -> bool:
        """Keep a record; False where it is larger than all records together may be."""
        if len(value) > self._bounds.max_bytes:
            return False
        self._drop((owner, name))
        self._records[owner, name] = (self._clock(), value)
        owned = self._owners.setdefault(owner, _Owned())
        owned.names[name] = None
        self._resize(owner, owned, len(value))
        self._make_room((owner, name))
        return True

    async def get(self, owner: str, name: str) -> bytes | None:
        """A record of that owner; None where there is none, or none any more."""
        self._drop_old()
        found = self._records.get((owner, name))
        return None if found is None else found[1]

    async def delete(self, owner: str, name: str) -> bool:
        """Drop a record; returns whether there was one."""
        self._drop_old()
        return self._drop((owner, name))

    async def assign(self, name: str, value: bytes | None) -> bool:
        """Let a name mean a value from now on, or nothing; returns whether it meant anything."""
        was_there = self._names.pop(name, None) is not None
        self._gone.pop(name, None)
        self._version += 1
        if value is not None:
            self._names[name] = (self._version, value)
        else:
            self._gone[name] = self._version
            if len(self._gone) > len(self._names) + _SPARE:  # whoever is that far behind reads all names again
                self._gone.clear()
                self._complete_since = self._version
        self._news.set()
        self._news = asyncio.Event()
        return was_there

    async def changes(self, since: Version, wait_s: float) -> Changes:
        """The names that have changed since a version; waits up to ``wait_s`` seconds while there are none."""
        news = self._news
        if since == (self._id, self._version) and wait_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), wait_s)
        is_all = since[0] != self._id or since[1] < self._complete_since
        start = 0 if is_all else since[1]
        values: dict[str, bytes | None] = {}
        for name, (version, value) in reversed(self._names.items()):
            if version <= start:
                break
            values[name] = value
        for name, version in reversed(self._gone.items()):
            if version <= start:
                break
            values[name] = None
        return Changes((self._id, self._version), is_all, values)

    def _resize(self, owner: str, owned: _Owned, num_bytes: int) -> None:
        owned.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if not owned.names:
            del self._owners[owner]
            return
        heappush(self._largest, (-owned.num_bytes, owner))
        if len(self._largest) > 4 * len(self._owners) + _SPARE:
            self._largest = [(-one.num_bytes, name) for name, one in self._owners.items()]
            heapify(self._largest)

    def _drop(self, key: tuple[str, str]) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        owned = self._owners[key[0]]
        del owned.names[key[1]]
        self._resize(key[0], owned, -len(record[1]))
        return True

    def _drop_old(self) -> None:
        limit_s = self._clock() - self._bounds.max_age_s
        while self._records:
            key, (put_s, _) = next(iter(self._records.items()))
            if put_s > limit_s:
                return
            self._drop(key)

    def _make_room(self, newest: tuple[str, str]) -> None:
        """Keep to the bounds; the newest record stays."""
        self._drop_old()
        spared: list[tuple[int, str]] = []
        while len(self._records) > self._bounds.max_responses or self.num_bytes > self._bounds.max_bytes:
            size, owner = heappop(self._largest)
            owned = self._owners.get(owner)
            if owned is None or -size != owned.num_bytes:
                continue
            oldest = next(iter(owned.names))
            if (owner, oldest) == newest:  # it has nothing else
                spared.append((size, owner))
            else:
                self._drop((owner, oldest))
        for one in spared:
            heappush(self._largest, one)
