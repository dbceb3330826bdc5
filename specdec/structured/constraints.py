"""Grammars of answers with tool calls and reasoning, in the form in which a template has them written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.grammar import Grammar, llguidance_grammar, on_one_line
from specdec.structured.parsing.reasoning import ReasoningTags

MOST_CALLS = 16
"""Calls in one answer, where more than one may be: each could be followed by another without end."""
_TEXT = r"TEXT: /(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        is_strict: Its arguments are by that schema under any choice of tools.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written.

    Attributes:
        begin: Tag before each call; empty where a call is a whole answer's beginning.
        end: Tag after each.
        key: Of the arguments.
        around: Between a tag and the call's JSON.
        between: Stands between two calls.
        mark: Tag that may stand before all calls.
    """

    begin: str
    end: str
    key: str
    around: str
    between: str
    mark: str = ""


HERMES = CallForm("<tool_call>", "</tool_call>", "arguments", "\n", "\n")
LLAMA3 = CallForm("", "", "parameters", "", "; ", "<|python_tag|>")


class Tags:
    """How tags are written in a grammar: those that are tokens of their own are nothing else.

    Args:
        token_ids: Of texts that are single tokens and cannot be written otherwise.
        eos_token_ids: Tokens that end an answer.

    Attributes:
        names: Those texts.
    """

    def __init__(self, token_ids: Mapping[str, int], eos_token_ids: Sequence[int] = ()) -> None:
        self._token_ids = token_ids
        self._eos = "".join(f",{token}" for token in eos_token_ids)
        self.names = frozenset(token_ids)

    def is_token(self, tag: str) -> bool:
        """Whether a tag is a token of its own."""
        return tag in self._token_ids

    def written(self, tag: str) -> str:
        """A tag, as a part of a rule."""
        return f"<[{self._token_ids[tag]}]>" if tag in self._token_ids else _literal(tag)

    def without(self, tag: str, or_end: bool = False) -> str:
        """Any token but a tag; none that ends the answer, unless ``or_end``."""
        return f"<[^{self._token_ids[tag]}{'' if or_end else self._eos}]>"


def only_calls(form: CallForm, tools: Sequence[Tool], several: bool, tags: Tags) -> Grammar:
    """An answer that is one call, or several, each by the schema of its tool."""
    return _composed(f"start: calls\n{_calls(form, tools, several, tags, any_arguments=False)}")


def text_or_calls(
    form: CallForm, tools: Sequence[Tool], several: bool, tags: Tags, content: Grammar | None = None
) -> Grammar:
    """An answer in which what begins like a call is one.

    Arguments are any JSON object, and those of strict tools by their schemas.

    Args:
        form: How calls are written.
        tools: Those that may be called.
        several: Whether there may be several calls.
        tags: How tags are written.
        content: What an answer without calls must match; None allows anything.

    Raises:
        ValueError: A call could not be distinguished from such content, or the content's grammar is wrong.
    """
    calls, most = _calls(form, tools, several, tags, any_arguments=True), MOST_CALLS if several else 1
    if not form.begin:
        if content is not None:
            raise ValueError("this model's tool calls cannot be distinguished from other JSON")
        mark = f"{tags.written(form.mark)}? " if tags.is_token(form.mark) else ""
        return _composed(f"start: | CONTENT | {mark}calls\nCONTENT: /[ \\n]*[^ \\n{{](.|\\n)*/\n{calls}")
    if content is not None:
        return _composed(f"start: @content | calls\n{calls}", tags, content=content)
    if tags.is_token(form.begin):
        free = f"{tags.without(form.begin, or_end=True)}*"
        return _composed(f"start: free (call free){{0,{most}}}\nfree: {free}\n{calls}")
    head = f"head[lazy]: /(.|\\n)*{_escaped(form.begin)}/"
    return _composed(f"start: (head call_rest){{0,{most}}} TEXT\n{head}\n{_TEXT}\n{calls}")


def after_reasoning(
    reasoning: ReasoningTags, has_begun: bool, most_tokens: int | None, tags: Tags, answer: Grammar
) -> Grammar:
    """Reasoning, and then an answer that matches its grammar from its own first token on.

    Args:
        reasoning: Its tags.
        has_begun: The prompt ends within the reasoning; else an answer may begin without any.
        most_tokens: Most tokens of it; None is any number.
        tags: How tags are written.
        answer: What follows; line ends may stand before it.

    Raises:
        ValueError: Tokens are to be counted, and the tags are not tokens; or the answer's grammar is wrong.
    """
    if tags.is_token(reasoning.end):
        rules = f"thought: {_thought(reasoning, most_tokens, tags)} {tags.written(reasoning.end)}"
    elif most_tokens is None:
        rules = f"thought[lazy]: /(.|\\n)*{_escaped(reasoning.end)}/"
    else:
        raise ValueError(f"tokens of reasoning cannot be counted: {reasoning.end} is not one token of this model")
    first = "thought LINES?" if has_begun else f"({tags.written(reasoning.begin)} thought LINES?)?"
    return _composed(f"start: {first} @answer\n{rules}\nLINES: /\\n{{1,2}}/", tags, answer=answer)


def short_reasoning(reasoning: ReasoningTags, has_begun: bool, most_tokens: int, tags: Tags) -> Grammar:
    """Any answer whose reasoning has a bounded number of tokens.

    Raises:
        ValueError: The tags are not tokens, and nothing can be counted.
    """
    for tag in (reasoning.end,) if has_begun else (reasoning.begin, reasoning.end):
        if not tags.is_token(tag):
            raise ValueError(f"tokens of reasoning cannot be counted: {tag} is not one token of this model")
    # An answer may end within its reasoning, but where that is as long as it may be the tag comes.
    ended = f"| {_thought(reasoning, most_tokens - 1, tags)}" if most_tokens else ""
    rules = f"thought: {_thought(reasoning, most_tokens, tags)} {tags.written(reasoning.end)} <[*]>* {ended}"
    if has_begun:
        return _composed(f"start: thought\n{rules}")
    other = f"({tags.without(reasoning.begin, or_end=True)} <[*]>*)?"
    return _composed(f"start: {tags.written(reasoning.begin)} thought | other\nother: {other}\n{rules}")


def _thought(reasoning: ReasoningTags, most_tokens: int | None, tags: Tags) -> str:
    if most_tokens == 0:
        return ""
    return tags.without(reasoning.end) + ("*" if most_tokens is None else f"{{0,{most_tokens}}}")


def _calls(form: CallForm, tools: Sequence[Tool], several: bool, tags: Tags, any_arguments: bool) -> str:
    """The rules ``calls``, ``call`` and ``call_rest``: what follows a call's first tag, for each tool."""
    more = f" ({_literal(form.between)} call){{0,{MOST_CALLS - 1}}}" if several else ""
    begin, end = (f" {tags.written(tag)}" if tag else "" for tag in (form.begin, form.end))
    rules = [
        f"calls: call{more}",
        f"call:{begin} call_rest",
        f"call_rest: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
    ]
    for i, tool in enumerate(tools):
        name, key = json.dumps(tool.name, ensure_ascii=False), json.dumps(form.key)
        head, brace = _literal(f'{form.around}{{"name": {name}, {key}: '), _literal(f"}}{form.around}")
        schema = {"type": "object"} if any_arguments and not tool.is_strict else tool.parameters
        rules.append(f"call_{i}: {head} %json {json.dumps(on_one_line(schema))} {brace}{end}")
    return "\n".join(rules)


def _composed(rules: str, tags: Tags | None = None, **parts: Grammar) -> Grammar:
    """Rules in Lark's syntax, and the grammars that they take by name."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": f"%llguidance {{}}\n{rules}\n"}]
    for name, part in parts.items():
        text = llguidance_grammar(part, tags.names if tags is not None else frozenset())
        first, *others = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
        grammars += [first | {"name": name}, *others]
    return Grammar("llguidance", json.dumps({"grammars": grammars}))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(tag: str) -> str:
    return re.escape(tag).replace("/", "\\/")
