"""Logs in OpenAI's form: a greedy answer's text is the sample that a recording would have held."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpeculativeEngine
from specdec.audition.logs import AnswerReader
from specdec.audition.recording import Sample, line_of
from specdec.audition.rounds import earned_by_lookup
from specdec.core.errors import InvalidParameterError
from tests.specdec.engine.features import demo

PROMPTS = ["import os\n", "class A:\n", "def f(x):\n    return"]


def read(tmp_path: Path, *lines: Any, temperature: float = 1.0) -> list[Sample]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return list(AnswerReader(demo("target"), temperature).read(path))


def test_a_log_tells_what_a_recording_tells(tmp_path: Path) -> None:
    engine = SpeculativeEngine.from_pretrained(demo("target"))
    sampling = SamplingParams(temperature=0)
    results = engine.generate_batch(PROMPTS, max_tokens=32, sampling=sampling)
    log = [
        {
            "request": {"prompt": prompt, "max_tokens": 32, "temperature": 0},
            "response": {"choices": [{"text": result.text, "finish_reason": result.finish_reason}]},
        }
        for prompt, result in zip(PROMPTS, results, strict=True)
    ]
    samples = read(tmp_path, *log)
    recorded = [Sample.of(result) for result in results]
    assert [one.prompt_token_ids for one in samples] == [one.prompt_token_ids for one in recorded]
    assert [one.output_token_ids for one in samples] == [one.output_token_ids for one in recorded]
    assert all(one.sampling.is_greedy and one.seed is None for one in samples)
    assert [earned_by_lookup(one, 4) for one in samples] == [earned_by_lookup(one, 4) for one in recorded]


def test_forms_of_a_line(tmp_path: Path) -> None:
    sample = Sample((1, 2), (3,), 8, SamplingParams(), seed=5)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b c"}]}]
    whole, pair, both, chat = read(
        tmp_path,
        json.loads(line_of(sample)),
        {"prompt": "a", "completion": "b c", "temperature": 0.5, "top_k": 3},
        {
            "request": {"prompt": ["a"], "stop": "x"},
            "response": {"choices": [{"text": "b c"}, {"text": ""}, {"text": None}]},
        },
        {"messages": turns},
    )
    assert whole == sample
    assert pair.sampling == SamplingParams(temperature=0.5, top_k=3)
    assert pair.output_token_ids[-1] in pair.eos_token_ids
    assert both.output_token_ids == pair.output_token_ids[:-1], "a stop string may have ended it"
    assert chat.output_token_ids == pair.output_token_ids
    assert len(chat.prompt_token_ids) > len(pair.prompt_token_ids), "the template's tokens are around it"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "object"),
        ({"request": {}, "response": {}}, "a line is a sample, or"),
        ({"messages": [{"role": "user", "content": "a"}]}, "a line is a sample, or"),
        ({"request": {"prompt": ["a", "b"]}, "response": {"choices": [{"text": "c"}]}}, "prompt must be a text"),
        ({"prompt": "a", "completion": "b", "top_p": 2}, "top_p must be"),
        ({"messages": ["a", {"role": "assistant", "content": "b"}]}, "messages must be a list of objects"),
        ({"request": {"prompt": "a"}, "response": {"choices": ["b"]}}, "choices must be a list of objects"),
        (
            {"request": {"prompt": "a"}, "response": {"choices": [{"message": {"content": [{"type": "image"}]}}]}},
            "content must be a text",
        ),
    ],
)
def test_a_line_of_no_form_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"line 1: .*{message}"):
        read(tmp_path, line)
