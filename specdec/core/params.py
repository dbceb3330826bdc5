"""What a request may say about how its tokens are chosen.

When a sequence ends; applied token by token, so that nothing after its end is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.core.grammar import Grammar
from specdec.core.tokens import NO_TOKENS, SharedTokens
from specdec.core.types import Adapter, Finish

Exactness = Literal["fast", "strict"]
"""Whether a token's logits have the same bits in whatever step it is read; see :mod:`specdec.executor.tiles`."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of which distribution log probabilities are: the model's, or the one that is sampled from."""

LEAST_TEMPERATURE = 1e-5
"""Below it only tokens tied within rounding would share the probability, and float32 comes to its end."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SamplingParams:
    """How one sequence's tokens are chosen; applied to every row, drafted or not, or refused.

    Both models apply all of it, in the order of the fields from the penalties to ``min_p``. Values are assumed valid:
    :func:`specdec.core.validation.validated` checks what comes from a user.

    Attributes:
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: Subtracted once from the logits of tokens in the output; 0 is off.
        frequency_penalty: Subtracted per occurrence from the logits of tokens in the output; 0 is off.
        logit_bias: Pairs (token id, bias) added to the logits; at most 1,024 from a user.
        allowed_token_ids: The only tokens that may be chosen; none names all. A user may give a list.
        bad_words: Runs of tokens that the output must not hold: what would complete one, after output tokens that
            begin it, is not chosen, unless nothing else is left.
        min_tokens: Number of output tokens before which no end-of-sequence or stop token may be chosen.
        temperature: Divides the logits; below 1e-5 it counts as 0, which takes the most likely token, without noise.
        top_k: Keep this many most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities reach this sum; 1 keeps all.
        min_p: Keep tokens at least this likely relative to the most likely one; 0 keeps all.
        stop_token_ids: Token ids that end the sequence (they are committed, and finish it).
        ignore_eos: Go on past the model's end-of-sequence tokens.
        logprobs: Number of most likely tokens to report per output token, beside the chosen one; None reports nothing.
        prompt_logprobs: The same for the prompt's tokens.
        grammar: What the output must match from its first token on; None takes any. It can end only where it matches.
            It goes before every other field: where those leave nothing of what it allows, they do not count in a row.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: SharedTokens = NO_TOKENS
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without noise: the temperature is 0, or as good as that."""
        return self.temperature < LEAST_TEMPERATURE


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What is taken from a model's ``generation_config.json`` for requests that do not say; else what changes nothing.

    As in vLLM these fields count, and no others. ``do_sample`` does not: whoever wants the most likely tokens asks for
    temperature 0.

    Attributes:
        max_tokens: Most output tokens (``max_new_tokens``), for requests that have no other default; it bounds nobody
            who names a number.
        not_honoured: Fields that would change what transformers generates, and that change nothing here.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    not_honoured: tuple[str, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen where nothing else is said."""
        return SamplingParams(
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def remark(self, name: str) -> str | None:
        """A line for the log about what is not honoured of the model ``name``; None where there is nothing."""
        if not self.not_honoured:
            return None
        return f"the generation config of {name} sets {', '.join(self.not_honoured)}: not honoured here"


PLAIN_DEFAULTS = GenerationDefaults()
"""Of a model whose generation config says nothing."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SequenceSpec:
    """Everything about a sequence that never changes while it is generated.

    Attributes:
        sampling: How tokens are chosen.
        seed: 64-bit seed of the sequence's noise, in [0, 2**64). Sample j of prompt i has a seed of its own.
        output_start: Length of the prompt in tokens: log[output_start:] is the output.
        max_tokens: Most output tokens, at least 1.
        eos_token_ids: The model's end-of-sequence ids.
        arrival_s: Wall-clock time of the request, for fair queueing.
        priority: Requests of a lower one go first, in [-2**31, 2**31), among one owner's. No token depends on it.
        num_speculative_tokens: The request's bound on draft tokens per round; 0 switches speculation off, None leaves
            it to the service.
        cache_salt: Cached prefixes are shared only among sequences with the same salt.
        prediction: What the client expects the output to be like: a text to draft from. Nothing else depends on it.
            The samples of a request share it.
        request_id: Of the client's request, for log lines; nothing depends on it.
        trace: Label of the request's trace, W3C's ``traceparent``; empty where nobody traces it. Nothing depends on it.
        wants_times: Whether to note when its rounds were worked on; nothing else depends on it.
        adapter: What the target is used with; None: the model as it is.
        draft_adapter: The same of the draft; only how often it is right depends on it.
        keeps_numeric: Whether it keeps to the bits that it has begun with, where targets are strict.
        owner: Whose it is: 8 bytes, or none. Owners take turns. No token depends on it.
    """

    sampling: SamplingParams
    seed: int
    output_start: int
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    priority: int = 0
    num_speculative_tokens: int | None = None
    cache_salt: str = ""
    prediction: SharedTokens = NO_TOKENS
    request_id: str = ""
    trace: str = ""
    wants_times: bool = False
    adapter: Adapter | None = None
    draft_adapter: Adapter | None = None
    keeps_numeric: bool = True
    owner: bytes = b""

    @property
    def order(self) -> tuple[int, float]:
        """Sequences with the least go first, and are preempted last. An owner's priority passes no other owner."""
        return 0 if self.owner else self.priority, self.arrival_s

    def prefix_group(self, adapter: Adapter | None) -> str:
        """Cached prefixes of a model that is used with an adapter are shared only among sequences of one group."""
        return f"{adapter.fingerprint if adapter else ''}:{self.cache_salt}"

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Ids that finish the sequence when committed."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.sampling.stop_token_ids)


@dataclass(frozen=True, slots=True)
class StopCondition:
    """Where a sequence ends.

    Attributes:
        token_ids: What ends it with ``stop``.
        exempt_length: Length of the log, prompt and output, up to which its tokens end nothing.
        most_length: Length of the log at which it ends with ``length``.
    """

    token_ids: frozenset[int]
    exempt_length: int
    most_length: int

    @classmethod
    def of(cls, spec: SequenceSpec, max_model_len: int) -> StopCondition:
        """Of a sequence on a model whose longest log has ``max_model_len`` tokens."""
        exempt_length = spec.output_start + spec.sampling.min_tokens
        return cls(spec.ending_token_ids, exempt_length, min(spec.output_start + spec.max_tokens, max_model_len))

    def walk(self, tokens_before: int, run: Sequence[int]) -> tuple[int, Finish | None]:
        """How much of a run is committed, and how the sequence ends there: by an ending token first, then by length.

        Args:
            tokens_before: Length of the log before the run; the sequence is not finished there.
            run: Decided tokens.

        Returns:
            Number of the run's tokens to commit, the finishing one included, and the reason, None if it goes on:
            ``stop`` for an end-of-sequence or stop token with at least ``min_tokens`` output tokens before it;
            ``length`` at ``max_tokens`` or ``max_model_len``.
        """
        if tokens_before + len(run) < self.most_length and self.token_ids.isdisjoint(run):
            return len(run), None
        for num_committed, token in enumerate(run, start=1):
            if token in self.token_ids and tokens_before + num_committed > self.exempt_length:
                return num_committed, "stop"
            if tokens_before + num_committed >= self.most_length:
                return num_committed, "length"
        return len(run), None

    def of_log(self, output_start: int, output: Sequence[int]) -> Finish | None:
        """How a log that was opened is finished already, if it is; the prompt's tokens end nothing.

        A prompt that leaves no room for a token is finished by ``length``.
        """
        _, finish = self.walk(output_start, output)
        if finish is None and output_start + len(output) >= self.most_length:
            return "length"
        return finish
