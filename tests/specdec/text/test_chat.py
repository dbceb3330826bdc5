from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec.demo
from specdec.core.errors import InvalidParameterError
from specdec.text.prompts import encode_chat

FOLDER = Path(specdec.demo.__path__[0])
ASK = [{"role": "user", "content": "Add two numbers.\n\nQuickly."}]


def test_the_demo_template_writes_turns_as_comments(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    code = "def add(a, b):\n    return a + b\n"
    turns = [{"role": "system", "content": "Be brief."}, *ASK, {"role": "assistant", "content": code}, *ASK]
    question = "# Add two numbers.\n#\n# Quickly.\n"
    assert demo_tokenizer.decode(encode_chat(demo_tokenizer, turns)) == (
        f"<|endoftext|># Be brief.\n{question}{code}\n\n{question}"
    )


def test_both_demo_models_have_the_template() -> None:
    written = [AutoTokenizer.from_pretrained(FOLDER / name).chat_template for name in ("target", "draft")]
    assert written[0]
    assert written[0] == written[1]


def test_a_template_and_its_variables_can_be_given(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ greeting }} {{ messages[0].role }}{{ '>' if add_generation_prompt }}"
    ids = encode_chat(demo_tokenizer, ASK, template, {"greeting": "hello"})
    assert demo_tokenizer.decode(ids) == "hello user>"


def test_without_a_template_the_error_says_so(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    with pytest.raises(InvalidParameterError, match="no chat template") as caught:
        encode_chat(tokenizers["wordpiece"], ASK)
    assert caught.value.code == "chat_template_missing"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "conversation", "messages", "return_tensors"])
def test_variables_cannot_reach_the_machinery(demo_tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name) as caught:
        encode_chat(demo_tokenizer, ASK, None, {name: True})
    assert caught.value.parameter == "chat_template_kwargs"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for %}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.a() }}",
    ],
)
def test_whatever_a_template_does_is_its_own_fault(demo_tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        encode_chat(demo_tokenizer, ASK, template)
    assert caught.value.parameter == "chat_template"


def test_an_empty_prompt_is_refused(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidParameterError, match="empty prompt"):
        encode_chat(demo_tokenizer, ASK, "{# nothing #}")


@pytest.mark.parametrize(
    ("template", "said", "blamed"), [("{{ '\\ud83d' }}", "x", "chat_template"), (None, "\ud83d", "messages")]
)
def test_half_a_surrogate_pair_is_refused(
    demo_tokenizer: PreTrainedTokenizerFast, template: str | None, said: str, blamed: str
) -> None:
    with pytest.raises(InvalidParameterError, match="half a surrogate pair") as caught:
        encode_chat(demo_tokenizer, [{"role": "user", "content": said}], template)
    assert caught.value.parameter == blamed
