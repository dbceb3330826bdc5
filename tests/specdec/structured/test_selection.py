"""What a chat template shows of how answers are written; the templates' words are those of known models."""

from __future__ import annotations

from copy import deepcopy

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.core.errors import InvalidParameterError
from specdec.structured.constraints import HERMES, LLAMA3, CallForm
from specdec.structured.parsing.calls import HermesParser, Llama3Parser, ResponseTemplateParser
from specdec.structured.parsing.reasoning import ReasoningTags
from specdec.structured.parsing.selection import AnswerForms

THINK = ReasoningTags("<think>", "</think>")
QWEN = (
    "{%- if tools %}For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, '
    '\\"arguments\\": <args-json-object>}'
    "\\n</tool_call>{% endif %}"
)
THINKING = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\\n\\n</think>\\n\\n{%- endif %}"
QWEN_CODER = "{%- if tools %}<tool_call>\\n<function=example_function_name>\\n<parameter=a>\\n</tool_call>{% endif %}"
GLM = "{%- if tools %}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n</tool_call>{% endif %}</think>"
LLAMA = (
    "{%- if tools is not none %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
)
MISTRAL = (
    '{%- if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [{"name": , "arguments": }]'
    "{%- if reasoning_effort %}[THINK]a[/THINK]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning", "variables"),
    [
        (QWEN, HERMES, None, {"tools"}),
        (QWEN + THINKING, HERMES, THINK, {"tools", "enable_thinking"}),
        (QWEN_CODER, None, None, {"tools"}),
        (GLM, None, THINK, {"tools"}),
        (LLAMA, LLAMA3, None, {"tools"}),
        (MISTRAL, None, ReasoningTags("[THINK]", "[/THINK]"), {"tools", "reasoning_effort"}),
        ("{{ messages[0].content }}", None, None, set()),
    ],
)
def test_the_template_shows_it(
    demo_tokenizer: PreTrainedTokenizerFast,
    template: str,
    calls: CallForm | None,
    reasoning: ReasoningTags | None,
    variables: set[str],
) -> None:
    own = deepcopy(demo_tokenizer)
    own.chat_template = template
    for form in (AnswerForms(own).of(None), AnswerForms(demo_tokenizer).of(template)):
        assert (form.calls, form.reasoning, form.variables) == (calls, reasoning, variables)
        assert (form.new_parser is None) == (calls is None)
        assert isinstance(form.constrained_parser(), Llama3Parser if calls == LLAMA3 else HermesParser)
    own.chat_template = {"default": "{{ messages }}", "tool_use": template}
    assert AnswerForms(own).of(None).calls == calls


def test_a_tokenizers_response_template_goes_before_it(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    own = deepcopy(demo_tokenizer)
    own.response_template = {"start_anchor": "a", "fields": {"content": {}}}
    assert AnswerForms(own).of(QWEN).new_parser is ResponseTemplateParser
    assert AnswerForms(own, "hermes").of(LLAMA).new_parser is not ResponseTemplateParser
    with pytest.raises(InvalidParameterError, match="no response template"):
        AnswerForms(demo_tokenizer, "response_template")


def test_keys_go_before_templates(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    assert AnswerForms(demo_tokenizer, "llama3").of(QWEN).calls == LLAMA3
    assert AnswerForms(demo_tokenizer, "hermes").of(LLAMA).calls == HERMES
    assert AnswerForms(demo_tokenizer, reasoning_tags="none").of(GLM).reasoning is None
    assert AnswerForms(demo_tokenizer, reasoning_tags="<a>, </a>").of("").reasoning == ReasoningTags("<a>", "</a>")
