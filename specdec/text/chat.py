"""Conversations as prompts, through the tokenizer's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from specdec.core.errors import InvalidParameterError
from specdec.text.prompts import check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
