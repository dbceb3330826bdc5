"""What tests of texts, tools and reasoning share."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specdec.demo


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")
