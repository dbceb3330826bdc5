"""Kinds of fields, and what becomes of those that are not served.

Fields of other servers' and of OpenAI's bodies that are not served: two tables, by name.

A field in neither, nor in a schema, is unknown: it is ignored or refused, as the service is configured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdec.core.tokens import SharedTokens, are_ids
from specdec.core.validation import MAX_NUM_LOGIT_BIASES

REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    # vLLM and SGLang
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "top_a": (0,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "documents": ([],),
    "guided_whitespace_pattern": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "repetition_detection": (),
    # of our own, before
    "acceptance": (),
    "receipt": (False,),
    # llama.cpp: other names of what is served
    "repeat_penalty": (1,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "grammar": ("",),
    "json_schema": (),
}
"""Fields that would change the answer, each with the values that change nothing; null is always one of them."""

REPLACED: dict[str, str] = {
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "repeat_penalty": "repetition_penalty",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
    "grammar": "guided_grammar",
    "json_schema": "response_format",
}
"""Refused fields that are another server's name of a field that is served."""

REMOVED: dict[str, str] = {
    "drafters": "a sequence has one drafter; num_speculative_tokens: 0 is plain decoding",
    "acceptance": "there is one rule: a seed's text never depends on drafts",
    "receipt": "to check an answer, send its request again with the same seed",
}
"""Refused fields that were served before, and why they left."""

IGNORED: frozenset[str] = frozenset(
    {
        # OpenAI
        *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        # vLLM: they steer what is not on, or what has no effect on the answer
        *("guided_decoding_backend", "separate_reasoning"),
        *("mm_processor_kwargs", "kv_transfer_params", "vllm_xargs", "detokenize"),
    }
)
"""Fields that are ignored under every configuration: they promise nothing about the text."""

REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
}
IGNORED_IN_MESSAGES = frozenset({"annotations", "parsed"})
"""``parsed``, here and elsewhere, is what the official client's helpers have added to the answer that is sent back."""

REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "reasoning_effort": ("none",),
    "thinking_token_budget": (),
}
"""Fields of conversations alone."""
IGNORED_IN_COMPLETIONS = frozenset({"parallel_tool_calls", "include_reasoning", "prediction"})

REFUSED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    **REFUSED,
    # what only OpenAI has
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
    "access_programs": (),
    "image": (),
    # of completions and chat completions
    "messages": (),
    "reasoning_effort": (),
    "n": (1,),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_recording": (False,),
    "return_tokens_as_token_ids": (False,),
    "echo": (False,),
}
"""The same for ``/v1/responses``."""

REPLACED_IN_RESPONSES: dict[str, str] = {
    **REPLACED,
    "n_predict": "max_output_tokens",
    "n_probs": "top_logprobs",
    "json_schema": "text",
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "include",
    "reasoning_effort": "reasoning",
}

IGNORED_IN_RESPONSES = (IGNORED - {"metadata", "store"}) | {"max_tool_calls", "prediction"}


def refusal_as_text(part: Any, kind: str) -> Any:
    """Return a part of a message, a refusal as a text: a template knows it as what the assistant said."""
    if isinstance(part, dict) and part.get("type") == "refusal" and part.keys() == {"type", "refusal"}:
        return {"type": kind, "text": part["refusal"]}
    return part


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is null or one of those that change nothing; 1 and 1.0 are the same, 1 and true are not."""
    return value is None or any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


MOST_PROMPTS = 4096
MOST_STOPS = 1024
"""The configuration allows at most so many, of prompts (``limits.max_sequences``) as of stop strings."""
MOST_ITEMS = 1 << 14
"""Of a list that nothing else bounds; a body cannot have more lists and objects."""
_MOST_DEPTH = 128
_MOST_IDS = 1 << 19
"""Of a set of token ids: twice the largest vocabulary there is. How many the model has is looked at later."""


class Body(BaseModel):
    """A request body, or an object in one: a quoted number is not a number, and fields that are not served are kept.

    Those are found again by :func:`ignored_fields`.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    refused_unless: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are refused, each with the values that are taken, since they change nothing."""
    replaced: ClassVar[dict[str, str]] = REPLACED
    """Refused fields, and the field to send in their place."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are known and ignored."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_matter(cls, data: Any) -> Any:
        """Stop at the first field that is refused: a large body could have more of them than one wants to list."""
        served = _served(cls)
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in served or name in cls.ignored:
                continue
            if name in cls.refused_unless:
                _check_neutral(name, value, cls.refused_unless[name], cls.replaced.get(name))
        return data


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...], instead: str | None) -> None:
    if is_neutral(value, neutral):
        return
    but = f"; only {' or '.join(json.dumps(one) for one in neutral)} is taken" if neutral else ""
    but += f"; the field to send is {instead}" if instead else ""
    but += f"; {REMOVED[name]}" if name in REMOVED else ""
    raise PydanticCustomError("refused_field", "is not supported{but}", {"field": name, "but": but})


@cache
def _served(body: type[Body]) -> frozenset[str]:
    """Fields by the names that requests give them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def ignored_fields(body: Body, path: str = "") -> Iterator[tuple[str, bool]]:
    """Fields of a body, and of the objects in it, that have a value and no effect.

    Yields:
        Its name, with a point between levels, and whether it is a known one. A name may come several times.
    """
    for name, value in (body.model_extra or {}).items():
        is_known = name in body.ignored or name in body.refused_unless
        if value is not None or not is_known:
            yield path + name, is_known
    for name, value in body.__dict__.items():
        for part in value if isinstance(value, list) else (value,):
            if not isinstance(part, Body):
                break
            yield from ignored_fields(part, f"{path}{name}.")


def kind_of(value: Any) -> str | None:
    """What a value is, for fields that take several kinds: ``str``, ``list`` or ``dict``; None for all else."""
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "list": list, "dict": (dict, Body)}
    return next((name for name, types in kinds.items() if isinstance(value, types)), None)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in each of its four forms, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_list(value):
            return [value]
        if len(value) > MOST_PROMPTS:
            raise PydanticCustomError("many_prompts", "must hold at most {most} prompts", {"most": MOST_PROMPTS})
        if all(isinstance(item, str) or _is_token_list(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}  # a million in milliseconds


def _token_list(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise PydanticCustomError("token_ids", "must be a list of token ids")
    if not _is_token_list(value):
        place = next(place for place, item in enumerate(value) if type(item) is not int)
        raise PydanticCustomError("token_ids", "must be an integer", {"field": place})
    return value


def _token_set(value: Any) -> SharedTokens:
    if isinstance(value, list) and len(value) > _MOST_IDS:
        raise PydanticCustomError("many_ids", "must hold at most {most} token ids", {"most": _MOST_IDS})
    tokens = _token_list(value)
    if not tokens or not are_ids(tokens):
        raise PydanticCustomError("token_ids", "must be a list of token ids, at least one")
    return SharedTokens(tokens)


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is long or deep in a part of a body that has no schema."""
    level: list[Any] = [value]
    count = 0
    for _ in range(_MOST_DEPTH):
        count += sum(map(len, level))
        if count > MOST_ITEMS:
            raise PydanticCustomError("long_object", "must hold at most {most} fields and items", {"most": MOST_ITEMS})
        parts = (part for one in level for part in (one.values() if isinstance(one, dict) else one))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return value
    raise PydanticCustomError("deep_object", "must have at most {most} levels", {"most": _MOST_DEPTH})


def _bias(value: Any) -> dict[int, float]:
    """Token ids, which JSON can only write as strings, as integers."""
    if isinstance(value, dict) and len(value) > MAX_NUM_LOGIT_BIASES:
        raise PydanticCustomError("many_biases", "must hold at most {most} biases", {"most": MAX_NUM_LOGIT_BIASES})
    if not isinstance(value, dict) or not all(_is_token_key(key) and _is_finite(bias) for key, bias in value.items()):
        raise PydanticCustomError("bias_type", "must be an object with token ids, as strings, for keys, and numbers")
    return {int(key): float(bias) for key, bias in value.items()}


def _is_token_key(key: str) -> bool:
    return len(key) < 19 and key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0")


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_PROMPTS}

Integer = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenList = Annotated[Any, AfterValidator(_token_list), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]
TokenSet = Annotated[Any, AfterValidator(_token_set), WithJsonSchema({**_TOKENS, "maxItems": _MOST_IDS})]
JsonObject = Annotated[dict[str, Any], AfterValidator(_json_object)]
Prompts = Annotated[
    Any,
    AfterValidator(_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _TOKENS, {**_TEXTS, "items": _TOKENS}]}),
]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MOST_STOPS, fail_fast=True),
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MOST_STOPS}]}),
]
Bias = Annotated[
    Any,
    AfterValidator(_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
