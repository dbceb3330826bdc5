"""Checks of what a user asks for: every parameter is in its range and of its type, or refused by name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, get_args

from specdec.core.errors import InvalidParameterError
from specdec.core.grammar import Grammar, GrammarKind
from specdec.core.params import LEAST_TEMPERATURE, SamplingParams
from specdec.core.tokens import SharedTokens

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_NUM_LOGIT_BIASES = 1024
"""Each is added to each row in each step. OpenAI takes some 300."""
MAX_NUM_STOP_TOKENS = 1024
"""Each is compared with each token of a sequence. Models have some ten."""
MAX_LOGPROBS = 20
MAX_NUM_SPECULATIVE_TOKENS = 64
_MAX_COUNT = 2**31 - 1
_STOPS = "a string or a list of strings, none of them empty"
_SALTS = "a string, or a list of one for each prompt"


def import_callable(parameter: str, name: str, *, may_be_class: bool = False) -> Callable[..., Any]:
    """What an import string such as ``package.module:function`` names.

    Raises:
        InvalidParameterError: It cannot be imported or called, or is a class where that is of no use.
    """
    try:
        found: Callable[..., Any] = pkgutil.resolve_name(name)
    except Exception as error:  # the module's own code runs here, and may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InvalidParameterError(parameter, f"{parameter}: cannot import {name}: {reason}") from error
    if not callable(found) or (isinstance(found, type) and not may_be_class):
        kind = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
        text = f"{parameter}: {name} must be a function or a callable object, and is {kind}"
        raise InvalidParameterError(parameter, text)
    return found


def validated(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> SamplingParams:
    """The parameters, checked, with numbers and sequences in their declared types.

    ``top_k=-1``, which vLLM's users write for "all", becomes 0, and so does a temperature too small to differ from it.

    Args:
        params: What a user gave; fields may hold values of any type.
        vocab_size: Token ids must be below it.
        eos_token_ids: The model's end-of-sequence ids: with the stop tokens they must leave ``min_tokens`` something.

    Raises:
        InvalidParameterError: A value is not allowed; names the parameter and what is.
    """
    top_k = _integer("top_k", params.top_k, -1, _MAX_COUNT)
    temperature = _number("temperature", params.temperature, 0, MAX_TEMPERATURE)
    checked = replace(
        params,
        repetition_penalty=_number(
            "repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=_number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(params.logit_bias, vocab_size),
        allowed_token_ids=_allowed(params.allowed_token_ids, vocab_size),
        bad_words=_bad_words(params.bad_words, vocab_size),
        min_tokens=_integer("min_tokens", params.min_tokens, 0, _MAX_COUNT),
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=max(top_k, 0),
        top_p=_top_p(params.top_p),
        min_p=_number("min_p", params.min_p, 0, 1),
        stop_token_ids=_stop_tokens(params.stop_token_ids, vocab_size),
        ignore_eos=_flag("ignore_eos", params.ignore_eos),
        logprobs=_optional_integer("logprobs", params.logprobs, 0, min(MAX_LOGPROBS, vocab_size)),
        prompt_logprobs=_optional_integer("prompt_logprobs", params.prompt_logprobs, 0, min(MAX_LOGPROBS, vocab_size)),
        grammar=_grammar(params.grammar),
    )
    ending = {*checked.stop_token_ids, *(() if checked.ignore_eos else eos_token_ids)}
    possible = checked.allowed_token_ids or range(vocab_size)
    if checked.min_tokens > 0 and ending.issuperset(possible):
        _refuse("min_tokens", "0 where every token ends the text", checked.min_tokens)
    return checked


def validated_max_tokens(value: object, min_tokens: int = 0, name: str = "max_tokens") -> int:
    """The most output tokens, called ``name``: an integer of at least 1, and not below ``min_tokens``.

    Raises:
        InvalidParameterError: Otherwise.
    """
    max_tokens = _integer(name, value, 1, _MAX_COUNT)
    if max_tokens < min_tokens:
        _refuse("min_tokens", f"at most {name}, which is {max_tokens}", min_tokens)
    return max_tokens


def validated_stop(value: object) -> tuple[str, ...]:
    """Stop strings: one, or a list of them; none of them empty.

    Raises:
        InvalidParameterError: Otherwise.
    """
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        _refuse("stop", _STOPS, value)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            _refuse("stop", _STOPS, stop)
    return tuple(stops)


def validated_cache_salts(value: object, num_prompts: int) -> tuple[str, ...]:
    """A salt for each prompt: one that holds for all, or a list of as many.

    Raises:
        InvalidParameterError: Otherwise.
    """
    salts = [value] * num_prompts if isinstance(value, str) else value
    if not isinstance(salts, (list, tuple)) or len(salts) != num_prompts:
        _refuse("cache_salt", _SALTS, value)
    for salt in salts:
        if not isinstance(salt, str):
            _refuse("cache_salt", _SALTS, salt)
    return tuple(salts)


def validated_seed(value: object) -> int:
    """The seed as a number in [0, 2**64): any integer, taken modulo 2**64.

    Raises:
        InvalidParameterError: It is not an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        _refuse("seed", "an integer", value)
    return value % 2**64


def validated_num_speculative_tokens(value: object, parameter: str = "num_speculative_tokens") -> int | None:
    """A request's bound on draft tokens per round: an integer from 0 to 64, or None.

    Raises:
        InvalidParameterError: Otherwise.
    """
    return _optional_integer(parameter, value, 0, MAX_NUM_SPECULATIVE_TOKENS)


def _refuse(parameter: str, allowed: str, value: object) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise InvalidParameterError(parameter, f"{parameter} must be {allowed}, not {shown}")


# Booleans are integers to Python, but not to a client: each check below refuses them.
def _number(parameter: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        _refuse(parameter, f"a number from {low:g} to {high:g}", value)
    return float(value)


def _integer(parameter: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        allowed = f"an integer of at least {low}" if high == _MAX_COUNT else f"an integer from {low} to {high}"
        _refuse(parameter, allowed, value)
    return value


def _optional_integer(parameter: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(parameter, value, low, high)


def _flag(parameter: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(parameter, "true or false", value)
    return value


def _grammar(value: object) -> Grammar | None:
    if value is not None and not (isinstance(value, Grammar) and value.kind in get_args(GrammarKind)):
        _refuse("grammar", f"None or a Grammar of a kind among {', '.join(get_args(GrammarKind))}", value)
    return value


def _top_p(value: object) -> float:
    top_p = _number("top_p", value, 0, 1)
    if top_p == 0:
        _refuse("top_p", "above 0 and at most 1", value)
    return top_p


def _token_ids(parameter: str, values: object, vocab_size: int) -> tuple[int, ...]:
    allowed = f"a list of token ids from 0 to {vocab_size - 1}"
    if not isinstance(values, (list, tuple)):
        _refuse(parameter, allowed, values)
    for value in values:
        if not _is_token(value, vocab_size):
            _refuse(parameter, allowed, value)
    return tuple(values)


def _stop_tokens(values: object, vocab_size: int) -> tuple[int, ...]:
    if isinstance(values, (list, tuple)) and len(values) > MAX_NUM_STOP_TOKENS:
        _refuse("stop_token_ids", f"at most {MAX_NUM_STOP_TOKENS} token ids", len(values))
    tokens = _token_ids("stop_token_ids", values, vocab_size)
    if len(set(tokens)) < len(tokens):
        _refuse("stop_token_ids", "token ids that differ", values)
    return tokens


def _allowed(values: object, vocab_size: int) -> SharedTokens:
    if isinstance(values, (list, tuple, SharedTokens)) and len(values) > vocab_size:
        _refuse("allowed_token_ids", f"at most {vocab_size} token ids, as many as there are", len(values))
    if not isinstance(values, SharedTokens):
        return SharedTokens(_token_ids("allowed_token_ids", values, vocab_size))
    if not all(0 <= token < vocab_size for token in (values.tokens.min(initial=0), values.tokens.max(initial=0))):
        _token_ids("allowed_token_ids", list(values), vocab_size)
    return values


def _bad_words(words: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    allowed = "lists of token ids, none of them empty"
    if not isinstance(words, (list, tuple)):
        _refuse("bad_words", allowed, words)
    for word in words:
        if not isinstance(word, (list, tuple)) or not word:
            _refuse("bad_words", allowed, word)
    return tuple(dict.fromkeys(_token_ids("bad_words", word, vocab_size) for word in words))


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _logit_bias(pairs: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    allowed = "pairs of a token id and a bias"
    if not isinstance(pairs, (list, tuple)):
        _refuse("logit_bias", allowed, pairs)
    if len(pairs) > MAX_NUM_LOGIT_BIASES:
        _refuse("logit_bias", f"at most {MAX_NUM_LOGIT_BIASES} biases", len(pairs))
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            _refuse("logit_bias", allowed, pair)
        token = pair[0]
        if not _is_token(token, vocab_size):
            _refuse("logit_bias", f"biases of token ids from 0 to {vocab_size - 1}", token)
        if token in biases:
            _refuse("logit_bias", "one bias per token id", pair)
        biases[token] = _number("logit_bias", pair[1], -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return tuple(biases.items())
