"""Answers generated again from their receipts: the same, or where they differ and by how much."""

from __future__ import annotations

import msgspec
import pytest

from specdec import SamplingParams, SpeculativeEngine
from specdec.receipts.format import Receipt
from specdec.receipts.replay import EngineRerun, first_differences

from .answers import PROMPTS, answer, make_engine, source, with_token


@pytest.fixture(scope="module")
def engine() -> SpeculativeEngine:
    return make_engine(source())


@pytest.fixture(scope="module")
def receipt(engine: SpeculativeEngine) -> Receipt:
    return answer(engine, PROMPTS[:4], SamplingParams(top_p=0.9, presence_penalty=0.5), max_tokens=24)


def test_it_is_the_same_without_the_draft_and_after_others(receipt: Receipt) -> None:
    plain = make_engine(source(), draft=False)
    plain.generate("x = ", max_tokens=30)
    assert first_differences(receipt, EngineRerun(plain)) == []


def test_the_first_token_that_differs_is_told_with_its_gap(engine: SpeculativeEngine, receipt: Receipt) -> None:
    own = receipt.choices[1].token_ids[10]
    other = (own + 1) % 4096
    (found,) = first_differences(with_token(receipt, 1, 10, other), EngineRerun(engine))
    assert (found.choice, found.token, found.said, found.found) == (1, 10, other, own)
    tokens = receipt.prompts[1] + receipt.choices[1].token_ids[:10]
    says = engine.generate(
        tokens, SamplingParams(temperature=0, logprobs=0, allowed_token_ids=(other,)), max_tokens=1
    ).logprobs
    mine = engine.generate(
        tokens, SamplingParams(temperature=0, logprobs=0, allowed_token_ids=(own,)), max_tokens=1
    ).logprobs
    assert found.gap == pytest.approx(mine[0].logprob - says[0].logprob, abs=1e-3)


def test_an_output_that_goes_on_or_ends_before_differs_at_its_end(engine: SpeculativeEngine, receipt: Receipt) -> None:
    last = receipt.choices[3]
    shorter = msgspec.structs.replace(last, token_ids=last.token_ids[:-2])
    cut = msgspec.structs.replace(receipt, choices=(*receipt.choices[:3], shorter))
    (found,) = first_differences(cut, EngineRerun(engine))
    assert (found.choice, found.token, found.said, found.found) == (3, 22, None, last.token_ids[22])
    assert found.gap is None
