"""What a step computes: which sequences, how many tokens of each, and how many draft tokens after them.

Arithmetic over ids and counts. The cache behind it (:class:`KVCache`) says what is computed already and finds room;
nothing here knows a model, a tensor or a clock.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

_LONG_PROMPT_SHARE = 4
"""A long prompt gets one in so many tokens of a step that others have a part in."""
_STEPS_UNTIL_LARGER = 64
"""Steps after which a budget that was halved, because memory ran out, is doubled again."""


class Request(NamedTuple):
    """What a sequence wants of a step.

    Attributes:
        key: The sequence.
        num_tokens: Length that its cache should reach, at least 1. The last token is always computed anew.
        num_draft_tokens: Draft tokens that should be computed after them in the same step.
        max_new_tokens: Most tokens that it can compute in a step, at least 1.
        num_computed_tokens: Tokens that it holds in the cache, fewer than it wants; 0 if it holds nothing.
        priority: By which it comes before others, the least first.
    """

    key: str
    num_tokens: int
    num_draft_tokens: int = 0
    max_new_tokens: int = sys.maxsize
    num_computed_tokens: int = 0
    priority: int = 0


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
    """Fills each step from the requests that there are, in their order: by priority, then by arrival.

    - A step has at most ``max_num_seqs`` rows and ``max_num_batched_tokens`` tokens. The first ``max_num_seqs``
      requests compete for it. Later ones wait, so that those that decode never starve a prompt among the first.
    - Each sequence that decodes gets a token. What is left is for draft tokens and for prompts: half each if both
      can use it. Prompts are read in chunks.
    - Where sequences that decode may lack several tokens, a quarter of the step is kept for prompts: the last of those
      that decode, a drafter's branches, wait for it.
    - A prompt is long if a whole step is too short for it. Beside sequences that decode, or short prompts, a long
      prompt gets at most a quarter of the step: short prompts do not wait for the whole of it, and the time between
      tokens stays short. Alone, long prompts get all of the step, in order.
    - A prompt that has not begun waits while another one of no worse priority computes the next block that both have
      in common, then takes it from the prefix cache. One that has begun never looks again.
    - Memory is given in that order. The last sequence is preempted first.

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
        requests = requests[: min(self.max_num_seqs, self._budget)]
        return _Step(requests, cache, self._budget, self._max_decode_tokens).rows(self._num_steps)

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

    def halve(self, num_tokens: int, reason: str) -> bool:
        """A step of ``num_tokens`` tokens ran out of memory: the next ones have at most half as many, for a while.

        Args:
            num_tokens: Tokens of the step, at least 1.
            reason: What the step raised, for the log.

        Returns:
            False if the step had a single token: its sequence is suspect, and the budget is whole again.
        """
        self._num_steps_at_budget = 0
        if num_tokens == 1:
            logger.warning("A step of one token ran out of memory. Lower kv_cache_memory: %s", reason)
            self._budget = self.max_num_batched_tokens
            return False
        self._budget = num_tokens // 2
        logger.warning(
            "A step of %d tokens ran out of memory; trying at most %d. Lower max_num_batched_tokens: %s",
            num_tokens,
            self._budget,
            reason,
        )
        return True

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._num_steps_at_budget += 1
        if self._budget < self.max_num_batched_tokens and self._num_steps_at_budget > _STEPS_UNTIL_LARGER:
            self._budget = min(2 * self._budget, self.max_num_batched_tokens)
            self._num_steps_at_budget = 0


class _Step:
    """One step while it is filled.

    Args:
        requests: Those that compete for it.
        cache: Holds what is computed, and has room.
        budget: Most tokens.
        max_decode_tokens: Of a sequence that decodes.
    """

    def __init__(self, requests: Sequence[Request], cache: KVCache, budget: int, max_decode_tokens: int) -> None:
        self._requests, self._cache, self._budget = requests, cache, budget
        held = [request.num_computed_tokens for request in requests]
        self._prefixes = [None if n else cache.find_prefix(r.key) for r, n in zip(requests, held, strict=True)]
        found = [n if prefix is None else prefix.num_tokens for n, prefix in zip(held, self._prefixes, strict=True)]
        self._unread = [request.num_tokens - n for request, n in zip(requests, found, strict=True)]
        self._decodes = [unread <= max_decode_tokens for unread in self._unread]
        # What a prompt that has begun reads next, and its priority: whoever has it in common waits, though it may have
        # arrived earlier. One of a better priority does not: others may come between the two for ever.
        self._computing: dict[Hashable, int] = {}
        for request, n, decodes in zip(requests, held, self._decodes, strict=True):
            for digest in cache.blocks(request.key, n, n + 1) if n and not decodes else ():
                self._computing.setdefault(digest, request.priority)
        self._max_decode_tokens = max_decode_tokens

    def rows(self, turn: int) -> list[ScheduledRow]:
        rows: list[ScheduledRow] = []
        left, for_prompts, for_long = self._budget, self._prompt_budget(), self._long_prompt_budget()
        num_to_decode = sum(self._decodes)
        for index, request in enumerate(self._requests):
            decodes = self._decodes[index]
            num_to_decode -= decodes
            if decodes:
                # A token for each that comes after, but the first come first where there is not one for each.
                most = max(left - for_prompts - num_to_decode, min(1, left - for_prompts))
            else:
                most = min(for_prompts, for_long) if self._is_long(index) else for_prompts
            most = min(most, self._unread[index], request.max_new_tokens)
            prefix = self._prefixes[index]
            if most <= 0 or (prefix is not None and self._is_computed(prefix.next_block, request.priority)):
                continue  # another one computes the block that it needs next
            num_computed = self._cache.allocate(request.key, most)
            if num_computed is None:
                continue
            count = min(most, request.num_tokens - num_computed)
            rows.append(ScheduledRow(index, num_computed, count, 0))
            left -= count
            if not decodes:
                for_prompts -= count
                for_long -= count if self._is_long(index) else 0
                blocks = self._cache.blocks(request.key, num_computed, num_computed + count)
                self._computing |= dict.fromkeys(blocks, request.priority)
        return self._with_drafts(rows, left, turn)

    def _is_computed(self, block: Hashable | None, priority: int) -> bool:
        """Whether a block is computed by a request of this priority or a better one."""
        return block in self._computing and self._computing[block] <= priority

    def _is_long(self, index: int) -> bool:
        return self._unread[index] > self._budget

    def _long_prompt_budget(self) -> int:
        """Tokens for all long prompts: the whole step if there is nothing else, at least one."""
        if all(self._is_long(index) for index in range(len(self._requests))):
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
