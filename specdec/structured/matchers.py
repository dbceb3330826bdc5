"""Which tokens a grammar allows after a log: state like the cache, brought to each log by longest common prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from torch import Tensor

from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenArray, TokenBuffer, TokenSequence, as_array, common_prefix_length
from specdec.core.types import Tokens
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import RowGroup, Rows
from specdec.structured.compiler import Grammars, was_not_tried

_BITS = 32
_ALL = -1
"""A part of a mask that allows all of its tokens."""

_WINDOW = 256
"""Tokens at the end of what two texts of a sequence have in common that are compared. Texts of one sequence differ in
drafted tokens alone, of which there are fewer."""


class _Matcher:
    """A matcher of llguidance, brought to each output by reading on or by taking tokens back.

    A step costs the same at any length of the output. llguidance keeps the last mask by its place in the grammar, and
    its ``rollback`` forgets nothing of that (1.7.6 to 1.9.1): a mask found on a path that was left would be given again
    on another. So a mask at a place which both paths share takes its place: see :meth:`_leave`.

    Args:
        inner: At the beginning of the grammar; the matcher's own.
        eos_token_ids: The matcher is never given these.
    """

    def __init__(self, inner: LLMatcher, eos_token_ids: Tokens) -> None:
        self.inner = inner
        self._eos_token_ids = eos_token_ids
        self._read = TokenBuffer()
        self._num_consumed = 0
        self._ahead: list[int] = []  # after the consumed tokens, masks were computed along these
        self._forced: tuple[int, list[int]] = (0, [])

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was read; ``ignore_eos`` or ``min_tokens`` asked to go on."""
        return self._num_consumed < len(self._read)

    def forced(self, most: int) -> list[int]:
        """The first ``most`` tokens of which each is the only one that its mask allows.

        What was found holds until it is read: a long constant is found once, not in every step.
        """
        found_at, found = self._forced
        if self._num_consumed - found_at >= len(found):
            found_at, found = self._forced = self._num_consumed, self._found()
        place = self._num_consumed - found_at
        return found[place : place + most]

    def _found(self) -> list[int]:
        found: list[int] = self.inner.compute_ff_tokens()
        num_read = self.inner.try_consume_tokens(found) if found else 0
        is_whole = self.inner.is_stopped() and not self.inner.is_error()
        if num_read:
            self.inner.rollback(num_read)  # no mask was computed on the way
        return [*found, *self._eos_token_ids] if is_whole and len(self._eos_token_ids) == 1 else found

    def copy(self) -> _Matcher:
        """Make another at the same place."""
        copied = _Matcher(self.inner.deep_copy(), self._eos_token_ids)
        copied._read, copied._num_consumed, copied._ahead = self._read.copy(), self._num_consumed, self._ahead
        return copied

    def follow(self, output: TokenArray, start: LLMatcher) -> None:
        """Become the matcher of ``output``; from ``start`` if the inner matcher is of no use any more.

        Raises:
            ValueError: The grammar does not allow it.
        """
        kept = _num_in_common(self._read.array, output)
        if kept < self._forced[0]:
            self._forced = 0, []
        num_back = max(0, self._num_consumed - kept)
        self._read.truncate(kept)
        self._num_consumed -= num_back
        new = [] if self.has_ended else output[self._num_consumed :].tolist()
        new = new[: _num_to_end(new, self._eos_token_ids)]
        leaves = num_back > 0 or self._ahead[: len(new)] != new[: len(self._ahead)]
        if self.inner.is_error() or (leaves and not self._leave(num_back)):
            self._restart(start)
        self._consume(new)
        self._read.extend(output[len(self._read) :])

    def look_ahead(self, draft: list[int]) -> None:
        """Note that masks are computed along a draft."""
        self._ahead = draft

    def masks_on_copy(self, draft: list[int], start: LLMatcher, bitmask: Tensor, first: int) -> LLMatcher:
        """Write the masks before and after each draft token, from row ``first`` on, without taking anything back.

        It costs as much as the output is long: for grammars that cannot go back, and to tell whether an error is the
        grammar's own.
        """
        self._restart(start)
        copied = self.inner.deep_copy()
        for number in range(1 + len(draft)):
            fill_next_token_bitmask(copied, bitmask.numpy(), first + number)
            if number == len(draft) or copied.is_stopped() or not copied.try_consume_tokens(draft[number : number + 1]):
                break
        return copied

    def _consume(self, new: list[int]) -> None:
        """Read on; an end-of-sequence token may be the last of what is new."""
        found_at, found = self._forced
        place = self._num_consumed - found_at
        if found[place : place + len(new)] != new:
            self._forced = 0, []
        self._ahead = self._ahead[len(new) :]
        own = new[:-1] if new and new[-1] in self._eos_token_ids else new
        num_read = self.inner.try_consume_tokens(own) if own else 0
        self._read.extend(own[:num_read])
        self._num_consumed += num_read
        if num_read < len(own):
            raise ValueError(self.inner.get_error() or f"the grammar does not allow the token {own[num_read]} there")

    def _leave(self, num_back: int) -> bool:
        """Take tokens back, and have the last mask be one of a place before.

        llguidance keeps no mask of a place where bytes are forced: from there it goes back further, then reads on.

        Returns:
            False if the inner matcher is of no use any more: its grammar cannot go back, or forces all that was read.
        """
        inner, self._ahead = self.inner, []
        num_further, num_more = 0, 1
        if num_back:
            inner.rollback(num_back)
        elif inner.is_stopped():
            return not inner.is_error()  # no mask was computed further on
        while not inner.is_error() and inner.compute_ff_bytes():
            num_more = min(num_more, self._num_consumed - num_further)
            if not num_more:
                return False
            inner.rollback(num_more)
            num_further, num_more = num_further + num_more, 2 * num_more
        if inner.is_error():
            return False
        inner.compute_bitmask()
        again = self._read.array[self._num_consumed - num_further : self._num_consumed].tolist()
        return not again or (inner.try_consume_tokens(again) == len(again) and not inner.is_error())

    def _restart(self, start: LLMatcher) -> None:
        self._ahead = []
        self.inner = start.deep_copy()
        if self._num_consumed:
            self.inner.try_consume_tokens(self._read.array[: self._num_consumed].tolist())


def _num_in_common(read: TokenArray, output: TokenArray) -> int:
    """Length of the common prefix of two texts of one sequence."""
    start = max(0, min(len(read), len(output)) - _WINDOW)
    kept = common_prefix_length(read, output, start)
    # Texts that differ so early are not what the window is for.
    return kept if not start or kept - start >= _WINDOW // 2 else common_prefix_length(read, output)


class _MaskJob(NamedTuple):
    """A row group whose masks are wanted: its number, its matcher, its first row, and its draft up to an end."""

    number: int
    matcher: _Matcher
    start: int
    draft: list[int]


class Matchers:
    """The matchers of one model's sequences; one mask call a step, for all rows of it.

    A mask depends on the log and the draft tokens before it, and on nothing else: what is found here is compared token
    by token, and what is lost is made again from the log. Not safe for several threads at once.

    Args:
        grammars: Compiles them.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        # A live sequence's grammar stays compiled, however many others there are.
        self._compiled = WhileAlive[SequenceSpec, Future[LLMatcher]]()
        # A drafter has several for a sequence: the chain's, then one for each branch that grows.
        self._kept = WhileAlive[SequenceSpec, list[_Matcher]]()
        self._executor: LLExecutor | None = None
        self._width = -(-grammars.vocab_size // _BITS)
        self.num_mask_calls = 0
        self.num_forbidden_draft_tokens = 0

    def is_ready(self, spec: SequenceSpec) -> bool:
        """Whether a sequence's grammar is compiled, or found to be wrong; else that is on its way."""
        return spec.sampling.grammar is None or self._start(spec).done()

    def _start(self, spec: SequenceSpec) -> Future[LLMatcher]:
        """The matcher at the beginning of a sequence's grammar, once that is compiled."""
        future = self._compiled.get(spec)
        if future is None or was_not_tried(future):
            assert spec.sampling.grammar is not None
            started = self._grammars.compiled(spec.sampling.grammar, spec.eos_token_ids)
            future = self._compiled.put(spec, started)
        return future

    def allowed(self, spec: SequenceSpec, tokens: TokenSequence, draft: Tokens) -> Tokens:
        """A draft up to the first token that the grammar forbids, and not beyond an end-of-sequence token."""
        whole = _to_end(draft, spec.eos_token_ids)
        count = self._num_allowed(spec, tokens, whole)
        self.num_forbidden_draft_tokens += count < len(whole)
        return whole[:count]

    def forced(self, spec: SequenceSpec, tokens: TokenSequence, most: int) -> Tokens:
        """The tokens of which each is the only one that its mask allows, ``most`` at most: a draft without a model."""
        try:
            matcher = self._matcher(spec, 0, as_array(tokens[spec.output_start :]))
        except ValueError:
            return ()
        return () if matcher.has_ended else tuple(matcher.forced(most))

    def _num_allowed(self, spec: SequenceSpec, tokens: TokenSequence, draft: Tokens) -> int:
        try:
            matcher = self._matcher(spec, 0, as_array(tokens[spec.output_start :]))
        except ValueError:
            return 0  # the row that is left says so
        inner = matcher.inner
        if matcher.has_ended or (inner.is_stopped() and not inner.is_error()):
            return int(draft[0] in spec.eos_token_ids)  # it says no to every token, to those too
        return inner.validate_tokens(list(draft))

    def masked(self, groups: Sequence[RowGroup]) -> tuple[list[RowGroup], dict[int, Exception]]:
        """Give groups with a grammar the masks of their rows, found in one call.

        Args:
            groups: Of a step; drafts are as :meth:`allowed` gives them.

        Returns:
            The groups, and what went wrong, by place; the mask of such a group allows everything.
        """
        masked, failures = list(groups), dict[int, Exception]()
        chosen = [i for i, group in enumerate(groups) if group.spec.sampling.grammar is not None]
        rows = Rows([groups[i] for i in chosen])
        bitmask = torch.full((rows.num_rows, self._width), _ALL, dtype=torch.int32)
        jobs: list[_MaskJob] = []
        used: Counter[int] = Counter()
        for i, group, start, count in zip(chosen, rows.groups, rows.starts, rows.counts, strict=True):
            spec, own = group.spec, bitmask[start : start + count]
            masked[i] = group._replace(mask=own)
            try:
                matcher = self._matcher(spec, used[id(spec)], as_array(group.tokens[spec.output_start :]))
            except ValueError as error:
                failures[i] = error
                continue
            used[id(spec)] += 1
            if matcher.has_ended:
                own[:] = self._only(spec.eos_token_ids)
                continue
            draft = list(_to_end(group.draft, spec.eos_token_ids))
            if draft and draft[-1] in spec.eos_token_ids:
                own[len(draft) :] = self._only(spec.eos_token_ids)
            matcher.look_ahead(draft)
            jobs.append(_MaskJob(i, matcher, start, draft))
        self._fill(jobs, bitmask)
        for i, matcher, start, draft in jobs:
            inner = matcher.inner
            if inner.is_error():  # it may be that the grammar cannot go back
                bitmask[start : start + 1 + len(draft)] = _ALL
                inner = matcher.masks_on_copy(draft, self._start(groups[i].spec).result(), bitmask, start)
            if inner.is_error():
                failures[i] = ValueError(inner.get_error())
                bitmask[start : start + 1 + len(groups[i].draft)] = _ALL
        return masked, failures

    def _fill(self, jobs: list[_MaskJob], bitmask: Tensor) -> None:
        """Write the masks at each matcher's place and after each of its draft tokens, from a row on."""
        if not jobs:
            return
        if self._executor is None:
            self._executor = LLExecutor()
        self.num_mask_calls += 1
        if plain := [(job.matcher.inner, job.start) for job in jobs if not job.draft]:
            fill_next_token_bitmask_par(self._executor, plain, bitmask.numpy())
        if drafted := [(job.matcher.inner, job.start, job.draft) for job in jobs if job.draft]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bitmask.numpy())

    def _only(self, tokens: Tokens) -> Tensor:
        """The mask, int32 [V / 32], that allows these tokens alone."""
        bits = np.zeros(self._width * _BITS, dtype=np.uint8)
        bits[list(tokens)] = 1
        return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def _matcher(self, spec: SequenceSpec, number: int, output: TokenArray) -> _Matcher:
        """The sequence's matcher of that number, after ``output``.

        Raises:
            ValueError: The grammar does not allow that, or cannot be compiled.
        """
        start = self._start(spec).result()
        own = self._kept.get(spec)
        if own is None:
            own = self._kept.put(spec, [])
        if number == len(own):
            own.append(own[0].copy() if own else _Matcher(start.deep_copy(), spec.eos_token_ids))
        own[number].follow(output, start)
        return own[number]


def _to_end(draft: Tokens, eos_token_ids: Tokens) -> Tokens:
    """A draft up to its first end-of-sequence token, that included."""
    return draft[: _num_to_end(draft, eos_token_ids)]


def _num_to_end(tokens: Sequence[int], eos_token_ids: Tokens) -> int:
    """Count the tokens up to the first end-of-sequence token, that included; all if there is none."""
    return next((i + 1 for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
