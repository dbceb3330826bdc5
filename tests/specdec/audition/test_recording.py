"""Recordings: written and read they are the same, and a bad line is named; replay finds the token that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdec import Adapter, Grammar, SamplingParams, SpeculativeEngine
from specdec.audition.recording import Sample, line_of, read_recording, sample_of, write_recording
from specdec.audition.replay import replay
from specdec.core.errors import InvalidParameterError
from specdec.core.tokens import SharedTokens
from tests.specdec.engine.features import OPTIONS, demo

PLAIN = Sample((1, 2), (3, 0), 8, SamplingParams(), seed=5, eos_token_ids=(0,), finish_reason="stop")
FULL = Sample(
    (1, 2),
    (3, 4),
    2,
    SamplingParams(
        logit_bias=((3, 1.5),),
        allowed_token_ids=SharedTokens((3, 4)),
        bad_words=((5, 6),),
        stop_token_ids=(7,),
        grammar=Grammar("regex", "[a-z]+"),
    ),
    seed=2**64 - 1,
    adapter=Adapter("a", "folder/a", "f00"),
    draft_adapter=Adapter("b", "folder/b", "f01"),
    prediction_token_ids=(3, 4, 5),
    owner="team",
    system_fingerprint="fp",
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_recording(tmp_path / "r.jsonl", [PLAIN, FULL, replace(PLAIN, seed=None)])
    assert list(read_recording(tmp_path / "r.jsonl")) == [PLAIN, FULL, replace(PLAIN, seed=None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "x"}, "seed"),
        ({"seed": -1}, "seed is -1, and must be from 0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"prompt_token_ids": []}, "prompt_token_ids must have at least one"),
        ({"output_token_ids": [-1]}, "output_token_ids must be token ids"),
        ({"owners": ""}, "unknown field owners"),
        ({"sampling": {"temperatur": 0}}, "unknown field sampling.temperatur"),
        ({"sampling": {"top_p": "all"}}, "sampling.top_p"),
        ({"sampling": {"allowed_token_ids": 3}}, "sampling.allowed_token_ids"),
        ({"finish_reason": "bored"}, "finish_reason"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, change: dict, message: str) -> None:
    path = tmp_path / "r.jsonl"
    bad = json.dumps(json.loads(line_of(PLAIN)) | change).encode()
    path.write_bytes(line_of(PLAIN) + b"\n\n" + bad + b"\n")
    with pytest.raises(InvalidParameterError, match=r"r\.jsonl, line 3: ") as error:
        list(read_recording(path))
    assert message in str(error.value)


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(line_of(PLAIN) + b"\n" + line_of(FULL))
    assert list(read_recording(path)) == [PLAIN, FULL], "it is whole, without its end"
    path.write_bytes(line_of(PLAIN) + b"\n" + line_of(FULL)[:-9])
    assert list(read_recording(path)) == [PLAIN]


def test_a_line_that_is_no_object_is_refused() -> None:
    for line in (b"[]", b"{", b"\xff"):
        with pytest.raises(ValueError):
            sample_of(line)


def test_replay_says_the_same_or_which_token_differs_first() -> None:
    engine = SpeculativeEngine.from_pretrained(demo("target"), options=OPTIONS)
    results = engine.generate_batch(["import os\n", "x = 1\n"], max_tokens=12, seed=3)
    samples = [Sample.of(result) for result in results]
    assert [sample_of(line_of(sample)) for sample in samples] == samples
    output = samples[0].output_token_ids
    changed = replace(samples[0], output_token_ids=(*output[:5], (output[5] + 1) % 4096, *output[6:]))
    found = list(replay(engine, [*samples, changed, replace(samples[0], seed=None)]))
    assert [one.is_same for one in found] == [True, True, False, False]
    assert (found[2].place, found[2].recorded, found[2].said) == (5, (output[5] + 1) % 4096, output[5])
    assert found[3].skipped == "it has no seed, and a temperature above 0"
