"""What changes single logits: biases, penalties, tokens that are forbidden. Laid out as arrays, and applied in torch.

The arrays are those of :class:`specdec.kernels.sample.SampleStep`, so that a kernel and what is here read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.params import SamplingParams
from specdec.core.tokens import as_list
from specdec.sampling.kept import WhileAlive
from specdec.sampling.parameters import ALLOWED, BAD_WORDS, BIAS, MIN_TOKENS, PENALTIES, ParameterRows, all_features
from specdec.sampling.rows import RowGroup, Rows, on_device
from specdec.sampling.token_counts import Changes, TokenCounts, bits_of

_BITS = 32


@dataclass(frozen=True, slots=True)
class Edits:
    """What requests change of the logits of N rows of R groups, in numpy; [.., 0] where nobody does.

    Attributes:
        parameters: The groups', as :data:`~specdec.sampling.parameters.PARAMETERS` [R].
        features: What any of them uses.
        bias_token: int32 [R, B], -1 for none.
        bias: float32 [R, B].
        slots: int32 [R], each group's in the counts; -1 for those without penalties.
        ahead: int32 [N, A], tokens before a row that its slot does not count; -1 for none.
        changes: Of the counts, before slots are read.
        allowed: int32 [R], the row of ``masks`` of the tokens that a request allows; -1 for all.
        grammar: int32 [N], the row of ``masks`` of the tokens that a row's grammar allows; -1 for all.
        masks: int32 [M, ceil(V / 32)], a bit for each token.
        ended: int32 [N, E], tokens that would end the sequence before ``min_tokens``; -1 for none.
        bad: int32 [N, W], tokens that would complete a bad word; -1 for none.
    """

    parameters: NDArray[Any]
    features: int
    bias_token: NDArray[np.int32]
    bias: NDArray[np.float32]
    slots: NDArray[np.int32]
    ahead: NDArray[np.int32]
    changes: Changes
    allowed: NDArray[np.int32]
    grammar: NDArray[np.int32]
    masks: NDArray[np.int32]
    ended: NDArray[np.int32]
    bad: NDArray[np.int32]


class Editor:
    """Lays out what the rows of a step want, and applies it.

    Order, as in transformers: logit_bias, repetition, frequency and presence penalties, allowed_token_ids, min_tokens,
    bad_words, then hooks, and the grammar last.

    Args:
        vocab_size: V.
        device: Where rows are sampled.

    Attributes:
        device: Where rows are sampled.
        token_counts: By slot, there.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self.device = vocab_size, device
        self.token_counts = TokenCounts(vocab_size, device)
        self._parameters = ParameterRows()
        # A live request's arrays are made once, not in every step.
        self._biases = WhileAlive[SamplingParams, tuple[NDArray[np.int32], NDArray[np.float32]]]()
        self._allowed = WhileAlive[SamplingParams, Tensor]()

    def lay_out(self, rows: Rows, goes_on: bool = False) -> Edits:
        """The edits of a step, or of a part that goes on with one; its groups with a grammar have their masks."""
        if not goes_on:
            self.token_counts.begin_step()
        groups = rows.groups
        parameters = self._parameters.of(groups)
        using, features = parameters["features"], all_features(parameters)
        no_tokens = np.empty((rows.num_rows, 0), np.int32)
        bias_token, bias = np.empty((len(groups), 0), np.int32), np.empty((len(groups), 0), np.float32)
        if features & BIAS:
            biases = [
                self._bias(group.spec.sampling) if group.spec.sampling.logit_bias else _NO_BIAS for group in groups
            ]
            bias_token = _padded([tokens for tokens, _ in biases], np.int32, -1)
            bias = _padded([values for _, values in biases], np.float32, 0)
        counted, ahead = self.token_counts.none_counted(len(groups)), no_tokens
        if features & PENALTIES:
            counted = self.token_counts.counted(groups)
            ahead = _by_row(rows, using & PENALTIES, _Ahead(counted.ahead, self._vocab_size))
        masks, allowed, grammar = self._masks(rows, features)
        return Edits(
            parameters=parameters,
            features=features,
            bias_token=bias_token,
            bias=bias,
            slots=counted.slots,
            ahead=ahead,
            changes=counted.changes,
            allowed=allowed,
            grammar=grammar,
            masks=masks,
            ended=_by_row(rows, using & MIN_TOKENS, self._ended) if features & MIN_TOKENS else no_tokens,
            bad=_by_row(rows, using & BAD_WORDS, self._bad) if features & BAD_WORDS else no_tokens,
        )

    def apply(self, logits: Tensor, rows: Rows, edits: Edits) -> Tensor:
        """Make all edits but grammars', in torch.

        Repetition (Keskar et al. 2019, CTRL, section 4.1; as in transformers and vLLM) counts prompt and output:
        positive logits are divided by it, negative ones multiplied. Presence and frequency (OpenAI, vLLM) count the
        output alone: ``logit -= frequency * count + presence * (count > 0)``. A row of which bad words leave nothing
        keeps them: something must be chosen.

        Args:
            logits: float32 [N, V], changed in place.
            rows: The layout of the N rows.
            edits: What :meth:`lay_out` made of it; its counts are applied.
        """
        at, entry = np.nonzero(rows.spread(edits.bias_token) >= 0)
        if len(at):
            row, token, bias = on_device(
                logits.device, at, rows.spread(edits.bias_token)[at, entry], rows.spread(edits.bias)[at, entry]
            )
            logits[row, token] += bias
        if (edits.slots >= 0).any():
            self._penalize(logits, rows, edits)
        of_rows = rows.spread(edits.allowed)
        if (of_rows >= 0).any():
            (masks, index, numbers) = on_device(
                logits.device, edits.masks, np.flatnonzero(of_rows >= 0), of_rows[of_rows >= 0].astype(np.int64)
            )
            logits[index] = logits[index].masked_fill_(forbidden(masks[numbers], logits.shape[1]), -torch.inf)
        _ban(logits, edits.ended)
        if edits.bad.size:
            (numbers,) = on_device(logits.device, np.flatnonzero((edits.bad >= 0).any(1)))
            before = logits[numbers]
            _ban(logits, edits.bad)
            after = logits[numbers]
            logits[numbers] = torch.where(after.amax(1, keepdim=True) > -torch.inf, after, before)
        return logits

    def _penalize(self, logits: Tensor, rows: Rows, edits: Edits) -> None:
        of_rows = rows.spread(edits.slots)
        index = np.flatnonzero(of_rows >= 0)
        of_row, entry = np.nonzero(edits.ahead[index] >= 0)
        counts, bits = self.token_counts.counts, self.token_counts.prompt_bits
        numbers, slots, strength, row, token, *changes = on_device(
            logits.device,
            index,
            of_rows[index].astype(np.int64),  # torch is ten times as slow by int32
            np.ascontiguousarray(rows.spread(edits.parameters["penalties"])[index].T),
            of_row,
            edits.ahead[index][of_row, entry].astype(np.int64),
            *edits.changes,
        )
        self.token_counts.apply(*changes)
        count = counts.index_select(0, slots)
        count.index_put_((row, token), torch.ones_like(token, dtype=torch.int32), accumulate=True)
        is_known = count > 0
        if (edits.parameters["penalties"][:, 0] != 1).any():
            is_known |= unpacked(bits.index_select(0, slots), logits.shape[1])
        # Few tokens of a vocabulary are in a sequence.
        at = is_known.view(-1).nonzero().squeeze(1)
        row = at // logits.shape[1]
        found = count.take(at)
        repetition, frequency, presence = (each.take(row) for each in strength)
        if len(index) < len(logits):
            at = at + (numbers[row] - row) * logits.shape[1]
        old = logits.take(at)
        # One of the two terms is 0: faster than a choice, and as exact.
        new = (old.clamp(min=0) / repetition).add_(old.clamp_(max=0).mul_(repetition))
        logits.put_(at, new.sub_((frequency * found).add_(presence * (found > 0))))

    def _bias(self, params: SamplingParams) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The ids that a request biases, and by how much."""
        kept = self._biases.get(params)
        if kept is None:
            ids, biases = zip(*params.logit_bias, strict=True)
            kept = self._biases.put(params, (np.array(ids, dtype=np.int32), np.array(biases, dtype=np.float32)))
        return kept

    def _masks(self, rows: Rows, features: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """All masks of a step, then which of them each group's request allows, and which each row's grammar."""
        masks: list[Tensor] = []
        allowed, grammar = np.full(len(rows.groups), -1, np.int32), np.full(rows.num_rows, -1, np.int32)
        if not features & ALLOWED and all(group.mask is None for group in rows.groups):
            return _NO_MASKS, allowed, grammar
        num_masks, width = 0, -(-self._vocab_size // _BITS)
        for number, group in enumerate(rows.groups):
            params = group.spec.sampling
            if params.allowed_token_ids:
                mask = self._allowed.get(params)
                if mask is None:
                    bits = torch.from_numpy(bits_of(params.allowed_token_ids.tokens, self._vocab_size))
                    mask = self._allowed.put(params, bits.unsqueeze(0))
                masks.append(mask)
                allowed[number] = num_masks
                num_masks += 1
            if group.mask is not None:
                # Of a tokenizer with more tokens, as wide as they need.
                masks.append(group.mask if group.mask.shape[1] == width else group.mask[:, :width])
                start, count = rows.starts[number], rows.counts[number]
                grammar[start : start + count] = np.arange(num_masks, num_masks + count)
                num_masks += count
        return torch.cat(masks).numpy(), allowed, grammar

    def _ended(self, _: int, group: RowGroup) -> Iterator[Sequence[int]]:
        """The tokens that may not end each row; none where every token of the vocabulary ends the sequence."""
        ending = [token for token in group.spec.ending_token_ids if 0 <= token < self._vocab_size]
        num_missing = group.spec.sampling.min_tokens - group.num_output_tokens
        is_banned = num_missing > 0 and len(ending) < self._vocab_size
        return (ending if is_banned and depth < num_missing else () for depth in group.depths)

    def _bad(self, _: int, group: RowGroup) -> Iterator[Sequence[int]]:
        """The tokens that would complete a bad word in the output, draft tokens before the row included."""
        words = group.spec.sampling.bad_words
        longest = max(map(len, words)) - 1
        before = as_list(group.tokens[max(group.spec.output_start, len(group.tokens) - longest) :])
        for row in range(1 + len(group.draft)):
            output = (*before, *(group.draft[i] for i in group.path(row)))
            ends = (word for word in words if output[len(output) - len(word) + 1 :] == word[:-1])
            yield [word[-1] for word in ends if word[-1] < self._vocab_size]


_NO_MASKS = np.zeros((0, 1), np.int32)
_NO_BIAS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Tokens before each row that are not counted by slot: the end of the log, and the draft's."""

    of_groups: Sequence[NDArray[np.int32]]
    vocab_size: int

    def __call__(self, number: int, group: RowGroup) -> Iterator[Sequence[int]]:
        before = self.of_groups[number].tolist()
        for row in range(1 + len(group.draft)):
            tokens = before + [group.draft[i] for i in group.path(row)]
            yield [token for token in tokens if 0 <= token < self.vocab_size]


def _by_row(
    rows: Rows, uses: NDArray[np.int32], of_group: Callable[[int, RowGroup], Iterable[Sequence[int]]]
) -> NDArray[np.int32]:
    """[N, longest]: tokens of each row of the groups that use something, filled up with -1."""
    lists: list[Sequence[int]] = [()] * rows.num_rows
    for number in np.flatnonzero(uses).tolist():
        start = rows.starts[number]
        lists[start : start + rows.counts[number]] = of_group(number, rows.groups[number])
    return _padded(lists, np.int32, -1)


def _padded(lists: Sequence[Sequence[float] | NDArray[Any]], dtype: type[Any], fill: float) -> NDArray[Any]:
    """[number of lists, longest], filled up."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    values = np.full((len(lists), lengths.max(initial=0)), fill, dtype)
    if values.size:
        values[np.arange(values.shape[1]) < lengths[:, None]] = np.concatenate([*map(np.asarray, lists)])
    return values


def _ban(logits: Tensor, tokens: NDArray[np.int32]) -> None:
    """-inf in float32 [N, V], in place, for int32 [N, W]; -1 is none."""
    at, entry = np.nonzero(tokens >= 0)
    if len(at):
        row, token = on_device(logits.device, at, tokens[at, entry])
        logits[row, token] = -torch.inf


def unpacked(masks: Tensor, vocab_size: int) -> Tensor:
    """Masks int32 [M, ceil(V / 32)] as bool [M, V]."""
    bits = masks.view(torch.uint8).unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (bits & 1).view(len(masks), -1)[:, :vocab_size] != 0


def forbidden(masks: Tensor, vocab_size: int) -> Tensor:
    """The tokens that masks do not have."""
    return ~unpacked(masks, vocab_size)


def apply_grammars(logits: Tensor, unedited: Tensor, edits: Edits) -> Tensor:
    """Forbid what grammars forbid, whatever else holds for a row.

    Where other rules of a request have forbidden everything that its grammar allows, those give way: all rows have
    something to choose that the grammar allows.

    Args:
        logits: float32 [N, V], edited, and changed in place.
        unedited: float32 [N, V], as the model gave them.
        edits: Of the N rows.
    """
    has_grammar = edits.grammar >= 0
    if not has_grammar.any():
        return logits
    masks, numbers = on_device(logits.device, edits.masks[edits.grammar[has_grammar]], np.flatnonzero(has_grammar))
    is_forbidden = forbidden(masks, logits.shape[1])
    if len(numbers) == len(logits):
        return _masked(logits, unedited, is_forbidden)
    return logits.index_copy_(0, numbers, _masked(logits[numbers], unedited[numbers], is_forbidden))


def _masked(logits: Tensor, unedited: Tensor, is_forbidden: Tensor) -> Tensor:
    logits = logits.masked_fill_(is_forbidden, -torch.inf)
    is_left = logits.amax(1, keepdim=True).isfinite()
    return torch.where(is_left, logits, unedited.masked_fill(is_forbidden, -torch.inf))
