"""The public engine takes every parameter in its range and of its type, or refuses it by name."""

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec import ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.errors import InvalidParameterError, ModelLoadError
from tests.specdec.checkpoints import WITH_GAPS, save_checkpoint

WORDS = ((WITH_GAPS["a"], 100.0), (WITH_GAPS["b"], 100.0))
"""Biases that leave only these two to choose."""
GREEDY = SamplingParams(temperature=0.0, logit_bias=WORDS)
PROMPT = "a b a"
END = WITH_GAPS["<end>"]


def engine_of(target: Path, draft: Path | None = None) -> SpeculativeEngine:
    sources = [None if folder is None else ModelSource(str(folder), device="cpu") for folder in (target, draft)]
    assert sources[0] is not None
    return SpeculativeEngine.from_pretrained(sources[0], sources[1], num_speculative_tokens=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    values = {"temperature": 0.4, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 7}
    return save_checkpoint(folder, no_repeat_ngram_size=2, **values)


@pytest.fixture(scope="module")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeEngine:
    return engine_of(target, save_checkpoint(tmp_path_factory.mktemp("draft"), seed=1))


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 4, "sampling": SamplingParams(min_tokens=5)}, "min_tokens"),
        ({"sampling": SamplingParams(min_tokens=8)}, "min_tokens"),
        ({"sampling": SamplingParams(temperature="1")}, "temperature"),  # type: ignore[arg-type]
        ({"sampling": SamplingParams(logit_bias=((10, 1.0),))}, "logit_bias"),
        ({"sampling": {"temperature": 0}}, "sampling"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": ["a", "b"]}, "cache_salt"),
        ({"cache_salt": [3]}, "cache_salt"),
        ({"seed": True}, "seed"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"prompt": [1, 10]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": b"a"}, "prompt"),
    ],
)
def test_what_is_not_allowed_is_refused_by_name(
    engine: SpeculativeEngine, options: dict[str, Any], parameter: str
) -> None:
    arguments = {"prompt": PROMPT} | options
    with pytest.raises(InvalidParameterError, match=parameter) as caught:
        engine.generate(**arguments)
    assert caught.value.parameter == parameter
    with pytest.raises(InvalidParameterError):
        engine.stream(**arguments)


def test_a_text_is_not_a_list_of_prompts(engine: SpeculativeEngine) -> None:
    with pytest.raises(InvalidParameterError, match="prompts must be a list of texts"):
        engine.generate_batch(PROMPT)


def test_an_engines_own_draft_length_is_checked(target: Path) -> None:
    with pytest.raises(InvalidParameterError, match="num_speculative_tokens must be an integer from 0 to 64"):
        SpeculativeEngine.from_pretrained(ModelSource(str(target), device="cpu"), num_speculative_tokens=-1)


def test_a_string_is_one_stop_string(engine: SpeculativeEngine) -> None:
    sampling = SamplingParams(temperature=2.0, logit_bias=WORDS)
    whole = engine.generate(PROMPT, sampling, seed=2, max_tokens=30).text
    assert set(whole) == {"a", "b"}
    stop = whole[5:9]
    cut = engine.generate(PROMPT, sampling, seed=2, max_tokens=30, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole.split(stop)[0], "stop")


def test_the_models_own_defaults_hold_where_nothing_is_said(engine: SpeculativeEngine) -> None:
    defaults = SamplingParams(temperature=0.4, top_k=5, top_p=0.9, repetition_penalty=1.2)
    assert engine.default_sampling == defaults
    for seed in range(4):
        result = engine.generate(PROMPT, seed=seed)
        assert result.token_ids == engine.generate(PROMPT, defaults, seed=seed).token_ids
        assert len(result.token_ids) <= 7
    forever = SamplingParams(temperature=0.4, ignore_eos=True)
    assert len(engine.generate(PROMPT, forever).token_ids) == 7
    assert len(engine.generate(PROMPT, forever, max_tokens=9).token_ids) == 9
    assert len(engine.generate([1] * 60, forever).token_ids) == 4


def test_what_is_not_honoured_is_in_the_log(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine_of(target)
    assert f"the generation config of {target} sets no_repeat_ngram_size: not honoured here" in caplog.text


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_log_probabilities_come_with_the_tokens(engine: SpeculativeEngine, num_speculative_tokens: int) -> None:
    sampling = SamplingParams(temperature=1.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    options = {"seed": 3, "max_tokens": 12, "num_speculative_tokens": num_speculative_tokens}
    result = engine.generate(PROMPT, sampling, **options)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids) == 12
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.logprob < 0
        assert len(entry.top) == 2
        assert entry.rank > 2 or entry.top[entry.rank - 1] == (token, entry.logprob)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [len(entry.top) for entry in result.prompt_logprobs[1:] if entry is not None] == [1, 1]
    events = list(engine.stream(PROMPT, sampling, **options))
    assert all(event.logprobs is not None and len(event.logprobs) == len(event.token_ids) for event in events)
    told = [event.prompt_logprobs for event in events if event.token_ids]
    assert told[0] is not None
    assert not any(told[1:])
    without = engine.generate(PROMPT, GREEDY, max_tokens=4)
    assert without.logprobs is without.prompt_logprobs is None


def test_log_probabilities_end_where_the_text_ends(engine: SpeculativeEngine) -> None:
    sampling = SamplingParams(temperature=2.0, logprobs=0, logit_bias=WORDS)
    stop = engine.generate(PROMPT, sampling, seed=2, max_tokens=30).text[5:9]
    cut = engine.generate(PROMPT, sampling, seed=2, max_tokens=30, stop=stop)
    assert cut.logprobs is not None
    assert len(cut.logprobs) == len(cut.token_ids) < 30


def test_a_vocabulary_with_gaps_is_as_wide_as_its_highest_id(engine: SpeculativeEngine) -> None:
    """Four tokens with ids up to 9: the end, 9, can be asked for, scored, chosen, and ends the text."""
    wanted = SamplingParams(temperature=0.0, logit_bias=((END, 100.0),), prompt_logprobs=0, logprobs=0)
    result = engine.generate([1, 5, END, 1], wanted, max_tokens=5)
    assert (result.token_ids, result.finish_reason, result.text) == ((END,), "stop", "")
    assert result.prompt_logprobs is not None
    assert all(entry is None or entry.logprob < 0 for entry in result.prompt_logprobs)
    beyond = engine.generate([1], SamplingParams(temperature=2.0, ignore_eos=True), seed=1, max_tokens=60)
    assert max(beyond.token_ids) <= END


@pytest.mark.parametrize("with_draft", [False, True])
def test_a_tokenizer_wider_than_its_model_is_refused(tmp_path: Path, with_draft: bool) -> None:
    folder = save_checkpoint(tmp_path, num_logits=9)
    with pytest.raises(ModelLoadError, match=r"has 9 logits, but its tokenizer has token ids up to 9"):
        engine_of(folder, folder if with_draft else None)
