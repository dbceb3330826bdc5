"""Speculative decoding in one process: both models, no service."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.local import LocalService
from specdec.engine.stats import SpecStats
from specdec.errors import CancelledError, InvalidParameterError
from specdec.models.compat import check_pair
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.protocol.backends import DraftBackend, TargetBackend
from specdec.protocol.ingress import Delivery
from specdec.protocol.messages import Finish, Notes
from specdec.sampling.params import SamplingParams, SequenceSpec
from specdec.sampling.philox import derive_seed
from specdec.sampling.validation import validated, validated_num_speculative_tokens, validated_seed
from specdec.text.output import OutputText
from specdec.text.prompts import check_token_ids, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]


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
        finish_reason: ``stop`` or ``length`` with the last event.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Finish | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole generation.

    Attributes:
        stats: What speculation did in this sequence.
        duration_s: Time from the call to the sequence's last token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Finish
    stats: SpecStats
    duration_s: float


@dataclass(slots=True)
class _Running:
    """A sequence on its way."""

    index: int
    prompt: list[int]
    spec: SequenceSpec
    output: OutputText
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    notes: list[Notes] = field(default_factory=list)
    finish_reason: Finish | None = None
    ended_s: float = 0.0


class SpeculativeEngine:
    """Generates text with a target model, sped up by a draft model; the text is the target's own.

    For a seed the tokens do not depend on the draft model, on ``num_speculative_tokens`` or on what else is in the
    batch (in fp32, but for ties within rounding).

    Args:
        target: The model that decides.
        draft: The model that proposes; None decodes plainly.
        tokenizer: Of both.
        eos_token_ids: Tokens that end a text.
        vocab_size: Number of tokens.
        num_speculative_tokens: Draft tokens per round where a call names none.
        fallback: Why the target runs without speculation, in a word; None where it does not.
    """

    def __init__(
        self,
        target: TargetBackend,
        draft: DraftBackend | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        num_speculative_tokens: int = 4,
        fallback: str | None = None,
    ) -> None:
        self._fallback = fallback if draft is not None else None
        self._service = LocalService(target, draft, num_speculative_tokens)
        self._max_model_len = target.max_model_len
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._names = itertools.count()
        self._stats = SpecStats()
        self._deliveries: dict[str, deque[Delivery]] = {}

    @classmethod
    def from_pretrained(
        cls,
        target: ModelSource,
        draft: ModelSource | None = None,
        *,
        num_speculative_tokens: int = 4,
        options: BackendOptions | None = None,
        draft_options: BackendOptions | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> SpeculativeEngine:
        """Load a pair.

        Args:
            target: The model that decides.
            draft: The model that proposes; None decodes plainly.
            num_speculative_tokens: Draft tokens per round where a call names none.
            options: How the target is run.
            draft_options: How the draft is run; by default like the target.
            progress: Given a line for each stage.

        Raises:
            ModelLoadError: A model cannot be loaded or served exactly.
            IncompatiblePairError: The two do not fit together.
            MemoryPlanError: A cache cannot hold one sequence.
        """
        tokenizer = load_tokenizer(target)
        options = replace(options or BackendOptions(), vocab_size=len(tokenizer))
        target_backend, built = build_target(target, options, progress)
        draft_backend = None
        if draft is not None:
            draft_options = replace(draft_options or options, vocab_size=len(tokenizer))
            draft_backend, _, draft_built = build_drafter(draft, draft_options, progress)
            check_pair(built.loaded, tokenizer, draft_built.loaded, load_tokenizer(draft))
        return cls(
            target_backend,
            draft_backend,
            tokenizer,
            eos_token_ids=built.loaded.eos_token_ids,
            vocab_size=built.runner.vocab_size,
            num_speculative_tokens=num_speculative_tokens,
            fallback=built.runner.no_speculation,
        )

    @property
    def stats(self) -> SpecStats:
        """What was done since the start or the last ``reset_stats``, over all finished sequences."""
        return self._stats

    def reset_stats(self) -> None:
        """Begin counting anew."""
        self._stats = SpecStats()

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_token: Callable[[TokenEvent], None] | None = None,
        cancellation: CancellationToken | None = None,
    ) -> GenerationResult:
        """Generate from one prompt; see :meth:`generate_batch`."""
        return self.generate_batch(
            [prompt],
            sampling,
            seed=seed,
            max_tokens=max_tokens,
            num_speculative_tokens=num_speculative_tokens,
            stop=stop,
            on_token=on_token,
            cancellation=cancellation,
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_token: Callable[[TokenEvent], None] | None = None,
        cancellation: CancellationToken | None = None,
    ) -> list[GenerationResult]:
        """Generate from several prompts in one continuous batch.

        Args:
            prompts: Texts, or lists of token ids.
            sampling: How tokens are chosen; by default the plain distribution at temperature 1.
            seed: Of all noise; drawn where there is none. Prompt i has a seed derived from it.
            max_tokens: Most output tokens of each; by default what is left of the model's length.
            num_speculative_tokens: Draft tokens per round; 0 decodes plainly.
            stop: Strings that end a text.
            on_token: Called with every event as it comes.
            cancellation: Ends the call early.

        Raises:
            InvalidParameterError: A parameter is not allowed.
            CancelledError: ``cancellation`` was used.
        """
        started_s = time.perf_counter()
        running = self._prepare(prompts, sampling or SamplingParams(), seed, max_tokens, num_speculative_tokens, stop)
        for event in self._events(running, cancellation):
            if on_token is not None:
                on_token(event)
        return [self._result(one, started_s) for one in running.values()]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancellation: CancellationToken | None = None,
    ) -> Iterator[TokenEvent]:
        """Generate from one prompt, an event a round; closing the iterator cancels. See :meth:`generate_batch`."""
        running = self._prepare([prompt], sampling or SamplingParams(), seed, max_tokens, num_speculative_tokens, stop)
        return self._events(running, cancellation)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        seed: int | None,
        max_tokens: int | None,
        num_speculative_tokens: int | None,
        stop: Sequence[str],
    ) -> dict[str, _Running]:
        sampling = validated(sampling, self._vocab_size)
        num_speculative_tokens = validated_num_speculative_tokens(num_speculative_tokens)
        seed = secrets.randbits(63) if seed is None else validated_seed(seed)
        running: dict[str, _Running] = {}
        for index, prompt in enumerate(prompts):
            tokens = self._tokens(prompt)
            limit = self._limit(len(tokens), max_tokens)
            spec = SequenceSpec(
                sampling,
                derive_seed(seed, index, 0),
                len(tokens),
                limit,
                self._eos_token_ids,
                arrival_s=float(index),
                num_speculative_tokens=num_speculative_tokens,
            )
            output = OutputText(self._tokenizer, tokens, spec, stop)
            running[f"local-{next(self._names)}"] = _Running(index, tokens, spec, output)
        return running

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self._tokenizer, prompt)
        check_token_ids(prompt, self._vocab_size)
        return list(prompt)

    def _limit(self, prompt_length: int, max_tokens: int | None) -> int:
        left = self._max_model_len - prompt_length
        if max_tokens is not None and max_tokens < 1:
            raise InvalidParameterError("max_tokens", f"max_tokens must be at least 1, not {max_tokens}")
        if left < (max_tokens or 1):
            message = f"prompt ({prompt_length}) and max_tokens ({max_tokens or 1}) exceed {self._max_model_len} tokens"
            raise InvalidParameterError("max_tokens", message, "context_length_exceeded")
        return left if max_tokens is None else max_tokens

    def _events(self, running: dict[str, _Running], cancellation: CancellationToken | None) -> Iterator[TokenEvent]:
        """Pump until all are done; what is not done when the iterator is closed is forgotten everywhere.

        Nothing is begun before the first event is asked for. Several iterators may be open: whoever pumps keeps for the
        others what is theirs.
        """
        open_seqs = set(running)
        try:
            for seq, one in running.items():
                self._deliveries[seq] = deque()
                self._service.start(seq, one.prompt, one.spec)
            while open_seqs:
                if cancellation is not None and cancellation.cancelled:
                    raise CancelledError("the generation was cancelled")
                if not any(self._deliveries[seq] for seq in open_seqs):
                    self._pump()
                for delivery in [self._deliveries[seq].popleft() for seq in open_seqs if self._deliveries[seq]]:
                    event = self._take(running[delivery.seq], delivery.tokens, delivery.notes, delivery.finish)
                    if event.finish_reason is not None:
                        open_seqs.discard(delivery.seq)
                        self._close(delivery.seq)
                    yield event
        finally:
            for seq in open_seqs:
                self._close(seq)

    def _pump(self) -> None:
        for delivery in self._service.pump():
            if delivery.seq in self._deliveries:
                self._deliveries[delivery.seq].append(delivery)

    def _close(self, seq: str) -> None:
        self._deliveries.pop(seq, None)
        self._service.cancel(seq)

    def _take(self, one: _Running, tokens: tuple[int, ...], notes: Notes, finish: Finish | None) -> TokenEvent:
        delta = one.output.push(tokens, finish)
        one.token_ids += tokens[: delta.num_billed]
        one.notes.append(notes.first(delta.num_billed))
        one.text.append(delta.text)
        one.finish_reason = delta.finish
        if delta.finish is not None:
            one.ended_s = time.perf_counter()
            self._stats += self._stats_of(one)
        return TokenEvent(one.index, tokens[: delta.num_billed], delta.text, delta.finish)

    def _result(self, one: _Running, started_s: float) -> GenerationResult:
        assert one.finish_reason is not None
        duration_s = one.ended_s - started_s
        return GenerationResult(
            "".join(one.text), tuple(one.token_ids), one.finish_reason, self._stats_of(one), duration_s
        )

    def _stats_of(self, one: _Running) -> SpecStats:
        return SpecStats.of(one.notes, self._fallback if one.spec.num_speculative_tokens != 0 else None)
