"""Speculative decoding in one process: both models, and all four machines joined by plain function calls."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specdec.checkpoint.compat import tokenizer_width
from specdec.core.backends import DraftBackend, TargetBackend
from specdec.core.drafts import DraftChooser
from specdec.core.errors import CancelledError, InvalidParameterError, SequenceFailedError
from specdec.core.params import PLAIN_DEFAULTS, GenerationDefaults, SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.types import Adapter
from specdec.core.validation import (
    validated,
    validated_cache_salts,
    validated_max_tokens,
    validated_num_speculative_tokens,
    validated_seed,
    validated_stop,
)
from specdec.drafting.ngram import NgramOptions
from specdec.drafting.plans import fixed_plan, no_drafts
from specdec.engine.build import BackendOptions, build_drafter, build_target, pair_gpu_shares
from specdec.engine.pair import PairedTarget
from specdec.engine.results import CancellationToken, GenerationResult, RunningSequence, SpecStats, TokenEvent
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.protocol.drafter import DrafterMachine
from specdec.protocol.ingress import IngressMachine, TokenDelta
from specdec.protocol.leases import Times
from specdec.protocol.router import RouterMachine
from specdec.protocol.target import TargetMachine
from specdec.sampling.noise import derive_seed
from specdec.structured.compiler import Grammars
from specdec.text.detokenizer import OutputText
from specdec.text.prompts import check_token_ids, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class InProcessService:
    """The whole line in one thread: each ``pump`` drafts for all sequences, then verifies all of them once.

    Args:
        num_draft_tokens: Draft length where the request names none.
        drafter: None where there is no draft model.
        ngram: Of the target; None for none.
        chooser: Of the target; None takes drafts in order, and all of them.

    Attributes:
        is_idle: Whether the newest ``pump`` found nothing to do: all sequences wait, for a grammar that is compiled or
            an adapter that is read.
        clock: Seconds, only for leases, which nobody lets run out here.
    """

    def __init__(
        self,
        target: TargetBackend,
        drafter: DraftBackend | None,
        num_draft_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        ngram: NgramOptions | None = None,
        chooser: DraftChooser | None = None,
    ) -> None:
        times = Times(lease_s=1e6, peer_timeout_s=1e6)
        planner = fixed_plan(num_draft_tokens, "sequential") if drafter is not None else no_drafts
        self._clock = clock
        self.is_idle = False
        self.ingress = IngressMachine("ingress", times)
        self.router = RouterMachine("router", planner, times)
        self.target = TargetMachine("target", target, times, ngram=ngram, chooser=chooser)
        self.drafter = DrafterMachine("drafter", drafter, times) if drafter is not None else None
        self.router.worker_joined("target", "target", clock())
        if drafter is not None:
            self.router.worker_joined("drafter", "drafter", clock())
        self.ingress.router_joined("router", clock())

    def start(self, seq: str, prompt: SharedTokens | Iterable[int], spec: SequenceSpec) -> None:
        """Take a sequence in."""
        self.ingress.start(seq, prompt, spec, self._clock())

    def cancel(self, seq: str) -> None:
        """Forget a sequence, everywhere, at once."""
        self.ingress.cancel(seq)
        self._exchange()

    def pump(self) -> list[TokenDelta]:
        """One round: all drafting there is to do, one verification, and what it delivered."""
        now_s = self._clock()
        for machine in (self.ingress, self.router):
            machine.step(now_s)
        self._exchange()
        worked = False
        while self.drafter is not None and self.drafter.step(now_s):
            worked = True
        self._exchange()
        self.is_idle = not self.target.step(now_s) and not worked
        self._exchange()
        return self.ingress.take_deliveries()

    def _exchange(self) -> None:
        """Carry messages until there are none left."""
        machines = {m.name: m for m in (self.ingress, self.router, self.target, self.drafter) if m is not None}
        moved = True
        while moved:
            moved = False
            for machine in list(machines.values()):
                for peer, messages in machine.take_outbox().items():
                    moved = True
                    for message in messages:
                        machines[peer].receive(message, self._clock())


logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.005
"""Before all sequences are looked at again, where each waits for something that another thread does."""

Prompt = str | Sequence[int]


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
        ngram: How drafts are made from the text itself, with or without a draft model; None makes none.
        defaults: What holds for calls that do not say.
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
        ngram: NgramOptions | None = None,
        defaults: GenerationDefaults = PLAIN_DEFAULTS,
        fallback: str | None = None,
    ) -> None:
        if ngram is not None:
            validated_num_speculative_tokens(ngram.most, "ngram.most")
        self._fallback = fallback if draft is not None or ngram is not None else None
        num_draft_tokens = validated_num_speculative_tokens(num_speculative_tokens) or 0
        served = target if draft is None else PairedTarget(target, draft, num_draft_tokens, drafts_first=True)
        self._service = InProcessService(served, None, num_draft_tokens, ngram=ngram)
        self._defaults = defaults
        self._max_model_len = target.max_model_len
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._names = itertools.count()
        self._stats = SpecStats()
        self._deliveries: dict[str, deque[TokenDelta]] = {}
        self._grammars: Grammars | None = None

    @classmethod
    def from_pretrained(
        cls,
        target: ModelSource,
        draft: ModelSource | None = None,
        *,
        num_speculative_tokens: int = 4,
        ngram: NgramOptions | None = None,
        options: BackendOptions | None = None,
        draft_options: BackendOptions | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> SpeculativeEngine:
        """Load a pair.

        Args:
            target: The model that decides.
            draft: The model that proposes; None decodes plainly.
            num_speculative_tokens: Draft tokens per round where a call names none.
            ngram: How drafts are made from the text itself; None makes none.
            options: How the target is run. Where both models are on one GPU, their caches hold as many tokens each,
                unless their options name shares.
            draft_options: How the draft is run; by default like the target.
            progress: Given a line for each stage.

        Raises:
            ModelLoadError: A model cannot be loaded or served exactly.
            IncompatiblePairError: The two do not fit together.
            MemoryPlanError: A cache cannot hold one sequence.
        """
        tokenizer = load_tokenizer(target)
        shares = (1.0, 1.0) if draft is None else pair_gpu_shares(target, draft)
        options = replace(options or BackendOptions(), vocab_size=tokenizer_width(tokenizer))
        draft_options = draft_options or options
        options = replace(options, device_share=options.device_share or shares[0])
        target_backend, built = build_target(target, options, progress)
        draft_backend = None
        if draft is not None:
            draft_options = replace(
                draft_options,
                device_share=draft_options.device_share or shares[1],
                max_draft_tokens=max(draft_options.max_draft_tokens, num_speculative_tokens),
            )
            draft_backend, _ = build_drafter(draft, draft_options, target, progress, has_branches=False)
        defaults = built.loaded.generation_defaults
        remark = defaults.remark(target.path)
        if remark is not None:
            logger.warning(remark)
        return cls(
            target_backend,
            draft_backend,
            tokenizer,
            eos_token_ids=built.loaded.eos_token_ids,
            vocab_size=built.runner.vocab_size,
            num_speculative_tokens=num_speculative_tokens,
            ngram=ngram,
            defaults=defaults,
            fallback=built.runner.no_speculation,
        )

    @property
    def default_sampling(self) -> SamplingParams:
        """How tokens are chosen where a call does not say; ``dataclasses.replace`` changes single fields of it."""
        return self._defaults.sampling

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
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        adapter: Adapter | None = None,
        draft_adapter: Adapter | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        cancellation: CancellationToken | None = None,
    ) -> GenerationResult:
        """Generate from one prompt; see :meth:`generate_batch`.

        Raises:
            SequenceFailedError: It could not be generated to its end.
        """
        result = self.generate_batch(
            [prompt],
            sampling,
            seed=seed,
            max_tokens=max_tokens,
            num_speculative_tokens=num_speculative_tokens,
            stop=stop,
            cache_salt=cache_salt,
            adapter=adapter,
            draft_adapter=draft_adapter,
            on_token=on_token,
            cancellation=cancellation,
        )[0]
        if result.finish_reason == "error":
            raise SequenceFailedError(result.error)
        return result

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        cache_salt: str | Sequence[str] = "",
        adapter: Adapter | None = None,
        draft_adapter: Adapter | None = None,
        on_token: Callable[[TokenEvent], None] | None = None,
        cancellation: CancellationToken | None = None,
    ) -> list[GenerationResult]:
        """Generate from several prompts in one continuous batch.

        A sequence that fails ends with ``finish_reason`` ``error``; the others go on.

        Args:
            prompts: Texts, or lists of token ids.
            sampling: How tokens are chosen; where none is given, ``default_sampling``: what the model's generation
                config says, else the plain distribution at temperature 1.
            seed: Of all noise; drawn where there is none. Prompt i has a seed derived from it.
            max_tokens: Most output tokens of each; by default the generation config's ``max_new_tokens``, as far as the
                model's length allows, else what is left of that length.
            num_speculative_tokens: Draft tokens per round; 0 decodes plainly.
            stop: A string that ends a text, or several.
            cache_salt: Cached prefixes are shared only among prompts with the same salt; one for all, or one for each.
            adapter: A LoRA checkpoint, as :func:`specdec.adapter_reference` gives it, that the target is used with; the
                engine's ``target`` needs room for it (``ModelSource.adapters``).
            draft_adapter: The one of the draft model that goes with it, if there is one.
            on_token: Called with every event as it comes.
            cancellation: Ends the call early.

        Raises:
            InvalidParameterError: A parameter is not allowed.
            CancelledError: ``cancellation`` was used.
        """
        started_s = time.perf_counter()
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise InvalidParameterError("prompts", "prompts must be a list of texts or of lists of token ids")
        running = self._prepare(
            prompts, sampling, seed, max_tokens, num_speculative_tokens, stop, cache_salt, (adapter, draft_adapter)
        )
        for event in self._events(running, cancellation):
            if on_token is not None:
                on_token(event)
        return [one.result(started_s) for one in running.values()]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
        num_speculative_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        cache_salt: str = "",
        adapter: Adapter | None = None,
        draft_adapter: Adapter | None = None,
        cancellation: CancellationToken | None = None,
    ) -> Iterator[TokenEvent]:
        """Generate from one prompt, an event a round; closing the iterator cancels. See :meth:`generate_batch`.

        The iterator raises SequenceFailedError after the last token of a sequence that fails.
        """
        running = self._prepare(
            [prompt], sampling, seed, max_tokens, num_speculative_tokens, stop, cache_salt, (adapter, draft_adapter)
        )
        return self._events(running, cancellation, raises=True)

    def generate_specs(
        self, sequences: Sequence[tuple[Sequence[int], SequenceSpec]], stop: Sequence[str] = ()
    ) -> list[GenerationResult]:
        """Generate sequences whose parameters are given whole, their seeds included, as a service's router gets them.

        Args:
            sequences: The prompt of each, as token ids, and its parameters, which are not checked.
            stop: Strings that end a text.
        """
        started_s = time.perf_counter()
        running = {
            f"local-{next(self._names)}": RunningSequence(
                index, list(prompt), spec, OutputText(self._tokenizer, list(prompt), spec, tuple(stop))
            )
            for index, (prompt, spec) in enumerate(sequences)
        }
        for _ in self._events(running, None):
            pass
        return [one.result(started_s) for one in running.values()]

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None,
        seed: int | None,
        max_tokens: int | None,
        num_speculative_tokens: int | None,
        stop: str | Sequence[str],
        cache_salt: str | Sequence[str],
        adapters: tuple[Adapter | None, Adapter | None],
    ) -> dict[str, RunningSequence]:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidParameterError("sampling", f"sampling must be SamplingParams, not {type(sampling).__name__}")
        sampling = self.default_sampling if sampling is None else sampling
        sampling = validated(sampling, self._vocab_size, self._eos_token_ids)
        if sampling.grammar is not None:
            self._grammars = self._grammars or Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids)
            self._grammars.check(sampling.grammar)
        num_speculative_tokens = validated_num_speculative_tokens(num_speculative_tokens)
        seed = secrets.randbits(63) if seed is None else validated_seed(seed)
        stops = validated_stop(stop)
        salts = validated_cache_salts(cache_salt, len(prompts))
        running: dict[str, RunningSequence] = {}
        for index, (prompt, salt) in enumerate(zip(prompts, salts, strict=True)):
            tokens = self._tokens(prompt)
            limit = self._limit(len(tokens), max_tokens, sampling.min_tokens)
            spec = SequenceSpec(
                sampling,
                derive_seed(seed, index, 0),
                len(tokens),
                limit,
                self._eos_token_ids,
                arrival_s=float(index),
                num_speculative_tokens=num_speculative_tokens,
                cache_salt=salt,
                adapter=adapters[0],
                draft_adapter=adapters[1],
            )
            output = OutputText(self._tokenizer, tokens, spec, stops)
            running[f"local-{next(self._names)}"] = RunningSequence(
                index, tokens, spec, output, fallback=self._fallback if spec.num_speculative_tokens != 0 else None
            )
        return running

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self._tokenizer, prompt)
        check_token_ids(prompt, self._vocab_size)
        return list(prompt)

    def _limit(self, prompt_length: int, max_tokens: int | None, min_tokens: int) -> int:
        left = self._max_model_len - prompt_length
        if max_tokens is not None:
            max_tokens = validated_max_tokens(max_tokens, min_tokens)
        if left < (max_tokens or 1):
            message = f"prompt ({prompt_length}) and max_tokens ({max_tokens or 1}) exceed {self._max_model_len} tokens"
            raise InvalidParameterError("max_tokens", message, "context_length_exceeded")
        if max_tokens is None:
            max_tokens = validated_max_tokens(min(self._defaults.max_tokens or left, left), min_tokens)
        return max_tokens

    def _events(
        self, running: dict[str, RunningSequence], cancellation: CancellationToken | None, *, raises: bool = False
    ) -> Iterator[TokenEvent]:
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
                    event = running[delivery.seq].take(delivery)
                    if event.finish_reason is not None:
                        self._stats += running[delivery.seq].stats
                        open_seqs.discard(delivery.seq)
                        self._close(delivery.seq)
                    yield event
                    if raises and event.finish_reason == "error":
                        raise SequenceFailedError(event.error)
        finally:
            for seq in open_seqs:
                self._close(seq)

    def _pump(self) -> None:
        deliveries = self._service.pump()
        for delivery in deliveries:
            if delivery.seq in self._deliveries:
                self._deliveries[delivery.seq].append(delivery)
        if self._service.is_idle and not deliveries:
            time.sleep(_IDLE_WAIT_S)

    def _close(self, seq: str) -> None:
        self._deliveries.pop(seq, None)
        self._service.cancel(seq)
