"""What a request asks of the service: its prompts and its sequences.

Prompts as the beginning of an answer.

OpenAI's Predicted Outputs: a text that the answer is expected to be like, to draft from.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deployments.http.api import Api
from deployments.http.assistant import Assistant, checked_grammar
from deployments.http.conversation import conversation_tokens
from deployments.http.request_context import RequestContext
from deployments.http.sampling import (
    check_prompt_logprobs,
    output_limit,
    request_seed,
    sampling_params,
    speculation_bound,
)
from deployments.http.schemas.chat import ChatBody, CompletionBody
from deployments.http.schemas.common import GenerationBody
from deployments.http.service import SequenceRequest, ServedModel
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.core.grammar import Grammar
from specdec.core.params import SequenceSpec
from specdec.core.tokens import NO_TOKENS, SharedTokens
from specdec.core.types import Tokens
from specdec.sampling.philox import derive_seed
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
    if not text or speculation_bound(body, model) == 0:
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
            "n" if num_prompts <= most else "prompt", f"prompts times n must be at most {most} sequences"
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
    if context.stats.reservation is not None:
        lengths = (len(prompt) + len(prediction) + limit for prompt, limit in zip(prompts, limits, strict=True))
        context.stats.reservation.add_tokens(sum(lengths) * (body.n or 1))
    seed, name, num_samples = request_seed(body), uuid.uuid4().hex, body.n or 1
    bound = speculation_bound(body, model)
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
                request_id=context.label,
                trace=context.trace,
                num_speculative_tokens=bound,
                prediction=prediction,
                wants_times=body.wants_speculation,
                cache_salt=context.cache_salt(body.cache_salt) or "",
                model=model.role,
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
        stops=tuple(body.stop or ()),
        num_speculative_tokens=info.num_speculative_tokens if bound is None else bound,
        fingerprint=model.fingerprint,
    )
