"""Which tokens a grammar allows after a log: state like the cache, brought to each log by longest common prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens
from torch import Tensor

from specdec.core.grammar import Grammar
from specdec.core.params import SequenceSpec
from specdec.core.tokens import TokenArray, TokenSequence, as_array, common_prefix_length
from specdec.core.types import Tokens
from specdec.sampling.kept import WhileAlive
from specdec.sampling.rows import RowGroup, Rows
from specdec.structured.compiler import Grammars, was_not_tried

_MOST_KEPT = 512
_BITS = 32
_ALL = -1
"""A part of a mask that allows all of its tokens."""

MatcherKey = tuple[Grammar, Tokens, int, int, float]
"""Grammar, ending tokens, seed, where the output starts, arrival: of one sequence, as far as that is known. It finds
matchers, whose tokens are then compared."""


class _Matcher:
    """A matcher, and the output that it has read: up to the first end-of-sequence token, which it is never given.

    llguidance's own ``rollback`` is not used: after a mask was computed further on, what it brings back allows too much
    (1.7.6 to 1.9.1). What is taken back is read again from the place at which the logs parted the last time, of which
    a copy is kept; masks are computed on copies.
    """

    def __init__(self, inner: LLMatcher, read: TokenArray) -> None:
        self.inner = inner
        self._read = read
        self._parted = inner.deep_copy(), read
        self._forced: tuple[int, list[int]] = (0, [])

    def forced(self, eos_token_ids: Tokens) -> list[int]:
        """The tokens of which each is the only one that its mask allows.

        What was found holds until it is read: a long constant is found once, not in every step.
        """
        found_at, found = self._forced
        num_read = len(self._read) - found_at
        if num_read >= len(found) or self._read[found_at:].tolist() != found[:num_read]:
            num_read, found = 0, self._found(eos_token_ids)
            self._forced = len(self._read), found
        return found[num_read:]

    def _found(self, eos_token_ids: Tokens) -> list[int]:
        found: list[int] = self.inner.compute_ff_tokens()
        after = self.inner.deep_copy() if found else self.inner
        after.try_consume_tokens(found)
        if after.is_stopped() and not after.is_error() and len(eos_token_ids) == 1:
            found += eos_token_ids
        return found

    def copy(self) -> _Matcher:
        """Another, at the same place."""
        return _Matcher(self.inner.deep_copy(), self._read)

    def follow(self, output: TokenArray, start: LLMatcher) -> None:
        """Become the matcher of ``output``; from ``start``, where nothing is known of its beginning.

        Raises:
            ValueError: The grammar does not allow it.
        """
        kept = common_prefix_length(self._read, output)
        if kept < self._forced[0]:
            self._forced = 0, []
        if kept < len(self._read) or self.inner.is_error():
            parted, known = self._parted
            if common_prefix_length(known, output) < len(known):
                parted, known = start, known[:0]
            self.inner, self._read = parted.deep_copy(), known
            self._consume(output[:kept])
            self._parted = self.inner.deep_copy(), self._read
        self._consume(output)

    def _consume(self, output: TokenArray) -> None:
        """Read on to the end of ``output``, which begins with what was read."""
        new = output[len(self._read) :].tolist()
        num_read = self.inner.try_consume_tokens(new) if new else 0
        self._read = output[: len(self._read) + num_read].copy()  # what it is a part of may change
        if num_read < len(new):
            raise ValueError(self.inner.get_error() or f"the grammar does not allow the token {new[num_read]} there")


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
        self._kept: OrderedDict[MatcherKey, list[_Matcher]] = OrderedDict()
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
            caller = spec.cache_salt.partition(":")[0]  # whatever salt of its own the request asks for
            started = self._grammars.compiled(spec.sampling.grammar, spec.eos_token_ids, caller)
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
        output = as_array(tokens[spec.output_start :])
        if _has_ended(output, spec.eos_token_ids):
            return ()
        try:
            return tuple(self._matcher(spec, 0, output).forced(spec.eos_token_ids)[:most])
        except ValueError:
            return ()

    def _num_allowed(self, spec: SequenceSpec, tokens: TokenSequence, draft: Tokens) -> int:
        output = as_array(tokens[spec.output_start :])
        if _has_ended(output, spec.eos_token_ids):
            return int(draft[0] in spec.eos_token_ids)
        try:
            matcher = self._matcher(spec, 0, output).inner
        except ValueError:
            return 0  # the row that is left says so
        if matcher.is_stopped() and not matcher.is_error():
            return int(draft[0] in spec.eos_token_ids)  # it says no to every token, to those too
        return matcher.validate_tokens(list(draft))

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
        # A row more for each: llguidance asks for at least one draft token, and writes what would follow it.
        bitmask = torch.full((rows.num_rows + len(chosen), self._width), _ALL, dtype=torch.int32)
        jobs: list[tuple[LLMatcher, int, list[int]]] = []
        places: list[int] = []
        used: Counter[MatcherKey] = Counter()
        for number, (i, group) in enumerate(zip(chosen, rows.groups, strict=True)):
            spec, start = group.spec, rows.starts[number] + number
            output = as_array(group.tokens[spec.output_start :])
            own = bitmask[start : start + rows.counts[number]]
            masked[i] = group._replace(mask=own)
            if _has_ended(output, spec.eos_token_ids):
                own[:] = self._only(spec.eos_token_ids)
                continue
            draft = list(_to_end(group.draft, spec.eos_token_ids))
            if draft and draft[-1] in spec.eos_token_ids:
                own[len(draft) :] = self._only(spec.eos_token_ids)
            else:
                draft.append(spec.eos_token_ids[0])
            key = _key(spec)
            try:
                jobs.append((self._matcher(spec, used[key], output).inner.deep_copy(), start, draft))
            except ValueError as error:
                failures[i] = error
                continue
            used[key] += 1
            places.append(i)
        self._fill(jobs, bitmask)
        for i, (matcher, start, _) in zip(places, jobs, strict=True):
            if matcher.is_error():
                failures[i] = ValueError(matcher.get_error())
                bitmask[start : start + 1 + len(groups[i].draft)] = _ALL
        self._forget(used)
        return masked, failures

    def _fill(self, jobs: list[tuple[LLMatcher, int, list[int]]], bitmask: Tensor) -> None:
        """Write the masks at each matcher's place and after each of its draft tokens, from a row on."""
        if not jobs:
            return
        if self._executor is None:
            self._executor = LLExecutor()
        self.num_mask_calls += 1
        fill_next_token_bitmask_par_with_draft_tokens(self._executor, jobs, bitmask.numpy())

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
        key = _key(spec)
        own = self._kept.pop(key, [])
        self._kept[key] = own
        if number == len(own):
            own.append(own[0].copy() if own else _Matcher(start.deep_copy(), as_array(())))
        own[number].follow(output, start)
        return own[number]

    def _forget(self, used: Counter[MatcherKey]) -> None:
        """Drop what was used longest ago where there are too many; never what this step has used."""
        num_kept = sum(map(len, self._kept.values()))
        for key in list(self._kept):
            if num_kept <= _MOST_KEPT or key in used:
                break
            num_kept -= len(self._kept.pop(key))


def _key(spec: SequenceSpec) -> MatcherKey:
    assert spec.sampling.grammar is not None
    return spec.sampling.grammar, spec.eos_token_ids, spec.seed, spec.output_start, spec.arrival_s


def _has_ended(output: TokenArray, eos_token_ids: Tokens) -> bool:
    """Whether an end-of-sequence token is in an output that goes on: ``ignore_eos`` or ``min_tokens`` asked for it."""
    return any(token in output for token in eos_token_ids)


def _to_end(draft: Tokens, eos_token_ids: Tokens) -> Tokens:
    """A draft up to its first end-of-sequence token, that included."""
    return next((draft[: i + 1] for i, token in enumerate(draft) if token in eos_token_ids), draft)
