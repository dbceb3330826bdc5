"""From the fields of a request to the parameters of its sequences."""

from __future__ import annotations

import secrets
from typing import TypeVar

from cluster.config.limits import Limits
from deployments.http.schemas.common import GenerationBody
from deployments.http.service import ApiSettings, ModelInfo, ServedModel
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.core.grammar import Grammar
from specdec.core.params import SamplingParams
from specdec.core.types import Tokens
from specdec.core.validation import validated, validated_num_speculative_tokens, validated_seed

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
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
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
        acceptance=_or(body.acceptance, info.acceptance),
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


def speculation_bound(body: GenerationBody, model: ServedModel) -> int | None:
    """The request's bound on draft tokens per round; None where it leaves that to the service.

    Raises:
        InvalidParameterError: The bound is not allowed, drafts are both asked for and switched off, or they are asked
            for of the draft itself.
    """
    bound = validated_num_speculative_tokens(body.num_speculative_tokens)
    if bound and body.disable_spec_decode:
        raise InvalidParameterError(
            "disable_spec_decode", f"disable_spec_decode and num_speculative_tokens ({bound}) exclude each other"
        )
    if bound and model.role == "draft":
        raise InvalidParameterError(
            "num_speculative_tokens", f"num_speculative_tokens must be 0 for {model.name!r}: nothing drafts for it"
        )
    return 0 if body.disable_spec_decode or model.role == "draft" else bound


def request_seed(body: GenerationBody) -> int:
    """The request's seed in [0, 2**64), drawn where it names none."""
    return secrets.randbits(64) if body.seed is None else validated_seed(body.seed)


def _check_offered(body: GenerationBody, info: ModelInfo, settings: ApiSettings) -> None:
    """What depends on the service rather than on the value."""
    if body.acceptance is not None and body.acceptance not in info.acceptance_rules:
        offered = ", ".join(info.acceptance_rules)
        raise UnsupportedParameterError("acceptance", f"acceptance must be one of: {offered}")
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
