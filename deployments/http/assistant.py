"""How a conversation's answer is read and what it must match: tools, reasoning, structured output, together.

From the fields that ask for structured output to a grammar, by each of their names.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from deployments.http.api import Api
from deployments.http.conversation import template_of, written_tool
from deployments.http.schemas.chat import ChatBody
from deployments.http.schemas.common import GenerationBody
from specdec.core.errors import InvalidParameterError, UnsupportedParameterError
from specdec.core.grammar import Grammar, GrammarKind
from specdec.core.types import Tokens
from specdec.structured.constraints import Tags, Tool, after_reasoning, only_calls, short_reasoning, text_or_calls
from specdec.structured.parsing.calls import AnswerParser, PlainParser
from specdec.structured.parsing.reasoning import ReasoningCounter, ReasoningParser, WithoutReasoning
from specdec.structured.parsing.selection import AnswerForm

_OF_JSON_SCHEMA = frozenset({"name", "description", "schema", "strict"})
_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's names."""
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""What else vLLM's ``structured_outputs`` may say: here there is one way to write JSON."""


class AskedGrammar(NamedTuple):
    """A grammar, and the field that asks for it."""

    param: str
    grammar: Grammar


def asked_grammar(body: GenerationBody) -> AskedGrammar | None:
    """What the output must match; None where it may be anything.

    Raises:
        InvalidParameterError: A field is not as it should be, or two ask for something.
        UnsupportedParameterError: It asks for what is not to be had.
    """
    asked = [*_response_format(body.response_format or {}), *_structured_outputs(body.structured_outputs or {})]
    for kind in ("json", "json_object", "regex", "choice", "grammar"):
        name = f"guided_{kind}"
        grammar = _grammar(name, kind, getattr(body, name))
        if grammar is not None:
            asked.append(AskedGrammar(name, grammar))
    if len(asked) > 1:
        raise InvalidParameterError(asked[1].param, f"{asked[0].param} and {asked[1].param} exclude each other")
    return asked[0] if asked else None


async def checked_grammar(api: Api, body: GenerationBody) -> Grammar | None:
    """What the output must match, compiled, beside the event loop, so that the request is refused where it cannot be.

    Raises:
        InvalidParameterError: As :func:`asked_grammar` says, or it cannot be compiled; it names the field.
    """
    asked = asked_grammar(body)
    if asked is None:
        return None
    await check_compiled(api, asked, api.model(body.model).eos_token_ids)
    return asked.grammar


async def check_compiled(api: Api, asked: AskedGrammar, eos_token_ids: Tokens) -> None:
    """Compile a grammar beside the event loop, for a model whose texts end with these tokens.

    Raises:
        InvalidParameterError: It cannot be compiled; it names the field.
        ServiceUnavailableError: It cannot be tried now.
    """
    with api.grammars.awaited(asked.grammar, eos_token_ids) as compiled:
        try:
            await asyncio.shield(asyncio.wrap_future(compiled))  # others may wait for the same
        except InvalidParameterError as error:
            raise InvalidParameterError(asked.param, f"{asked.param}: {error}") from error


def _response_format(asked: dict[str, Any]) -> Iterator[AskedGrammar]:
    param = "response_format"
    match asked.get("type") if asked else "text":
        case "text":
            return
        case "json_object":
            yield AskedGrammar(param, Grammar("json_object"))
        case "json_schema":
            inner = asked.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                raise InvalidParameterError(
                    f"{param}.json_schema", f'{param}.json_schema must be an object with a "schema", an object'
                )
            unknown = next((name for name in inner if name not in _OF_JSON_SCHEMA), None)
            if unknown is not None:
                name = f"{param}.json_schema.{unknown[:64]}"
                raise InvalidParameterError(name, f"unknown field {name!r}", "unknown_parameter")
            if not isinstance(inner.get("strict"), bool | None):
                raise InvalidParameterError(
                    f"{param}.json_schema.strict", f"{param}.json_schema.strict must be true or false"
                )
            yield AskedGrammar(f"{param}.json_schema.schema", Grammar("json_schema", json.dumps(inner["schema"])))
        case "structural_tag":
            yield AskedGrammar(param, Grammar("structural_tag", json.dumps(asked)))
        case _:
            kinds = "text, json_object, json_schema or structural_tag"
            raise InvalidParameterError(f"{param}.type", f"{param}.type must be one of {kinds}")


def _structured_outputs(asked: dict[str, Any]) -> Iterator[AskedGrammar]:
    for name, value in asked.items():
        param = f"structured_outputs.{name[:64]}"
        if name in _KINDS:
            grammar = _grammar(param, name, value)
            if grammar is not None:
                yield AskedGrammar(param, grammar)
        elif name in _OPTIONS:
            if value is not None and value is not False:
                raise UnsupportedParameterError(param, f"{param} is not supported", "unsupported_parameter")
        elif name != "disable_fallback":
            raise InvalidParameterError(param, f"unknown field {param!r}", "unknown_parameter")


def _grammar(param: str, kind: str, value: Any) -> Grammar | None:
    """A grammar of one of vLLM's kinds; None for what asks for nothing."""
    if value is None or (not value and kind not in ("json", "structural_tag")):
        return None
    if kind == "json_object":
        if value is not True:
            raise InvalidParameterError(param, f"{param} must be true or false")
        return Grammar("json_object")
    if kind in ("regex", "grammar") and not isinstance(value, str):
        raise InvalidParameterError(param, f"{param} must be a string")
    return Grammar(_KINDS[kind], value if isinstance(value, str) and kind != "choice" else json.dumps(value))


_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a tool that names none."""
_MOST_TAG_TOKENS = 32
"""At a prompt's end, where a tag is looked for."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a conversation's choices are read.

    Attributes:
        new_parser: Makes what reads one choice.
        kept: Special tokens that stand in the text that it reads.
        new_counter: Makes what counts the tokens of one choice's reasoning; None where there is none.
    """

    new_parser: Callable[[], AnswerParser] = PlainParser
    kept: frozenset[int] = frozenset()
    new_counter: Callable[[], ReasoningCounter] | None = None


class Assistant:
    """What the assistant says in answer to one request.

    Args:
        api: The parts of the API.
        body: Of the request.
        prompt: Its tokens.

    Raises:
        InvalidParameterError: What is asked for together cannot be had; it names the field.
    """

    def __init__(self, api: Api, body: ChatBody, prompt: Tokens) -> None:
        self._api = api
        self._body = body
        self._prompt = prompt
        self._form: AnswerForm = api.answers.of(template_of(api, body))
        self._is_free = body.choice == "auto"
        self._tools = self._callable_tools()
        self._check_form()

    def reading(self) -> Reading:
        """How the answer is read."""
        reasoning = self._form.reasoning
        if reasoning is None and not self._tools:
            return Reading()
        form, has_begun, hides = self._form, self._has_begun, self._body.include_reasoning is False

        def new_parser() -> AnswerParser:
            parser: AnswerParser = self._new_tool_parser() if self._tools else PlainParser()
            if reasoning is not None and not (self._tools and self._is_free and form.tells_reasoning):
                parser = ReasoningParser(reasoning, has_begun, parser)
            return WithoutReasoning(parser) if hides else parser

        def new_counter() -> ReasoningCounter:
            assert reasoning is not None
            return ReasoningCounter(reasoning, has_begun, self._api.texts.utf8)

        kept = form.kept_token_ids(self._api.tokenizer)
        return Reading(new_parser, kept, new_counter if reasoning is not None else None)

    async def grammar(self) -> Grammar | None:
        """What the answer must match, compiled; None where it may be anything.

        Raises:
            InvalidParameterError: It cannot be compiled; it names the field.
        """
        asked = asked_grammar(self._body)
        content = asked.grammar if asked is not None else None

        def compose() -> Grammar | None:
            return self._with_reasoning(self._with_tools(asked) if self._tools else content, asked)

        num_characters = len(content.text) if content is not None else 0
        grammar = await self._api.encode(num_characters + self._num_tool_characters, compose)
        if grammar is None:
            return None
        try:
            await check_compiled(self._api, AskedGrammar("grammar", grammar), self._eos_token_ids)
        except InvalidParameterError as error:
            for part in [*([asked] if asked is not None else []), *self._schemas()]:
                await check_compiled(self._api, part, self._eos_token_ids)
            raise InvalidParameterError("tools" if self._tools else "messages", str(error)) from error
        return grammar

    def _callable_tools(self) -> list[Tool]:
        """The tools that the answer may call."""
        return [
            Tool(
                spec.name,
                _NOTHING if spec.parameters is None else {"type": "object"} | spec.parameters,
                bool(spec.strict),
            )
            for spec in (tool.function for tool in self._body.callable_tools)
        ]

    def _check_form(self) -> None:
        """Refuse what the form of the model's answers does not allow."""
        form = self._form
        if self._tools and self._is_free and form.new_parser is None:
            known = "tools" in form.variables
            reason = (
                "it is not known how this model writes calls" if known else "this model's chat template has no tools"
            )
            raise UnsupportedParameterError(
                "tools", f"tools: {reason}; only tool_choice required, or one that names a function, is supported"
            )
        if self._tools and self._is_free and form.calls is None and len(self._tools) < len(self._body.tools or ()):
            raise UnsupportedParameterError(
                "tool_choice",
                "tool_choice: allowed_tools is not supported: it is not known how this model writes calls",
            )
        strict = next((i for i, tool in enumerate(self._tools) if tool.is_strict), None)
        if strict is not None and self._is_free and form.calls is None:
            param = f"tools[{strict}].function.strict"
            raise UnsupportedParameterError(
                param, f"{param} is not supported: it is not known how this model writes calls"
            )
        if self._body.thinking_token_budget is not None and form.reasoning is None:
            raise UnsupportedParameterError(
                "thinking_token_budget", "thinking_token_budget is not supported: this model has no reasoning"
            )

    def _new_tool_parser(self) -> AnswerParser:
        if not self._is_free or self._form.new_parser is None:
            return self._form.constrained_parser()
        tokenizer = self._api.tokenizer
        return self._form.new_parser(tokenizer, self._prompt_text, [written_tool(t) for t in self._body.tools or ()])

    def _with_tools(self, asked: AskedGrammar | None) -> Grammar | None:
        several = self._body.parallel_tool_calls is not False and self._body.choice != "named"
        content = asked.grammar if asked is not None else None
        try:
            if not self._is_free:
                return only_calls(self._form.constrained_calls, self._tools, several, self._tags)
            if self._form.calls is not None:
                return text_or_calls(self._form.calls, self._tools, several, self._tags, content)
        except ValueError as error:
            raise _refused(asked, error) from error
        if asked is not None:
            raise UnsupportedParameterError(
                asked.param, f"{asked.param} is not supported with tools: it is not known how this model writes calls"
            )
        return None

    def _with_reasoning(self, answer: Grammar | None, asked: AskedGrammar | None) -> Grammar | None:
        reasoning, budget = self._form.reasoning, self._body.thinking_token_budget
        if budget is not None:
            budget = min(budget, self._api.model(self._body.model).max_model_len)
        if reasoning is None or self._has_ended or (answer is None and budget is None):
            return answer
        try:
            if answer is None and budget is not None:
                return short_reasoning(reasoning, self._has_begun, budget, self._tags)
            assert answer is not None
            return after_reasoning(reasoning, self._has_begun, budget, self._tags, answer)
        except ValueError as error:
            if budget is not None:
                raise UnsupportedParameterError("thinking_token_budget", f"thinking_token_budget: {error}") from error
            raise _refused(asked, error) from error

    def _schemas(self) -> Sequence[AskedGrammar]:
        """Each tool's schema by itself, where it is kept to: to find the one that cannot be compiled."""
        names = {tool.name: tool for tool in self._tools if tool.is_strict or not self._is_free}
        return [
            AskedGrammar(
                f"tools[{i}].function.parameters",
                Grammar("json_schema", json.dumps(names[spec.function.name].parameters)),
            )
            for i, spec in enumerate(self._body.tools or ())
            if spec.function.name in names
        ]

    @cached_property
    def _tags(self) -> Tags:
        return Tags(self._api.tokenizer.get_added_vocab(), self._eos_token_ids)

    @property
    def _eos_token_ids(self) -> Tokens:
        return self._api.model(self._body.model).eos_token_ids

    @property
    def _num_tool_characters(self) -> int:
        return sum(len(json.dumps(tool.parameters)) for tool in self._tools)

    @cached_property
    def _prompt_text(self) -> str:
        text: str = self._api.tokenizer.decode(self._prompt, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _prompt_end(self) -> str:
        text: str = self._api.tokenizer.decode(self._prompt[-_MOST_TAG_TOKENS:], clean_up_tokenization_spaces=False)
        return text.rstrip()

    @property
    def _has_begun(self) -> bool:
        """Whether the prompt ends within reasoning: by the template, or within the message that is gone on with."""
        reasoning = self._form.reasoning
        if reasoning is None:
            return False
        last = self._body.messages[-1].text if self._body.continue_final_message else ""
        return self._prompt_end.endswith(reasoning.begin) or last.rfind(reasoning.begin) > last.rfind(reasoning.end)

    @property
    def _has_ended(self) -> bool:
        """Whether the prompt ends with the end of reasoning: the template does so where there shall be none."""
        return self._form.reasoning is not None and self._prompt_end.endswith(self._form.reasoning.end)


def _refused(asked: AskedGrammar | None, error: ValueError) -> InvalidParameterError:
    param = asked.param if asked is not None else "tools"
    return InvalidParameterError(param, f"{param}: {error}")
