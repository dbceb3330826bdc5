"""From logits to tokens and probabilities: the one place where a request's parameters act, for both models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import TokenSequence
from specdec.core.types import Tokens
from specdec.kernels.device_errors import is_device_lost
from specdec.kernels.sample import thresholds
from specdec.sampling.edits import Editor, apply_grammars
from specdec.sampling.logprobs import token_logprobs
from specdec.sampling.noise import NoiseCache
from specdec.sampling.on_kernels import KernelSampler, LaidOut, runs_kernels
from specdec.sampling.rows import UNUSED_TRUNCATION, LogprobReport, RowGroup, Rows, VerifiedRun, on_device
from specdec.sampling.token_counts import uses_penalties
from specdec.structured.compiler import Grammars
from specdec.structured.matchers import Matchers

__all__ = ["LogitsProcessor", "RowGroup", "Sampler", "VerifiedRun"]

logger = logging.getLogger(__name__)

NOISE_CACHE_BYTES = 64 << 20
"""Memory for Gumbel noise kept between steps, where nobody says otherwise."""


class LogitsProcessor(Protocol):
    """A hook that may change the logits of a step, such as a mask: it is called once for all rows of the batch.

    A batch of more than 128 MiB of logits comes in several parts.

    What it makes of a row must depend on that row alone, on ``spec`` and on the tokens before it: the same row is
    computed again by later rounds in another batch, by the other model and after a crash. It sees rows after draft
    tokens that may yet be refused.

    A row whose largest logit is not finite after all processors (every token forbidden, or a NaN or +inf among them) is
    drawn as if none had been called: biases, penalties and min_tokens stay. So it is in both models and under both
    rules. Who wants such a sequence to end leaves it an ending token.

    Where it raises it is called again for each sequence alone. An error that it raises then ends that sequence, with an
    error; all other rows are as they would have been.
    """

    def __call__(self, groups: Sequence[RowGroup], logits: Tensor) -> Tensor | None:
        """Process the rows of a batch.

        Args:
            groups: The sequences of the N rows, in order; at least one. Row i of a group follows
                ``[*group.tokens, *group.draft[:i]]``, where ``group.tokens`` is an int32 array; of a draft that is a
                tree each row is a group of its own. Neither the groups nor their tokens may be changed, or kept.
            logits: float32 [N, V], after penalties, biases and min_tokens; may be changed in place.

        Returns:
            The new logits [N, V], or None to leave them as they are now. Forbidden tokens have -inf.
        """
        ...


class RankedTokens(NamedTuple):
    """The best tokens of each of N rows.

    Attributes:
        chosen: int64 [N], what ``Sampler.sample`` gives.
        tokens: int64 [N, C], the best first, the chosen one among them; -1 where a token cannot be chosen.
        scores: float32 [N, C]: logits over temperature with noise, or the logits with temperature 0; -inf for -1.
    """

    chosen: Tensor
    tokens: Tensor
    scores: Tensor


class Sampler:
    """Applies a batch's parameters to its logits, row by row exactly, drafted or not.

    Order, as in transformers: logit_bias, repetition, frequency and presence penalties, allowed_token_ids, min_tokens,
    bad_words, processors, grammar, temperature, top_k, top_p, min_p. Temperature 0, and any below 1e-5, takes the
    lowest id among the largest logits before the temperature.
    What nobody in the batch uses costs nothing. Not safe for several threads at once. The largest logit of every row
    must be finite: whoever runs the model takes out rows of which it is not.

    Args:
        vocab_size: V, the tokens both models know; logits may have more columns (padding), which are never chosen.
        processors: Hooks, applied in their order to all rows at once.
        noise_cache_bytes: Memory for Gumbel noise kept between steps.
        grammars: Compiles grammars; where there are none, a sequence with one fails.
        on_kernels: Whether kernels choose; by default where they run: see :func:`runs_kernels`. With processors, which
            see logits between edits and grammars, and with ``processed_logprobs``, all is done in torch.
        processed_logprobs: Report the log probabilities that tokens are drawn by, after edits, temperature and
            truncation, as vLLM's ``logprobs_mode: processed_logprobs`` does; with temperature 0 those after edits.
    """

    def __init__(
        self,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        noise_cache_bytes: int = NOISE_CACHE_BYTES,
        grammars: Grammars | None = None,
        on_kernels: bool | None = None,
        processed_logprobs: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self._processors = tuple(processors)
        self._noise = NoiseCache(vocab_size, noise_cache_bytes)
        self._on_kernels = on_kernels
        self._processed_logprobs = processed_logprobs
        self._editor: Editor | None = None
        self._kernels: KernelSampler | None = None
        self._failures: dict[int, Exception] = {}
        self.matchers = None if grammars is None else Matchers(grammars)

    def is_ready(self, spec: SequenceSpec) -> bool:
        """Whether a sequence's rows can be sampled now: its grammar, if it has one, is compiled beside the step."""
        return spec.sampling.grammar is None or self.matchers is None or self.matchers.is_ready(spec)

    def allowed(self, spec: SequenceSpec, tokens: TokenSequence, draft: Tokens) -> Tokens:
        """The part of a draft after ``tokens`` that is worth a row: see :meth:`Matchers.allowed`."""
        if spec.sampling.grammar is None or not draft:
            return draft
        return () if self.matchers is None else self.matchers.allowed(spec, tokens, draft)

    def forced(self, spec: SequenceSpec, tokens: TokenSequence, most: int) -> Tokens:
        """What the grammar leaves no choice about after ``tokens``: see :meth:`Matchers.forced`."""
        if spec.sampling.grammar is None or self.matchers is None or most <= 0:
            return ()
        return self.matchers.forced(spec, tokens, most)

    def masked(self, groups: Sequence[RowGroup]) -> list[RowGroup]:
        """The groups of a step, those with a grammar with the masks of their rows: one call for all of them.

        Every other method does so by itself for groups without; to call this first saves a second call.
        """
        if all(group.spec.sampling.grammar is None or group.mask is not None for group in groups):
            return list(groups)
        if self.matchers is None:
            error = ValueError("this model's tokenizer does not take grammars")
            masked = list(groups)
            failed: dict[int, Exception] = {i: error for i, g in enumerate(groups) if g.spec.sampling.grammar}
        else:
            masked, failed = self.matchers.masked(groups)
        self._failures |= {id(masked[i]): error for i, error in failed.items()}
        return masked

    def depends_on_tokens(self, params: SamplingParams) -> bool:
        """Whether what is chosen depends on which tokens came before, beside the logits."""
        return bool(self._processors) or params.grammar is not None or _is_edited(params)

    def take_failures(self) -> dict[int, Exception]:
        """What processors and grammars have raised since the last call, by the ``id`` of the group that it concerns.

        What was chosen for such a group means nothing.
        """
        failures, self._failures = self._failures, {}
        return failures

    def kernels(self, device: torch.device) -> KernelSampler | None:
        """What decides on a device; None where torch does."""
        is_wanted = runs_kernels(device) if self._on_kernels is None else self._on_kernels
        if self._processors or self._processed_logprobs or not is_wanted:
            return None
        if self._kernels is None or self._editor_of(device) is not self._kernels.editor:
            self._kernels = KernelSampler(self.vocab_size, self._editor_of(device))
        return self._kernels

    def _editor_of(self, device: torch.device) -> Editor:
        if self._editor is None or self._editor.device != device:
            self._editor = Editor(self.vocab_size, device)
        return self._editor

    def lay_out(self, groups: Sequence[RowGroup], device: torch.device) -> LaidOut | None:
        """What kernels need to choose for groups, before there are logits; None where torch chooses.

        Its arrays may travel with the input of the step that gives the logits.
        """
        kernels = self.kernels(device)
        return None if kernels is None else kernels.lay_out(Rows(self.masked(groups)))

    def sample(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        laid_out: LaidOut | None = None,
        sent: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The token for every row: argmax(log probs + gumbel(seed, position, token)).

        Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding",
        section 4. With temperature 0 there is no noise.

        Args:
            logits: float32 [N, at least V], as the model gave them; not changed.
            groups: The sequences of the N rows, in order.
            laid_out: What :meth:`lay_out` gave of them, where it was called before.
            sent: Its arrays, if they are on the device.

        Returns:
            int64 [N], on the device of ``logits``.
        """
        rows = self._laid_out(logits, groups) if laid_out is None else laid_out.rows
        if kernels := self.kernels(logits.device):
            return kernels.sample(logits, laid_out or kernels.lay_out(rows), sent).long()
        logits = self._edited(logits, rows)
        sampled = rows.using(_is_random)
        if not sampled:
            return logits.argmax(1)
        part = rows.part(sampled)
        if part is rows:
            return self._noised(logits, part).argmax(1)
        (index,) = on_device(logits.device, rows.numbers(sampled))
        return logits.argmax(1).index_copy_(0, index, self._noised(logits[index], part).argmax(1))

    def choose_and_guess(
        self,
        logits: Tensor,
        groups: Sequence[RowGroup],
        count: int,
        laid_out: LaidOut | None = None,
        sent: Sequence[Tensor] | None = None,
    ) -> RankedTokens:
        """The token for every row, and those that come next: what else the target may well choose.

        Tokens are ranked by log probs + gumbel, as they are chosen, so that a guess is as good with noise as without.

        Args:
            logits: float32 [N, at least V], as the model gave them; not changed.
            groups: The sequences of the N rows, in order.
            count: Most guesses wanted per row.
            laid_out: As for :meth:`sample`.
            sent: The same.
        """
        rows = self._laid_out(logits, groups) if laid_out is None else laid_out.rows
        if kernels := self.kernels(logits.device):
            chosen, scores = kernels.score(logits, laid_out or kernels.lay_out(rows), sent)
        else:
            scores = self._scores(logits, rows)
            chosen = scores.argmax(1)
        best, tokens = scores.topk(min(1 + count, self.vocab_size), dim=1)
        return RankedTokens(chosen.long(), tokens.masked_fill(~(best > -torch.inf), -1), best)

    def scores(self, logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
        """What chosen tokens are the largest of: logits over temperature with noise.

        Args:
            logits: float32 [N, at least V], as the model gave them; not changed.
            groups: The sequences of the N rows, in order.

        Returns:
            float32 [N, V]: the logits with temperature 0; -inf for what cannot be chosen.
        """
        rows = self._laid_out(logits, groups)
        if kernels := self.kernels(logits.device):
            return kernels.score(logits, kernels.lay_out(rows))[1]
        return self._scores(logits, rows)

    def _scores(self, logits: Tensor, rows: Rows) -> Tensor:
        scores = self._edited(logits, rows)
        sampled = rows.using(_is_random)
        part = rows.part(sampled)
        if part is rows:
            return self._noised(scores, rows)
        if not sampled:
            return scores
        (index,) = on_device(logits.device, rows.numbers(sampled))
        return scores.index_copy(0, index, self._noised(scores[index], part))

    def logprobs(self, logits: Tensor, groups: Sequence[RowGroup], runs: Sequence[VerifiedRun]) -> list[LogprobReport]:
        """What to report for the tokens of each group's run, each from the row that it was chosen in.

        Args:
            logits: float32 [N, at least V], as the model gave them.
            groups: The sequences of the N rows, in order.
            runs: What was decided for each group.

        Returns:
            One entry per group; None where the request asks for none.
        """
        rows = Rows(groups)
        asking = rows.using(lambda params: params.logprobs is not None)
        if not asking:
            return [None] * len(groups)
        numbers = [rows.starts[i] + row for i in asking for row in runs[i].rows]
        tokens = [token for i in asking for token in runs[i].run]
        num_top = [groups[i].spec.sampling.logprobs or 0 for i in asking for _ in runs[i].run]
        if self._processed_logprobs:
            logits = self._drawn_from(logits, self._laid_out(logits, groups))
        entries = iter(token_logprobs(logits[:, : self.vocab_size], tokens, num_top, numbers))
        reports: list[LogprobReport] = [None] * len(groups)
        for i in asking:
            reports[i] = tuple(next(entries) for _ in runs[i].run)
        return reports

    def _drawn_from(self, logits: Tensor, rows: Rows) -> Tensor:
        """Logits of the distributions that tokens are drawn from, and with temperature 0 after edits: [N, V]."""
        logits = self._edited(logits, rows)
        sampled = rows.using(_is_random)
        if not sampled:
            return logits
        (index,) = on_device(logits.device, rows.numbers(sampled))
        return logits.index_copy(0, index, self._scaled(logits[index], rows.part(sampled)))

    def _laid_out(self, logits: Tensor, groups: Sequence[RowGroup]) -> Rows:
        rows = Rows(self.masked(groups))
        assert logits.dtype == torch.float32, "logits are brought to float32 before sampling"
        assert logits.shape[0] == rows.num_rows, f"{logits.shape[0]} rows of logits for {rows.num_rows} rows of groups"
        assert logits.shape[1] >= self.vocab_size, "fewer logits than tokens in the vocabulary"
        return rows

    def _edited(self, logits: Tensor, rows: Rows) -> Tensor:
        """Everything before the temperature: [N, V], a copy if anything changes."""
        unedited = logits = logits[:, : self.vocab_size]
        if not self._processors and not rows.using(_is_edited):
            return logits
        editor = self._editor_of(logits.device)
        edits = editor.lay_out(rows)
        logits = editor.apply(logits.clone(), rows, edits)
        if self._processors and rows.groups:
            logits = self._processed(logits, rows)
        return apply_grammars(logits, unedited, edits)

    def _processed(self, logits: Tensor, rows: Rows) -> Tensor:
        """What the processors make of [N, V], but for rows of which they leave nothing to draw from: a new tensor."""
        groups = [one for group in rows.groups for one in (group.by_row() if group.parents else (group,))]
        try:
            processed = self._process(logits, groups)
        except Exception as error:
            if is_device_lost(error):
                raise
            own = zip(logits.split_with_sizes(rows.counts), rows.groups, strict=True)
            processed = torch.cat([self._processed_alone(part, group) for part, group in own])
        return torch.where(processed.amax(1, keepdim=True).isfinite(), processed, logits)

    def _processed_alone(self, own: Tensor, group: RowGroup) -> Tensor:
        """What the processors make of a group's rows, [1 + drafts, V]; where one raises, they stay as they are."""
        try:
            return self._process(own, group.by_row() if group.parents else [group])
        except Exception as error:
            if is_device_lost(error):
                raise
            logger.error("A logits processor failed; request %s", group.spec.request_id, exc_info=error)
            self._failures[id(group)] = error
            return own

    def _process(self, logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
        processed = logits.clone()
        for processor in self._processors:
            changed = processor(groups, processed)
            if changed is None:
                continue
            if changed.shape != logits.shape:
                raise ValueError(f"a logits processor gave {list(changed.shape)} for {list(logits.shape)}")
            processed = changed.to(logits)
        return processed

    def _scaled(self, logits: Tensor, rows: Rows) -> Tensor:
        """Logits over temperature, -inf where truncated, each row's maximum 0: a new [N, V].

        The maximum is taken away first, so that float32 keeps its precision at the top for any temperature.
        """
        scaled = logits - logits.amax(1, keepdim=True)
        heats, truncation = rows.temperatures(), rows.truncation()
        truncated = np.flatnonzero(rows.spread((truncation != UNUSED_TRUNCATION).any(1)))
        is_heated = bool((heats != 1).any())
        if not is_heated and not len(truncated):
            return scaled
        temperature, of_rows, index = on_device(
            logits.device, rows.spread(heats[:, None]), rows.spread(truncation), truncated
        )
        if is_heated:
            scaled /= temperature
        if len(truncated) == len(scaled):
            return _truncated(scaled, of_rows)
        if len(truncated):
            scaled[index] = _truncated(scaled[index], of_rows[index])
        return scaled

    def _noised(self, logits: Tensor, rows: Rows) -> Tensor:
        """Scaled logits and noise. Leaving out the normalisation moves a row as a whole, and no argmax."""
        return self._noise.rows(rows.seeds(), rows.positions(), logits.device).add_(self._scaled(logits, rows))


def _truncated(scaled: Tensor, of_rows: Tensor) -> Tensor:
    """-inf where [N, V] is truncated, in place, by the parameters of each row: see :meth:`Rows.truncation`."""
    if scaled.device.type == "cpu":
        top_k, top_p, min_p = of_rows.numpy().T
        found = torch.from_numpy(thresholds(scaled.numpy(), top_k, top_p, min_p.astype(np.float32)))
    else:
        found = thresholds(scaled, of_rows[:, 0], of_rows[:, 1], of_rows[:, 2].float())
    return scaled.masked_fill_(scaled < found.unsqueeze(1), -torch.inf)


def _is_random(params: SamplingParams) -> bool:
    return not params.is_greedy


def _is_edited(params: SamplingParams) -> bool:
    is_banned = bool(params.allowed_token_ids or params.bad_words)
    is_banned = is_banned or params.grammar is not None
    return is_banned or bool(params.logit_bias) or params.min_tokens > 0 or uses_penalties(params)
