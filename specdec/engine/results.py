"""What a generation gives: events as they come, the whole result, and the hand-brake.

What speculation did, as data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.core.messages import Notes, TokenKind, count_accepted, token_kind
from specdec.core.params import SequenceSpec
from specdec.core.types import Finish, PromptLogprobs, TokenLogprobs
from specdec.protocol.ingress import TokenDelta
from specdec.text.detokenizer import OutputText


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Counts over any number of sequences; add two to pool them.

    Attributes:
        num_tokens: Output tokens.
        num_rounds: Verifications, with and without a draft; each gives at least one token.
        num_drafts: Verifications of at least one draft token.
        num_draft_tokens: Draft tokens verified.
        num_accepted_tokens: Draft tokens kept.
        fallbacks: Sequences that ran without speculation, by reason.
    """

    num_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified draft, the corrected or bonus token included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def __add__(self, other: SpecStats) -> SpecStats:
        reasons = {*self.fallbacks, *other.fallbacks}
        return SpecStats(
            self.num_tokens + other.num_tokens,
            self.num_rounds + other.num_rounds,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            {reason: self.fallbacks.get(reason, 0) + other.fallbacks.get(reason, 0) for reason in sorted(reasons)},
        )

    @staticmethod
    def of(notes: Sequence[Notes], fallback: str | None = None) -> SpecStats:
        """Count the notes that came with a sequence's tokens; ``fallback``: why it ran without speculation, if so."""
        provenance = b"".join(note.provenance for note in notes)
        num_drafted = [n for note in notes for n in note.num_drafted]
        drafts = [n for n in num_drafted if n]
        # A round that ends in an accepted token was cut there by the end of the sequence.
        num_accepted = count_accepted(provenance)
        is_cut = bool(provenance) and token_kind(provenance[-1]) is TokenKind.ACCEPTED
        num_rounds = len(provenance) - num_accepted + is_cut
        fallbacks = {} if fallback is None else {fallback: 1}
        return SpecStats(len(provenance), num_rounds, len(drafts), sum(drafts), num_accepted, fallbacks)


class CancellationToken:
    """Ends a generation from outside, at its next round; safe to use from any thread."""

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """End the generation that was given this token."""
        self._cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New tokens of one sequence.

    Attributes:
        index: Which prompt, where several were given.
        token_ids: Committed tokens.
        text: What they add to the text; may be empty while a character or a stop string is unfinished.
        finish_reason: ``stop``, ``length`` or ``error`` with the last event.
        error: What went wrong, where ``finish_reason`` is ``error``.
        logprobs: Where ``SamplingParams.logprobs`` asks for them, one :class:`specdec.TokenLogprobs` per token of
            ``token_ids``, from the target's own row.
        prompt_logprobs: Where ``SamplingParams.prompt_logprobs`` asks for them, with the first event that has tokens:
            one entry per prompt token, None for the first, which nothing foretold.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Finish | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole generation.

    Attributes:
        finish_reason: ``stop``, ``length``, or ``error``: the sequence failed after the tokens that are here.
        error: What went wrong, where ``finish_reason`` is ``error``.
        stats: What speculation did in this sequence.
        duration_s: Time from the call to the sequence's last token.
        prompt_token_ids: What was continued.
        spec: All that decided the tokens: the seed as used, and sampling with defaults filled in.
        logprobs: One entry per token of ``token_ids``, where they were asked for; see :class:`TokenEvent`.
        prompt_logprobs: One entry per prompt token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Finish
    stats: SpecStats
    duration_s: float
    prompt_token_ids: tuple[int, ...]
    spec: SequenceSpec
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    error: str = ""


@dataclass(slots=True)
class RunningSequence:
    """A sequence on its way, and what it gave so far."""

    index: int
    prompt: list[int]
    spec: SequenceSpec
    output: OutputText
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    notes: list[Notes] = field(default_factory=list)
    finish_reason: Finish | None = None
    ended_s: float = 0.0
    error: str = ""
    fallback: str | None = None

    def take(self, delivery: TokenDelta) -> TokenEvent:
        """Take what was delivered, up to where the text ends."""
        delta = self.output.push(delivery.tokens, delivery.finish)
        tokens, notes = delivery.tokens[: delta.num_billed], delivery.notes.first(delta.num_billed)
        self.token_ids += tokens
        self.notes.append(notes)
        self.text.append(delta.text)
        self.finish_reason = delta.finish
        if delta.finish is not None:
            self.ended_s, self.error = time.perf_counter(), delivery.reason
        logprobs = None if self.spec.sampling.logprobs is None else notes.logprobs or ()
        return TokenEvent(self.index, tokens, delta.text, delta.finish, logprobs, _unpacked(notes), self.error)

    @property
    def stats(self) -> SpecStats:
        """What speculation did so far."""
        return SpecStats.of(self.notes, self.fallback)

    def result(self, started_s: float) -> GenerationResult:
        """The whole of it, once it has ended."""
        assert self.finish_reason is not None
        sampling = self.spec.sampling
        entries = [entry for notes in self.notes for entry in notes.logprobs or ()]
        prompt_logprobs = [notes.prompt_logprobs.unpack() for notes in self.notes if notes.prompt_logprobs is not None]
        return GenerationResult(
            "".join(self.text),
            tuple(self.token_ids),
            self.finish_reason,
            self.stats,
            self.ended_s - started_s,
            tuple(self.prompt),
            self.spec,
            None if sampling.logprobs is None else tuple(entries),
            prompt_logprobs[0] if prompt_logprobs else None,
            self.error,
        )


def _unpacked(notes: Notes) -> PromptLogprobs | None:
    return None if notes.prompt_logprobs is None else notes.prompt_logprobs.unpack()
