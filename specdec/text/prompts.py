"""Prompts as tokens: texts, token ids, conversations through the tokenizer's chat template; and bad words."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from specdec.core.errors import InvalidParameterError
from specdec.core.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, parameter: str = "prompt", *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text, with the special tokens the tokenizer adds, unless these are switched off; at least one.

    An empty text stands for the beginning of a document: the model's beginning-of-sequence token.

    Raises:
        InvalidParameterError: The text holds half a surrogate pair, or is empty and no token stands for that.
    """
    check_text(text, parameter)
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if token_ids:
        return token_ids
    if tokenizer.bos_token_id is None:
        raise InvalidParameterError(parameter, f"{parameter} must hold at least one token")
    return [tokenizer.bos_token_id]


def check_text(text: str, parameter: str) -> None:
    """Refuse text that has no UTF-8 form.

    Raises:
        InvalidParameterError: The text holds half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            parameter, f"{parameter} is not valid Unicode: half a surrogate pair at character {error.start}"
        ) from None


def check_token_ids(token_ids: Sequence[int], vocab_size: int, parameter: str = "prompt") -> None:
    """Refuse token ids that the model does not have.

    Raises:
        InvalidParameterError: There is none, or one is no integer in [0, vocab_size).
    """
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes):
        raise InvalidParameterError(
            parameter, f"{parameter} must be a text or a list of token ids, not {type(token_ids).__name__}"
        )
    if not token_ids:
        raise InvalidParameterError(parameter, f"{parameter} must hold at least one token")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for index, token in enumerate(token_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidParameterError(
                parameter, f"{parameter} holds {token!r} at index {index}; allowed are token ids 0 to {vocab_size - 1}"
            )


def encode_bad_words(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[Tokens, ...]:
    """The tokens of words, each as it stands at the beginning of a text and after a space.

    As in vLLM the form after a space counts only where it has as many tokens, and another first one: else it would
    forbid the space. A word that the model spells with other tokens is not found.

    Raises:
        InvalidParameterError: A word is empty, has no tokens, or holds half a surrogate pair.
    """
    forms: dict[Tokens, None] = {}
    for word in words:
        check_text(word, "bad_words")
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())
        )
        if not alone:
            raise InvalidParameterError("bad_words", f"bad_words holds {word!r}, which has no tokens")
        forms[alone] = None
        if spaced and len(spaced) == len(alone) and spaced[0] != alone[0]:
            forms[spaced] = None
    return tuple(forms)


def separates_special_tokens(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer writes something of its own between two special tokens."""
    special = [token for token in tokenizer.all_special_ids if token is not None][:1]
    if not special:
        return False
    one, two = (str(tokenizer.decode(special * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
    return two != one * 2


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation, up to where the assistant is to go on.

    Args:
        tokenizer: Any tokenizer of transformers.
        messages: Turns with ``role`` and ``content``, both strings, and what else templates know of them.
        chat_template: A Jinja template in place of the tokenizer's own, or the name of one of its templates.
        chat_template_kwargs: Variables for the template.
        tools: What may be called, as objects with ``type`` and ``function``.
        add_generation_prompt: End with what an answer of the assistant begins with.
        continue_final_message: End within the last message, which is to be gone on with.
        add_special_tokens: Add those that the tokenizer puts around a text to those of the template.

    Raises:
        InvalidParameterError: There is no template, the template refuses the conversation, a variable has a name that
            is not the template's to give, or what comes out is nothing, or half a surrogate pair.
    """
    variables = dict(chat_template_kwargs or {})
    reserved = _reserved_names(tokenizer)
    for name in variables:
        if name in reserved:
            raise InvalidParameterError(
                "chat_template_kwargs", f"chat_template_kwargs must not set {name!r}: it is not a template variable"
            )
    if chat_template is None and not tokenizer.chat_template:
        raise InvalidParameterError(
            "messages",
            "this model has no chat template: send chat_template, or use the completions endpoint",
            "chat_template_missing",
        )
    ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    text = _apply(tokenizer, messages, chat_template, variables | ends | ({"tools": list(tools)} if tools else {}))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise InvalidParameterError("messages", "the chat template made an empty prompt of messages")
    return token_ids


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    chat_template: str | None,
    variables: Mapping[str, Any],
) -> str:
    """The template's prompt; whatever a template raises is the conversation's or the template's fault."""
    blamed = "messages" if chat_template is None else "chat_template"
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            tokenize=False,
            **variables,
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InvalidParameterError(blamed, f"the chat template refused the conversation: {error}") from error
    check_text(text, blamed)
    return text


def _reserved_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Arguments of ``apply_chat_template`` itself, and the variables it fills."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    named = {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
    return named | {"messages"}
