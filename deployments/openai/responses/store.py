"""Responses that are kept for later, each for its owner alone: bounded in number, bytes and age."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """A response that is kept, as JSON: nobody reads it where it lies.

    Attributes:
        response: The response.
        input_items: Of the conversation up to it, a list.
    """

    response: bytes
    input_items: bytes

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.response) + len(self.input_items)


class ResponseStore(Protocol):
    """Where responses are kept; one for all ingresses."""

    async def put(self, owner: str, name: str, record: Record) -> bool:
        """Keep a response; false where it is larger than all that may be kept.

        Raises:
            ServiceUnavailableError: The store does not answer.
        """
        ...

    async def get(self, owner: str, name: str) -> Record | None:
        """A response of that owner; None where there is none, or none any more.

        Raises:
            ServiceUnavailableError: The store does not answer.
        """
        ...

    async def delete(self, owner: str, name: str) -> bool:
        """Keep a response no longer; whether there was one.

        Raises:
            ServiceUnavailableError: The store does not answer.
        """
        ...


class Shelf:
    """Keeps responses in memory: where there are too many, the oldest of the owner go who has most bytes.

    So nobody makes another's go by keeping many.

    Args:
        max_responses: At most.
        max_bytes: Of all together.
        max_age_s: Of each.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self, max_responses: int, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, Record]] = OrderedDict()
        self._bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return self._bytes.total()

    def __len__(self) -> int:
        self._drop_old()
        return len(self._kept)

    def put(self, owner: str, name: str, record: Record) -> bool:
        """Keep a response; false where it is larger than all that may be kept."""
        if record.num_bytes > self._max_bytes:
            return False
        self._drop((owner, name))  # the newest stands last
        self._kept[owner, name] = (self._clock(), record)
        self._bytes[owner] += record.num_bytes
        self._drop_old()
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self._make_room(but=(owner, name))
        return True

    def get(self, owner: str, name: str) -> Record | None:
        """A response of that owner."""
        self._drop_old()
        found = self._kept.get((owner, name))
        return None if found is None else found[1]

    def delete(self, owner: str, name: str) -> bool:
        """Keep a response no longer; whether there was one."""
        self._drop_old()
        return self._drop((owner, name))

    def _drop(self, key: tuple[str, str]) -> bool:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes[key[0]] -= kept[1].num_bytes
            if not self._bytes[key[0]]:
                del self._bytes[key[0]]
        return kept is not None

    def _make_room(self, but: tuple[str, str]) -> None:
        oldest: dict[str, tuple[str, str]] = {}
        for key in self._kept:
            if key != but:
                oldest.setdefault(key[0], key)
        self._drop(oldest[max(oldest, key=self._bytes.__getitem__)])

    def _drop_old(self) -> None:
        limit_s = self._clock() - self._max_age_s
        while self._kept:
            key, (put_s, _) = next(iter(self._kept.items()))
            if put_s > limit_s:
                return
            self._drop(key)
