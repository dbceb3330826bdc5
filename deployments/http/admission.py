"""Who is taken in, who waits, and who is refused: one ingress' requests against its limits.

A request is counted, with the bytes of its body, before anything of it is read. When it is parsed, and before it is
tokenized, it asks for a slot per sequence, and may wait for them; then its tokens are counted.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from cluster.config.limits import Limits
from deployments.http.errors import ApiError

_MOST_OVERTAKEN = 16
"""So many times a request that does not fit is passed over; then slots are kept free until it fits."""
_FIRST_EXPECTED_TOKENS = 1024
_NEWEST_SHARE = 1 / 16
"""What the newest request weighs in the means."""


def _jitter() -> float:
    return random.uniform(0.5, 1.5)


class Admission:
    """One ingress' book of requests; on the event loop.

    Slots are given first to keys below their share, and to the others where no such key waits; among these by priority,
    then in the order of arrival. A request that needs more slots than are free lets those behind it pass, but only 16
    times: then slots are kept free for it until it fits, so that many small requests never starve a large one. Where
    all waiting slots are taken, the last request of a key beyond its share of them gives way to one of a key below.
    Nobody waits for bytes or tokens: of these each key has its share and no more, but for a single request. Output
    counts as long as it has been on average lately, and as it is when it becomes longer.

    Args:
        limits: What is taken in.
        clock: Monotonic, in seconds.
        jitter: Factor on the expected wait, so that those who are refused together do not come back together.

    Attributes:
        num_requests: Requests that have entered and not left.
        num_bytes: Of their bodies.
        num_sequences: Slots that are taken.
        num_tokens: Tokens that are counted.
        num_refused: Requests that were refused for want of room, with 429.
        expected_tokens: Mean output tokens of a sequence.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = _jitter
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._jitter = jitter
        self.expected_tokens = float(_FIRST_EXPECTED_TOKENS)
        self._expected_s = 0.0  # that a sequence has its slot
        self.num_requests = 0
        self.num_bytes = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_refused = 0
        self._entered: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []

    @property
    def _share(self) -> float:
        """Share of the slots that one key may hold while others wait, and of the bytes and tokens at all."""
        return self.limits.max_share_per_key or 1.0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their slots."""
        return len(self._waiting)

    @property
    def slots_used(self) -> float:
        """Share of the slots that are taken or waited for; it may be more than 1."""
        wanted = self.num_sequences + sum(waiter.count for waiter in self._waiting)
        return wanted / self.limits.max_concurrent_requests

    def set_limits(self, limits: Limits) -> None:
        """Go by other limits from now on: who waits for more than there will ever be is refused, and others come in."""
        self.limits = limits
        for waiter in self._waiting:
            if waiter.count > limits.max_concurrent_requests and not waiter.granted.done():
                waiter.granted.set_exception(self._too_many())
        self._admit()

    def enter(self, key: str, num_bytes: int) -> Reservation:
        """Count a request of whom nothing is known but its key and the size of its body.

        Raises:
            ApiError: 429: there are too many, or their bodies are too large together.
        """
        limits = self.limits
        most = limits.max_concurrent_requests + limits.max_queued_requests
        # Through a door that others fill, a key below its share still comes in: somebody's waiting slot becomes its.
        is_below_share = self._share < 1 and self._entered[key] + 1 <= self._share * most
        if self.num_requests >= (2 * most if is_below_share else most):
            counts = f"{self.num_requests} requests are being served or wait"
            raise self._full(counts, "max_concurrent_requests and limits.max_queued_requests")
        self._check_bytes(key, num_bytes)
        self.num_requests += 1
        self._add_bytes(key, num_bytes)
        self._entered[key] += 1
        return Reservation(self, key, num_bytes)

    async def _take(self, key: str, count: int, priority: int) -> None:
        if count > self.limits.max_concurrent_requests:
            raise self._too_many()
        waiter = _Waiter(key, count, priority, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiter, key=attrgetter("priority"))
        self._admit()
        if waiter.granted.done():
            return
        self._waiting.remove(waiter)
        self._make_room_to_wait(key)
        insort(self._waiting, waiter, key=attrgetter("priority"))
        try:
            await waiter.granted
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self._give_back(key, count)
            self._admit()
            raise

    def _make_room_to_wait(self, key: str) -> None:
        """Raise 429 if nobody may wait any more, or else have one that has more than its share give way."""
        limits = self.limits
        if len(self._waiting) < limits.max_queued_requests:
            return
        counts = Counter(waiter.key for waiter in self._waiting)
        share = self._share * limits.max_queued_requests
        if counts[key] + 1 <= share:
            for waiter in reversed(self._waiting):
                if counts[waiter.key] > share and not waiter.granted.done():
                    self._waiting.remove(waiter)
                    waiter.granted.set_exception(
                        self._full("requests of other API keys wait, and this key has many", "max_share_per_key")
                    )
                    return
        wait = f"; {limits.max_queued_requests} more wait" if limits.max_queued_requests else ""
        text = f"{self.num_sequences} of {limits.max_concurrent_requests} sequences are open{wait}"
        raise self._full(text, "max_concurrent_requests")

    def _fits(self, count: int) -> bool:
        return self.num_sequences + count <= self.limits.max_concurrent_requests

    def _grant(self, key: str, count: int) -> None:
        self.num_sequences += count
        self._held[key] += count

    def _give_back(self, key: str, count: int) -> None:
        self.num_sequences -= count
        self._held[key] -= count

    def _admit(self) -> None:
        """Give free slots to those who wait."""
        # Whoever has just given up stands in the list until its task's next turn.
        self._waiting = [waiter for waiter in self._waiting if not waiter.granted.done()]
        while (waiter := self._next()) is not None:
            self._waiting.remove(waiter)
            self._grant(waiter.key, waiter.count)
            waiter.granted.set_result(None)

    def _next(self) -> _Waiter | None:
        """Whose turn it is of those who fit; None where nobody fits, or slots are kept free for one that does not.

        Those before it who do not fit are overtaken, and count that.
        """
        passed: list[_Waiter] = []
        for waiter in self._in_order():
            if self._fits(waiter.count):
                for one in passed:
                    one.num_overtaken += 1
                return waiter
            if waiter.num_overtaken >= _MOST_OVERTAKEN:
                return None
            passed.append(waiter)
        return None

    def _in_order(self) -> Iterator[_Waiter]:
        """Those who wait, in the order of their turns: of each key below its share the first, then all others."""
        if self.num_sequences >= self.limits.max_concurrent_requests:
            return
        first_of_keys = {waiter.key: waiter for waiter in reversed(self._waiting)}
        favored = [
            waiter for waiter in self._waiting if first_of_keys[waiter.key] is waiter and self._is_below_share(waiter)
        ]
        yield from favored
        passed = set(favored)
        yield from (waiter for waiter in self._waiting if waiter not in passed)

    def _is_below_share(self, waiter: _Waiter) -> bool:
        held, share = self._held[waiter.key], self._share * self.limits.max_concurrent_requests
        return not held or held + waiter.count <= share

    def _check_bytes(self, key: str, more: int, own: int = 0) -> None:
        """Raise 429 where bodies would be too large together; ``own`` bytes are there of the request that asks."""
        most = self.limits.max_total_body_bytes
        if self.num_bytes + more > most:
            counts = f"requests of {self.num_bytes} bytes are being served or wait, of {most} at most"
            raise self._full(counts, "max_total_body_bytes")
        held = self._bytes[key] - own  # a single request may be larger than its key's share
        self._check_share("bytes", held, own + more, most)

    def _add_bytes(self, key: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes[key] += num_bytes

    def _add_tokens(self, key: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._tokens[key] += num_tokens

    def _check_share(self, what: str, held: int, more: int, most: int) -> None:
        """Raise 429 where a key that holds some would hold more than its share."""
        if held and held + more > self._share * most:
            counts = f"requests of this API key hold {held} {what}, of {most} that all keys share"
            raise self._full(counts, "max_share_per_key")

    def _too_many(self) -> ApiError:
        most = self.limits.max_concurrent_requests
        text = f"prompts times n must be at most {most} sequences (limits.max_concurrent_requests)"
        return ApiError(400, text, param="n", code="invalid_value")

    def _learn(self, held_s: float, num_tokens: float) -> None:
        """Take a request's sequences into the means: how long they had their slots, and their output."""
        self._expected_s += (_NEWEST_SHARE if self._expected_s else 1.0) * (held_s - self._expected_s)
        self.expected_tokens += _NEWEST_SHARE * (num_tokens - self.expected_tokens)

    def _retry_after_s(self) -> int:
        """When a slot is expected to be free behind all who wait, in seconds: at most as long as anybody waits here."""
        limits = self.limits
        num_ahead = 1 + sum(waiter.count for waiter in self._waiting)
        wait_s = self._jitter() * self._expected_s * num_ahead / limits.max_concurrent_requests
        return max(limits.retry_after_s, math.ceil(min(wait_s, limits.queue_timeout_s)))

    def _full(self, why: str, limit: str) -> ApiError:
        self.num_refused += 1
        headers = {"Retry-After": str(self._retry_after_s())}
        text = f"no more requests are taken now: {why} (limits.{limit}); send it again later"
        return ApiError(429, text, "rate_limit_error", None, "overloaded", headers)


class Reservation:
    """What one request holds of the bounds, from its arrival until it leaves."""

    def __init__(self, admission: Admission, key: str, num_bytes: int) -> None:
        self._admission = admission
        self._key = key
        self._num_bytes = num_bytes
        self._num_sequences = 0
        self._num_tokens = 0
        self._num_expected = 0
        self._num_output = 0
        self._began_s = 0.0

    async def take(self, num_sequences: int, priority: int = 0) -> None:
        """Take a slot per sequence, all at once, waiting for them if need be; once. Lower priorities go first.

        Raises:
            ApiError: 429: nobody may wait any more, or this one has given way to another key's.
        """
        await self._admission._take(self._key, num_sequences, priority)
        self._num_sequences = num_sequences
        self._began_s = self._admission._clock()

    def body_came(self, num_bytes: int) -> None:
        """Count a body as long as what has come of it: for one whose length is not declared that grows as it comes.

        Raises:
            ApiError: 429: all bodies, or those of the key, are too large together now.
        """
        if self._num_bytes < 0:
            return
        more = num_bytes - self._num_bytes
        if more > 0:
            self._admission._check_bytes(self._key, more, self._num_bytes)
        self._admission._add_bytes(self._key, more)
        self._num_bytes = num_bytes

    def add_tokens(self, num_tokens: int, longest: Sequence[int] = ()) -> None:
        """Count its prompts and what goes with them, and the outputs that are expected.

        Args:
            num_tokens: Of the prompts, and what goes with them.
            longest: Most output tokens of each sequence.

        Raises:
            ApiError: 429: with it there are too many; 400: alone it could have too many.
        """
        admission = self._admission
        most, at_most = admission.limits.max_total_tokens, num_tokens + sum(longest)
        self._num_expected = sum(min(length, math.ceil(admission.expected_tokens)) for length in longest)
        num_tokens += self._num_expected
        if most is not None and at_most > most:
            text = f"prompts, max_tokens and what goes with them must come to {most} tokens of one request at most "
            text += f"(limits.max_total_tokens), not {at_most}"
            raise ApiError(400, text, param="max_tokens", code="request_too_large")
        if most is not None and admission.num_tokens + num_tokens > most:
            counts = f"requests of {admission.num_tokens} tokens are open, of {most} at most"
            raise admission._full(counts, "max_total_tokens")
        if most is not None:
            admission._check_share("tokens", admission._tokens[self._key], num_tokens, most)
        admission._add_tokens(self._key, num_tokens)
        self._num_tokens += num_tokens

    def generated(self, num_tokens: int) -> None:
        """Count output tokens: those beyond what was expected are added."""
        before = max(self._num_output, self._num_expected)
        self._num_output += num_tokens
        more = self._num_output - before
        if more > 0 and self._num_bytes >= 0:
            self._admission._add_tokens(self._key, more)
            self._num_tokens += more

    def leave(self) -> None:
        """Give everything back; idempotent."""
        admission = self._admission
        if self._num_bytes >= 0:
            admission.num_requests -= 1
            admission._entered[self._key] -= 1
            admission._add_bytes(self._key, -self._num_bytes)
            admission._add_tokens(self._key, -self._num_tokens)
            if self._num_sequences:
                admission._give_back(self._key, self._num_sequences)
                admission._learn(admission._clock() - self._began_s, self._num_output / self._num_sequences)
            self._num_bytes = -1
            admission._admit()


class _Waiter:
    def __init__(self, key: str, count: int, priority: int, granted: asyncio.Future[None]) -> None:
        self.key = key
        self.count = count
        self.priority = priority
        self.granted = granted
        self.num_overtaken = 0
