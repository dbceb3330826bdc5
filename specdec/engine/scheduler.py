"""What a step computes: which sequences, how many tokens of each, and how many draft tokens after them.

Arithmetic over ids and counts. The cache behind it (:class:`KVCache`) says what is computed already and finds room;
nothing here knows a model, a tensor or a clock.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_LONG_PROMPT_SHARE = 4
"""A long prompt gets one in so many tokens of a step that others have a part in."""
_STEPS_UNTIL_LARGER = 64
"""Steps after which a budget that was cut, because memory ran out, grows by a third."""
_MAX_PASSING = 16
"""Requests that may begin while one before them waits for room; then all wait for it."""


class Request(NamedTuple):
    """What a sequence wants of a step.

    Attributes:
        key: The sequence.
        num_tokens: Length that its cache should reach, at least 1. The last token is always computed anew.
        num_draft_tokens: Draft tokens that should be computed after them in the same step.
        max_new_tokens: Most tokens that it can compute in a step, at least 1.
        num_computed_tokens: Tokens that it holds in the cache, fewer than it wants; 0 if it holds nothing.
        is_branch: Whether it begins as a copy of another sequence. It never waits in the queue for room.
        owner: Whose it is. Only requests of the same owner wait for one that has no room to begin.
    """

    key: str
    num_tokens: int
    num_draft_tokens: int = 0
    max_new_tokens: int = sys.maxsize
    num_computed_tokens: int = 0
    is_branch: bool = False
    owner: bytes = b""

    @property
    def is_queued(self) -> bool:
        """Whether it waits to begin."""
        return not self.num_computed_tokens and not self.is_branch


class ScheduledRow(NamedTuple):
    """A request's part in a step.

    Attributes:
        request: Index of the request.
        num_computed_tokens: Tokens whose keys and values are cached.
        num_new_tokens: Tokens of the request that are computed now, at least 1.
        num_draft_tokens: Draft tokens after them; 0 unless the new tokens are the request's last.
    """

    request: int
    num_computed_tokens: int
    num_new_tokens: int
    num_draft_tokens: int


class CachedPrefix(NamedTuple):
    """The part of a sequence that the prefix cache has.

    Attributes:
        num_tokens: Tokens that need not be computed.
        next_block: Content hash of the first block that is missing; None if there is no such full block, or the
            sequence shares no prefixes.
    """

    num_tokens: int
    next_block: Hashable | None = None


class KVCache(Protocol):
    """Memory for sequences, as the scheduler sees it. Keys are those of the step's requests."""

    def find_prefix(self, key: str) -> CachedPrefix:
        """What a sequence that holds nothing would find in the prefix cache. Takes nothing."""
        ...

    def allocate(self, key: str, num_step_tokens: int) -> int | None:
        """Make room for all of a sequence's tokens, taking it from later sequences, the last first.

        Args:
            key: The sequence.
            num_step_tokens: At most so many of its tokens are in this step: layers with sliding windows need no room
                for more.

        Returns:
            The number of its tokens that are computed already, prefix reuse included; None if there is no room, or if
            what it held at the beginning of the step was taken from it. Then nothing has changed.
        """
        ...

    def extend(self, key: str, length: int) -> bool:
        """Make room for ``length`` tokens in all, taking it from nobody. False if there is none."""
        ...

    def extend_all(self, keys: Sequence[str], lengths: Sequence[int]) -> bool:
        """Make room for so many tokens of each of some sequences that hold all but their last, taking it from nobody.

        False, with room for none, where there may not be enough.
        """
        ...

    def blocks(self, key: str, start: int, stop: int) -> Iterable[Hashable]:
        """Content hashes of the full blocks that positions [start, stop) lie in; none where none are shared."""
        ...


class Scheduler:
    """Fills each step from the requests that there are, in their order: owners in turn, then priority, then arrival.

    - A step has at most ``max_num_seqs`` rows and ``max_num_batched_tokens`` tokens. The first ``max_num_seqs``
      requests compete for it. Later ones wait, so that those that decode never starve a prompt among the first.
    - Each sequence that decodes gets a token. What is left is for draft tokens and for prompts: half each if both
      can use it. Prompts are read in chunks.
    - Where sequences that decode may lack several tokens, a quarter of the step is kept for prompts: the last of those
      that decode, a drafter's branches, wait for it.
    - A prompt is long if a whole step is too short for it. Beside sequences that decode, or short prompts, a long
      prompt gets at most a quarter of the step: short prompts do not wait for the whole of it, and the time between
      tokens stays short. Alone, long prompts get all of the step, in order.
    - A prompt that has not begun waits while another one computes the next block that both have in common, then takes
      it from the prefix cache. One that has begun never looks again. If the other one comes later in the order, it
      goes on in the place of the prompt that waits for it; if it cannot, nobody waits for it.
    - Memory is given in that order. The last sequence is preempted first.
    - If a request has no room to begin, at most 16 later ones of its owner begin before it. Then all of that owner wait
      for it, and nothing is looked up for them. Other owners' requests do not wait; behind the first head
      a step looks up at most 32 requests of all owners.
    - After a step ran out of memory the next ones have fewer tokens: no drafts if there were any, else three quarters.
      Then drafts get what prompts leave. If there are fewer tokens than rows, the rows take turns.

    Args:
        max_num_batched_tokens: Most tokens in a step, at least 1.
        max_num_seqs: Most rows in a step, at least 1. A budget of fewer tokens has no more rows than tokens.
        max_decode_tokens: A sequence that lacks at most so many tokens decodes. A drafter catches up with a few.

    Raises:
        ValueError: A limit is less than 1.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, *, max_decode_tokens: int = 1) -> None:
        if min(max_num_batched_tokens, max_num_seqs, max_decode_tokens) < 1:
            raise ValueError("max_num_batched_tokens, max_num_seqs and max_decode_tokens must be at least 1")
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self._max_decode_tokens = max_decode_tokens
        self._budget = max_num_batched_tokens
        self._num_steps = 0
        self._num_steps_at_budget = 0
        self._queues: dict[bytes, _Queue] = {}
        self._first_row = 0  # among those that have begun, if they take turns

    @property
    def budget(self) -> int:
        """Most tokens in the next step: ``max_num_batched_tokens``, or less after memory ran out."""
        return self._budget

    def schedule(self, requests: Sequence[Request], cache: KVCache) -> list[ScheduledRow]:
        """Choose what the next step computes.

        Args:
            requests: In order; no key twice.
            cache: Holds what earlier steps computed. Room for the chosen rows is allocated when this returns.

        Returns:
            A row for each request that gets on, in the order of the requests.
        """
        self._begin_step()
        requests = requests[: self.max_num_seqs]
        is_whole = self._budget == self.max_num_batched_tokens
        if len(requests) <= self._budget:
            return _Step(requests, cache, self._budget, self._max_decode_tokens, self._queues, is_whole).rows(
                self._num_steps
            )
        numbers = self._rows_in_turn(requests)
        step = _Step(
            [requests[i] for i in numbers], cache, self._budget, self._max_decode_tokens, self._queues, is_whole
        )
        return [row._replace(request=numbers[row.request]) for row in step.rows(self._num_steps)]

    def schedule_decoding(
        self, keys: Sequence[str], lengths: Sequence[int], num_draft_tokens: int, cache: KVCache
    ) -> bool:
        """Choose all of a step in which each sequence lacks one token, if there is room for all of it.

        Then it is what :meth:`schedule` would choose, and as much is allocated.

        Args:
            keys: In order; none twice.
            lengths: Of each sequence with the token that it lacks and its draft.
            num_draft_tokens: Of all drafts.
            cache: As for :meth:`schedule`.

        Returns:
            False where there may not be room for everything: :meth:`schedule` has to choose.
        """
        budget = self._budget
        is_whole = budget == self.max_num_batched_tokens and len(keys) <= self.max_num_seqs
        if not is_whole or len(keys) + num_draft_tokens > budget or not cache.extend_all(keys, lengths):
            return False
        self._begin_step()
        return True

    def shrink(self, num_tokens: int, num_draft_tokens: int, reason: str) -> bool:
        """Give the next steps fewer tokens, because a step ran out of memory.

        They have no more than the step without its drafts; three quarters of it if it had none.

        Args:
            num_tokens: Tokens of the step, at least 1, drafts included.
            num_draft_tokens: Its draft tokens, fewer than ``num_tokens``.
            reason: What the step raised, for the log.

        Returns:
            False if the step had a single token: its sequence is suspect, and the budget is whole again.
        """
        self._num_steps_at_budget = 0
        if num_tokens == 1:
            logger.warning("A step of one token ran out of memory. Lower kv_cache_memory: %s", reason)
            self._budget = self.max_num_batched_tokens
            return False
        self._budget = num_tokens - (num_draft_tokens or -(-num_tokens // 4))
        logger.warning(
            "A step of %d tokens ran out of memory; trying at most %d. Lower max_num_batched_tokens: %s",
            num_tokens,
            self._budget,
            reason,
        )
        return True

    def _rows_in_turn(self, requests: Sequence[Request]) -> list[int]:
        """Choose as many requests as there are tokens, those that have begun before others, and these by turns."""
        begun = [i for i, request in enumerate(requests) if not request.is_queued]
        if len(begun) <= self._budget:
            queued = (i for i, request in enumerate(requests) if request.is_queued)
            return sorted([*begun, *islice(queued, self._budget - len(begun))])
        first = self._first_row % len(begun)
        self._first_row = first + self._budget
        return sorted([*begun[first:], *begun[:first]][: self._budget])

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._num_steps_at_budget += 1
        if self._budget < self.max_num_batched_tokens and self._num_steps_at_budget > _STEPS_UNTIL_LARGER:
            self._budget = min(self._budget - (-self._budget // 3), self.max_num_batched_tokens)
            self._num_steps_at_budget = 0


@dataclass(slots=True)
class _Queue:
    """Who of an owner waits for room across steps.

    Attributes:
        head: The first request that has no room to begin.
        num_passed: Later requests that have begun since.
        num_may_pass: Later requests that may still try in this step.
        is_reached: Whether this step has come to the head.
    """

    head: str
    num_passed: int = 0
    num_may_pass: int = _MAX_PASSING
    is_reached: bool = True


class _Step:
    """One step while it is filled.

    Args:
        requests: Those that compete for it.
        cache: Holds what is computed, and has room.
        budget: Most tokens.
        max_decode_tokens: Of a sequence that decodes.
        queues: Who waits for room, by owner; kept up to date.
        shares_with_drafts: Whether drafts get half of what decoding leaves, or only what prompts leave.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cache: KVCache,
        budget: int,
        max_decode_tokens: int,
        queues: dict[bytes, _Queue],
        shares_with_drafts: bool,
    ) -> None:
        self._requests, self._cache, self._budget, self._queues = requests, cache, budget, queues
        self._max_decode_tokens, self._shares_with_drafts = max_decode_tokens, shares_with_drafts
        queued = {request.key for request in requests if request.is_queued} if queues else set()
        for owner, queue in [*queues.items()]:
            queue.num_may_pass, queue.is_reached = _MAX_PASSING - queue.num_passed, False
            if queue.head not in queued:
                del queues[owner]
        self._look_up_prefixes()
        self._decodes = [0 < unread <= max_decode_tokens for unread in self._unread]
        # The next block of each prompt that has begun, which a prompt before it may wait for.
        self._begun: dict[Hashable, int] = {
            digest: index
            for index, request in reversed([*enumerate(requests)])
            if (n := request.num_computed_tokens) and not self._decodes[index]
            for digest in cache.blocks(request.key, n, n + 1)
        }
        self._computing: set[Hashable] = set()
        self._rows: dict[int, ScheduledRow] = {}
        self._left, self._for_prompts, self._for_long = budget, self._prompt_budget(), self._long_prompt_budget()
        self._num_to_decode = sum(self._decodes)

    def _look_up_prefixes(self) -> None:
        """Find out what each request has to compute; 0 for those that wait behind the head and may not pass it."""
        self._prefixes: list[CachedPrefix | None] = []
        self._unread: list[int] = []
        places: dict[bytes, int] = {}  # of owners whose head has been reached
        left = sys.maxsize  # look-ups of all owners, behind the first head
        for request in self._requests:
            prefix, num_cached, owner = None, request.num_computed_tokens, request.owner
            if request.is_queued and (left <= 0 or places.get(owner, 1) <= 0):
                num_cached = request.num_tokens
            elif not num_cached:
                prefix = self._cache.find_prefix(request.key)
                num_cached = prefix.num_tokens
                left -= request.is_queued
                if owner in places:
                    places[owner] -= request.is_queued
            queue = self._queues.get(owner)
            if queue is not None and request.key == queue.head:
                places[owner] = queue.num_may_pass
                left = min(left, 2 * _MAX_PASSING)
            self._prefixes.append(prefix)
            self._unread.append(request.num_tokens - num_cached)

    def rows(self, turn: int) -> list[ScheduledRow]:
        for index, request in enumerate(self._requests):
            self._num_to_decode -= self._decodes[index]
            prefix = self._prefixes[index]
            digest = None if prefix is None else prefix.next_block
            if digest not in self._computing:
                begun = self._begun.get(digest)
                # The one that was to compute the block goes on in this one's place, or is not waited for.
                if begun is None or begun <= index or not self._add_row(begun):
                    self._add_row(index)
            queue = self._queues.get(request.owner)
            if queue is not None and request.key == queue.head:
                queue.is_reached = True
        return self._with_drafts([self._rows[index] for index in sorted(self._rows)], self._left, turn)

    def _add_row(self, index: int) -> bool:
        """Give a request its part in the step. Return False if it has none."""
        if index in self._rows:
            return False
        request, decodes, is_long = self._requests[index], self._decodes[index], self._is_long(index)
        if decodes:
            # A token for each that comes after, but the first come first if there is not one for each.
            left = self._left - self._for_prompts
            count = max(left - self._num_to_decode, min(1, left))
        else:
            count = min(self._for_prompts, self._for_long) if is_long else self._for_prompts
        count = min(count, self._unread[index], request.max_new_tokens)
        num_computed = self._allocate(request, count) if count > 0 else None
        if num_computed is None:
            return False
        count = min(count, request.num_tokens - num_computed)
        self._rows[index] = ScheduledRow(index, num_computed, count, 0)
        self._left -= count
        if not decodes:
            self._for_prompts -= count
            self._for_long -= count if is_long else 0
            self._computing.update(self._cache.blocks(request.key, num_computed, num_computed + count))
        return True

    def _allocate(self, request: Request, count: int) -> int | None:
        """Make room for a request, if it need not wait for the head of its owner's queue."""
        if not request.is_queued:
            return self._cache.allocate(request.key, count)
        queue = self._queues.get(request.owner)
        passes = queue is not None and queue.is_reached and request.key != queue.head
        if queue is not None and passes:
            if queue.num_may_pass <= 0:
                return None
            queue.num_may_pass -= 1
        num_computed = self._cache.allocate(request.key, count)
        if num_computed is None:
            if queue is None or not (queue.is_reached or request.key == queue.head):
                self._queues[request.owner] = _Queue(request.key)
        elif queue is not None and passes:
            queue.num_passed += 1
        elif queue is not None and request.key == queue.head:
            del self._queues[request.owner]
        return num_computed

    def _is_long(self, index: int) -> bool:
        return self._unread[index] > self._budget

    def _long_prompt_budget(self) -> int:
        """Tokens for all long prompts: the whole step if there is nothing else, at least one."""
        if all(self._is_long(index) for index, unread in enumerate(self._unread) if unread):
            return self._budget
        return max(1, self._budget // _LONG_PROMPT_SHARE)

    def _prompt_budget(self) -> int:
        """Tokens for all prompts: what decoding leaves, or half of it if drafts can use the other half.

        One token for each sequence always leaves one for a prompt. Those that lack several could take the whole step:
        beside them, a quarter of it is for prompts at least.
        """
        num_decoded = sum(compress(self._unread, self._decodes))
        num_drafted = sum([request.num_draft_tokens for request in compress(self._requests, self._decodes)])
        left = max(0, self._budget - num_decoded)
        if self._shares_with_drafts:
            left -= min(num_drafted, left // 2)
        if self._max_decode_tokens > 1 and self._budget > 1:
            left = max(left, 1, self._budget // _LONG_PROMPT_SHARE)
        return min(left, sum(self._unread) - num_decoded)

    def _with_drafts(self, rows: list[ScheduledRow], left: int, turn: int) -> list[ScheduledRow]:
        """Share what is left among drafts, as far as there is memory for them."""
        requests = self._requests
        drafting = [place for place, row in enumerate(rows) if requests[row.request].num_draft_tokens]
        places = [place for place in drafting if self._is_last(rows[place])]
        wanted = [requests[rows[place].request].num_draft_tokens for place in places]
        for place, count in zip(places, shares(wanted, left, turn), strict=True):
            request = requests[rows[place].request]
            while count and not self._cache.extend(request.key, request.num_tokens + count):
                count -= 1
            rows[place] = rows[place]._replace(num_draft_tokens=count)
        return rows

    def _is_last(self, row: ScheduledRow) -> bool:
        """Whether a row computes the last of its request's tokens."""
        return row.num_computed_tokens + row.num_new_tokens == self._requests[row.request].num_tokens


def shares(wanted: Sequence[int], total: int, turn: int) -> list[int]:
    """Divide ``total`` draft tokens evenly: all get up to the same number, and the rest goes around by turns.

    Args:
        wanted: By each draft, at least 1.
        total: At most so many in all, at least 0.
        turn: Number of the step.
    """
    most, left = 0, total
    for num_smaller, count in enumerate(sorted(wanted)):
        most = left // (len(wanted) - num_smaller)
        if count > most:
            break
        left -= count
    given = [min(count, most) for count in wanted]
    larger = [i for i, count in enumerate(wanted) if count > most]
    for number in range(min(total - sum(given), len(larger))):
        given[larger[(number + turn) % len(larger)]] += 1
    return given
