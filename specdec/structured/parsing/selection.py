"""How a model's answers are written: by its chat template, or as a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.core.errors import InvalidParameterError
from specdec.core.validation import import_callable
from specdec.structured.constraints import HERMES, LLAMA3, CallForm
from specdec.structured.parsing.calls import (
    AnswerParser,
    HermesParser,
    Llama3Parser,
    ResponseTemplateParser,
    tells_reasoning,
)
from specdec.structured.parsing.reasoning import ReasoningTags
from specdec.text.detokenizer import special_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NewParser = Callable[["PreTrainedTokenizerBase", str, Sequence[Mapping[str, Any]]], AnswerParser]
"""Makes a parser for one answer, from a tokenizer, the prompt's text, and the tools as chat templates have them."""

_REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))
_OTHER_FORMS = ("<function=", "<arg_key>", "<parameter=")
"""Of templates that write something else than JSON between the tags of Hermes."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model's answers are written.

    Attributes:
        calls: How it writes calls; None where that is not known.
        new_parser: Reads answers of a free choice; None where no calls can be found in them.
        keeps_special_tokens: That parser reads the text with all special tokens.
        reasoning: Tags around its reasoning; None where it has none.
        tells_reasoning: That parser finds it.
        variables: Names in its chat template, of those that are asked for here.
    """

    calls: CallForm | None = None
    new_parser: NewParser | None = None
    keeps_special_tokens: bool = False
    reasoning: ReasoningTags | None = None
    tells_reasoning: bool = False
    variables: frozenset[str] = frozenset()

    @property
    def constrained_calls(self) -> CallForm:
        """How calls are written that a grammar forces: in any form, as all that is written is known."""
        return self.calls or HERMES

    def constrained_parser(self) -> AnswerParser:
        """Reads those."""
        return HermesParser() if self.constrained_calls == HERMES else Llama3Parser()

    def kept_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Special tokens that stand in the text that is parsed."""
        special = special_token_ids(tokenizer)
        if self.keeps_special_tokens:
            return special
        form = self.constrained_calls
        tags = {
            form.begin,
            form.end,
            form.mark,
            *((self.reasoning.begin, self.reasoning.end) if self.reasoning else ()),
        }
        names = tokenizer.added_tokens_decoder
        return frozenset(token for token in special if str(names[token]) in tags)


class AnswerForms:
    """How answers are written to prompts of one tokenizer's templates.

    Args:
        tokenizer: Its response template goes before what its chat template looks like.
        tool_parser: ``auto``, ``hermes``, ``llama3``, ``response_template``, or the import string of a ``NewParser``.
        reasoning_tags: ``auto``, ``none``, or both tags with a comma between them.

    Raises:
        InvalidParameterError: The parser cannot be had; it names ``tool_parser``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = "auto", reasoning_tags: str = "auto"
    ) -> None:
        self._tool_parser = tool_parser
        self._reasoning_tags = reasoning_tags
        self._tells_reasoning = tells_reasoning(tokenizer)
        self._new_parser: NewParser | None = None
        has_response_template = bool(getattr(tokenizer, "response_template", None))
        if ":" in tool_parser:
            self._new_parser = import_callable("tool_parser", tool_parser, may_be_class=True)
        elif tool_parser == "response_template" or (tool_parser == "auto" and has_response_template):
            if not has_response_template:
                raise InvalidParameterError("tool_parser", "tool_parser: the tokenizer has no response template")
            self._new_parser = ResponseTemplateParser
        self._known: dict[str | None, AnswerForm] = {None: self._form(_template_text(tokenizer))}

    def of(self, template: str | None) -> AnswerForm:
        """How answers to the prompts of a chat template are written; None is the tokenizer's own template."""
        form = self._known.get(template)
        return form if form is not None else self._form(template or "")

    def _form(self, template: str) -> AnswerForm:
        calls = {"hermes": HERMES, "llama3": LLAMA3}.get(self._tool_parser) or _call_form(template)
        new_parser = self._new_parser
        if new_parser is None and calls is not None:
            new_parser = _hermes if calls == HERMES else _llama3
        tells_reasoning = new_parser is ResponseTemplateParser and self._tells_reasoning
        known = frozenset(name for name in ("tools", "reasoning_effort", "enable_thinking") if name in template)
        reasoning, keeps_special_tokens = _reasoning(template, self._reasoning_tags), self._new_parser is not None
        return AnswerForm(calls, new_parser, keeps_special_tokens, reasoning, tells_reasoning, known)


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def _call_form(template: str) -> CallForm | None:
    if HERMES.begin in template:
        return None if any(other in template for other in _OTHER_FORMS) else HERMES
    looks_like_llama = all(part in template for part in ("tools", '"name": ', '"parameters": ', "dictionary"))
    return LLAMA3 if looks_like_llama else None


def _reasoning(template: str, tags: str) -> ReasoningTags | None:
    if tags == "none":
        return None
    if tags == "auto":
        return next((one for one in _REASONING_TAGS if one.end in template), None)
    begin, _, end = tags.partition(",")
    return ReasoningTags(begin.strip(), end.strip())


def _hermes(tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
    return HermesParser()


def _llama3(tokenizer: PreTrainedTokenizerBase, prompt: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
    return Llama3Parser()
