"""What a request asks of the service: its prompts, its sequences and their parameters, its predicted output."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar

from cluster.config.limits import Limits
from deployments.http.api import Api
from deployments.http.assistant import Assistant, checked_grammar
from deployments.http.conversation import conversation_tokens
from deployments.http.request_context import RequestContext
from deployments.http.schemas.chat import ChatBody, CompletionBody
from deployments.http.schemas.common import GenerationBody
from deployments.http.service import ApiSettings, ModelInfo, SequenceRequest, ServedModel
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.core.grammar import Grammar
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import NO_TOKENS, SharedTokens
from specdec.core.types import Tokens
from specdec.core.validation import validated, validated_num_speculative_tokens, validated_seed
from specdec.sampling.noise import derive_seed
from specdec.structured.parsing.calls import AnswerParser, PlainParser
from specdec.structured.parsing.reasoning import ReasoningCounter
from specdec.text.detokenizer import Detokenizer
from specdec.text.prompts import check_token_ids, encode_bad_words, encode_text, separates_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def predicted_tokens(api: Api, body: ChatBody, model: ServedModel) -> SharedTokens:
    """The tokens of a request's prediction, at most as many as a sequence may have; none where nothing is drafted.

    Raises:
        InvalidParameterError: The text cannot be encoded.
    """
    text = "" if body.prediction is None else body.prediction.text
    if not text or speculation_bound(body) == 0:
        return NO_TOKENS

    def work() -> SharedTokens:
        return SharedTokens(
            encode_text(api.tokenizer, text, "prediction", add_special_tokens=False)[: model.max_model_len]
        )

    return await api.encode(len(text), work)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt to be echoed.

    Attributes:
        text: As it was sent, or that of its tokens.
        offsets: For each of its tokens, the number of characters of the text before it; empty where not asked for.
    """

    text: str
    offsets: Tokens = ()


def make_echo(
    tokenizer: PreTrainedTokenizerBase, sent: str | list[int], tokens: Sequence[int], with_offsets: bool
) -> Echo:
    """The echo of a prompt.

    Tokens that the tokenizer put before a text (a beginning-of-sequence token) lie at its beginning.

    Args:
        tokenizer: Any fast tokenizer of transformers.
        sent: The prompt as the request has it.
        tokens: The prompt's tokens.
        with_offsets: Whether the tokens' places are needed.
    """
    text = sent if isinstance(sent, str) else str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    return Echo(text, _offsets(tokenizer, text, tokens) if with_offsets else ())


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int]) -> Tokens:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(detokenizer.push(token)))
    num_added = max(0, ends[-1] + len(detokenizer.finish()) - len(text))
    return tuple(max(0, end - num_added) for end in ends[:-1])


_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A request, checked and tokenized.

    Attributes:
        prompts: The tokens of each prompt.
        sequences: ``n`` for each prompt, in the order of the answer's choices.
        num_samples: That ``n``.
        seed: Of the request: each sequence has one of its own, derived from it.
        stops: Strings that end a text.
        num_speculative_tokens: Bound on draft tokens per round.
        fingerprint: Of what decides its tokens.
        echoes: For each prompt, what its choices begin with; none where nothing is echoed.
        new_parser: Makes what reads one choice of a conversation.
        kept: Special tokens that stand in the text that it reads.
        has_prediction: Whether the request brings a text that the answer is expected to be like.
        new_counter: Makes what counts the tokens of a choice's reasoning; None where there is none.
    """

    body: GenerationBody
    model: ServedModel
    context: RequestContext
    prompts: tuple[Tokens, ...]
    sequences: tuple[SequenceRequest, ...]
    num_samples: int
    seed: int
    stops: tuple[str, ...]
    num_speculative_tokens: int
    fingerprint: str
    echoes: tuple[Echo, ...] = ()
    new_parser: Callable[[], AnswerParser] = PlainParser
    kept: frozenset[int] = frozenset()
    new_counter: Callable[[], ReasoningCounter] | None = None
    has_prediction: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """As billed: each prompt once."""
        return sum(map(len, self.prompts))


async def completion_job(api: Api, body: CompletionBody, context: RequestContext) -> Job:
    """Check and tokenize a completion request.

    Raises:
        ApiError, InvalidParameterError, ServiceUnavailableError: The request is refused.
    """
    context.stats.request_id = body.request_id or ""
    model = api.model(body.model)
    _check_count(api, body, len(body.prompt))
    for prompt in body.prompt if body.truncate_prompt_tokens is None else ():
        if not isinstance(prompt, str):  # too long is seen at once, without a look at each of a million ids
            output_limit(body, model, len(prompt), _DEFAULT_COMPLETION_TOKENS)
    context.stats.model = model.name
    prompts = await api.encode(sum(map(len, body.prompt)), lambda: _encode_prompts(api, body, model))
    async with context.waiting(to_begin=True):
        grammar = await checked_grammar(api, body)
    job = _job(api, body, context, model, prompts, _DEFAULT_COMPLETION_TOKENS, grammar)
    return replace(job, echoes=await _echoes(api, body, prompts)) if body.echo else job


async def chat_job(api: Api, body: ChatBody, context: RequestContext) -> Job:
    """Check and tokenize a chat request.

    Raises:
        ApiError, InvalidParameterError, ServiceUnavailableError: The request is refused.
    """
    context.stats.request_id = body.request_id or ""
    model = api.model(body.model)
    _check_count(api, body, 1)
    body.check_tools()
    context.stats.model = model.name
    prompt = _truncated(body, tuple(await conversation_tokens(api, body.messages, body)), model)
    assistant = Assistant(api, body, prompt)
    async with context.waiting(to_begin=True):
        grammar = await assistant.grammar()
    prediction = await predicted_tokens(api, body, model)
    job = _job(api, body, context, model, [prompt], model.defaults.max_tokens, grammar, prediction)
    reading, has_prediction = assistant.reading(), body.prediction is not None
    return replace(
        job,
        new_parser=reading.new_parser,
        kept=reading.kept,
        new_counter=reading.new_counter,
        has_prediction=has_prediction,
    )


async def _echoes(api: Api, body: CompletionBody, prompts: Sequence[Tokens]) -> tuple[Echo, ...]:
    with_offsets = body.echoes_logprobs

    def work() -> tuple[Echo, ...]:
        is_cut = body.truncate_prompt_tokens is not None
        pairs = zip(map(list, prompts) if is_cut else body.prompt, prompts, strict=True)
        return tuple(make_echo(api.tokenizer, sent, tokens, with_offsets) for sent, tokens in pairs)

    return await api.write(sum(map(len, prompts)), work)


def _check_count(api: Api, body: GenerationBody, num_prompts: int) -> None:
    most = api.settings.limits.max_sequences
    if num_prompts * (body.n or 1) > most:
        raise InvalidParameterError(
            "n" if num_prompts <= most else "prompt",
            f"prompts times n must be at most {most} sequences (limits.max_sequences)",
        )


def _encode_prompts(api: Api, body: CompletionBody, model: ServedModel) -> list[Tokens]:
    encoded = []
    with_special = body.add_special_tokens is not False
    for prompt in body.prompt:
        if isinstance(prompt, str):
            tokens = tuple(encode_text(api.tokenizer, prompt, add_special_tokens=with_special))
        else:
            check_token_ids(prompt, model.vocab_size)
            tokens = tuple(prompt)
        encoded.append(_truncated(body, tokens, model))
    return encoded


def _truncated(body: GenerationBody, prompt: Tokens, model: ServedModel) -> Tokens:
    """The end of a prompt, where the request wants no more of it."""
    kept = body.truncate_prompt_tokens
    if kept is None or kept == 0:
        return prompt
    return prompt[-(kept if kept > 0 else max(1, model.max_model_len - (body.output_limit or 1))) :]


def _owner_and_priority(api: Api, context: RequestContext, priority: int) -> tuple[bytes, int]:
    """Whose sequences these are, and what their priority is among their owner's.

    Without API keys, and if an administrator passes everybody, there is no owner.

    Raises:
        UnsupportedParameterError: Priorities are off, and this one is not 0.
    """
    allowed, key = api.settings.limits.priorities, context.stats.key
    if priority and allowed == "off":
        text = f"priority must be 0, and is {priority}: the key limits.priorities of the configuration is off"
        raise UnsupportedParameterError("priority", text)
    passes = allowed == "all" and priority < 0 and key in api.settings.admin_keys
    return b"" if passes or not key else sha256(key.encode()).digest()[:8], priority


def _check_spaces(api: Api, body: GenerationBody) -> None:
    """Refuse to leave out what the tokenizer writes between special tokens; most write nothing."""
    is_asked = body.spaces_between_special_tokens is False and body.skip_special_tokens is False
    if is_asked and separates_special_tokens(api.tokenizer):
        raise UnsupportedParameterError(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens must be true: this model's tokenizer puts spaces between them",
        )


def _job(
    api: Api,
    body: GenerationBody,
    context: RequestContext,
    model: ServedModel,
    prompts: Sequence[Tokens],
    default_tokens: int | None,
    grammar: Grammar | None,
    prediction: SharedTokens = NO_TOKENS,
) -> Job:
    """Check everything else, and give each sequence its seed and its name."""
    body.check_together()
    info = api.service.model_info()
    _check_spaces(api, body)
    bad_words = encode_bad_words(api.tokenizer, body.bad_words or ())
    sampling = sampling_params(body, model, info, api.settings, bad_words, grammar)
    check_prompt_logprobs(body, sum(map(len, prompts)), api.settings.limits)
    limits = [output_limit(body, model, len(prompt), default_tokens) for prompt in prompts]
    num_samples = body.n or 1
    if context.stats.reservation is not None:
        lengths = sum(map(len, prompts)) + len(prediction) * len(prompts)
        beside = len(sampling.allowed_token_ids) + _num_beside(sampling) * len(prompts) * num_samples
        context.stats.reservation.add_tokens(lengths * num_samples + beside, limits * num_samples)
    seed, name = request_seed(body), uuid.uuid4().hex
    owner, priority = _owner_and_priority(api, context, body.priority or 0)
    bound = speculation_bound(body)
    sequences: list[SequenceRequest] = []
    for i, prompt in enumerate(prompts):
        shared = SharedTokens(prompt)
        for j in range(num_samples):
            spec = SequenceSpec(
                # A prompt is read once for what is asked of it: its first sample tells the others.
                sampling=sampling if j == 0 else replace(sampling, prompt_logprobs=None),
                seed=derive_seed(seed, i, j),
                output_start=len(prompt),
                max_tokens=limits[i],
                eos_token_ids=model.eos_token_ids,
                arrival_s=context.wall_s,
                priority=priority,
                owner=owner,
                keeps_numeric=body.exactness != "fast",
                request_id=context.label,
                trace=context.trace,
                num_speculative_tokens=bound,
                prediction=prediction,
                wants_times=body.wants_speculation,
                cache_salt=context.cache_salt(body.cache_salt) or "",
                adapter=model.adapter,
                draft_adapter=model.draft_adapter,
            )
            seq = f"{name}-{len(sequences)}"
            sequences.append(SequenceRequest(seq, shared, spec))
    return Job(
        body=body,
        model=model,
        context=context,
        prompts=tuple(prompts),
        sequences=tuple(sequences),
        num_samples=num_samples,
        seed=seed,
        stops=tuple(body.stop or ()),
        num_speculative_tokens=info.num_speculative_tokens if bound is None else bound,
        fingerprint=model.fingerprint,
    )


_TOKEN_BYTES = 4


def _num_beside(sampling: SamplingParams) -> int:
    """What goes with each sample of a prompt, as so many tokens of 4 bytes."""
    text = 0 if sampling.grammar is None else -(-len(sampling.grammar.text.encode()) // _TOKEN_BYTES)
    return len(sampling.stop_token_ids) + 2 * len(sampling.logit_bias) + sum(map(len, sampling.bad_words)) + text


_T = TypeVar("_T")


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    info: ModelInfo,
    settings: ApiSettings,
    bad_words: tuple[Tokens, ...] = (),
    grammar: Grammar | None = None,
) -> SamplingParams:
    """How a request's tokens are chosen; its bad words come as tokens, its grammar compiled once already.

    Raises:
        InvalidParameterError: A value is not allowed; it names the parameter as the request does.
    """
    _check_offered(body, info, settings)
    defaults = model.defaults
    params = SamplingParams(
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=tuple((body.logit_bias or {}).items()),
        allowed_token_ids=NO_TOKENS if body.allowed_token_ids is None else body.allowed_token_ids,
        bad_words=bad_words,
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, defaults.temperature),
        top_k=_or(body.top_k, defaults.top_k),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        grammar=grammar,
    )
    return validated(params, model.vocab_size, model.eos_token_ids)


def output_limit(body: GenerationBody, model: ServedModel, num_prompt_tokens: int, default: int | None) -> int:
    """Most output tokens of a prompt: what the request says, else ``default``, else what is left of the context.

    At least 1: the target tells of a prompt with the first token it chooses, even where none is shown.

    Raises:
        InvalidParameterError: Prompt and output do not fit into the model's length.
    """
    asked, name = body.output_limit, body.output_limit_name
    room = model.max_model_len - num_prompt_tokens
    if room < (asked or 1):
        raise InvalidParameterError(
            name if room > 0 else body.prompt_name,
            f"the prompt has {num_prompt_tokens} tokens, and {name} is {_stated(asked)}; "
            f"{model.name} takes {model.max_model_len} tokens, prompt and output together",
            "context_length_exceeded",
        )
    limit = min(default or room, room) if asked is None else asked
    if body.min_tokens is not None and body.min_tokens > limit:
        raise InvalidParameterError("min_tokens", f"min_tokens must be at most {limit}, the most output tokens")
    return max(limit, 1)


def check_prompt_logprobs(body: GenerationBody, num_prompt_tokens: int, limits: Limits) -> None:
    """Refuse log probabilities of more prompt tokens than a request may have them of.

    Raises:
        InvalidParameterError: It names the field that asks for them.
    """
    most = limits.max_prompt_logprobs_tokens
    if body.num_prompt_logprobs is not None and num_prompt_tokens > most:
        name = body.logprobs_name if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidParameterError(
            name,
            f"{name}: log probabilities are given of at most {most} prompt tokens of one request "
            f"(limits.max_prompt_logprobs_tokens), and its prompts have {num_prompt_tokens}",
        )


def speculation_bound(body: GenerationBody) -> int | None:
    """The request's bound on draft tokens per round; None where it leaves that to the service.

    Raises:
        InvalidParameterError: The bound is not allowed, or drafts are both asked for and switched off.
    """
    bound = validated_num_speculative_tokens(body.num_speculative_tokens)
    if bound and body.disable_spec_decode:
        raise InvalidParameterError(
            "disable_spec_decode", f"disable_spec_decode and num_speculative_tokens ({bound}) exclude each other"
        )
    return 0 if body.disable_spec_decode else bound


def request_seed(body: GenerationBody) -> int:
    """The request's seed in [0, 2**64), drawn where it names none."""
    return secrets.randbits(64) if body.seed is None else validated_seed(body.seed)


def _check_offered(body: GenerationBody, info: ModelInfo, settings: ApiSettings) -> None:
    """What depends on the service rather than on the value."""
    if body.exactness == "strict" and info.exactness != "strict":
        raise UnsupportedParameterError("exactness", "exactness must be fast: this service does not run with strict")
    most = settings.limits.max_logprobs
    for name, count in ((body.logprobs_name, body.num_logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if (count or 0) > most:
            raise InvalidParameterError(name, f"{name} must be at most {most} (limits.max_logprobs)")
    stops = body.stop or []
    if len(stops) > settings.limits.max_stop_strings:
        raise InvalidParameterError("stop", f"stop must hold at most {settings.limits.max_stop_strings} strings")
    if max(map(len, stops), default=0) > settings.limits.max_stop_characters:
        raise InvalidParameterError(
            "stop", f"a stop string must have at most {settings.limits.max_stop_characters} characters"
        )


def _stated(limit: int | None) -> str:
    return "at least 1" if limit is None else str(limit) if limit else "0, which takes room for 1"


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
