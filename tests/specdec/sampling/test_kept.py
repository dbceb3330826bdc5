"""What is kept for as long as a request lives."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from specdec.core.errors import InvalidParameterError
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.tokens import SharedTokens
from specdec.core.validation import MAX_NUM_LOGIT_BIASES, validated
from specdec.sampling.kept import WhileAlive
from specdec.sampling.pipeline import RowGroup, Sampler
from tests.specdec.sampling.reference import probs_of

VOCAB = 2000


def test_a_value_is_found_by_its_object_alone_and_goes_with_it() -> None:
    kept = WhileAlive[SamplingParams, int]()
    first, second = SamplingParams(top_k=3), SamplingParams(top_k=3)
    kept.put(first, 1)
    assert (kept.get(first), kept.get(second)) == (1, None)
    kept.put(second, 2)
    del first
    gc.collect()
    assert (len(kept), kept.get(second)) == (1, 2)


def test_more_biases_than_are_taken_are_refused_by_name() -> None:
    biases = tuple((token, 1.0) for token in range(MAX_NUM_LOGIT_BIASES + 1))
    assert len(validated(SamplingParams(logit_bias=biases[1:]), VOCAB).logit_bias) == MAX_NUM_LOGIT_BIASES
    with pytest.raises(InvalidParameterError, match="logit_bias must be at most 1024 biases, not 1025") as refused:
        validated(SamplingParams(logit_bias=biases), VOCAB)
    assert refused.value.parameter == "logit_bias"


@pytest.mark.parametrize(
    "params", [SamplingParams(logit_bias=((3, 9.0), (1, -9.0))), SamplingParams(allowed_token_ids=SharedTokens((3,)))]
)
def test_what_many_live_requests_ask_for_is_prepared_once_each(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    for module, name in ((np, "array"), (np, "packbits")):
        make = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, make=make, **k: (made.append(1), make(*a, **k))[1])
    specs = [
        SequenceSpec(SamplingParams(logit_bias=params.logit_bias, allowed_token_ids=params.allowed_token_ids), i, 1, 9)
        for i in range(300)
    ]
    sampler, logits = Sampler(VOCAB), torch.zeros(300, VOCAB)
    counts = []
    for _ in range(3):
        made.clear()
        chosen = probs_of(sampler, logits, [RowGroup(spec, [0]) for spec in specs])
        assert chosen.argmax(1).tolist() == [3] * 300
        counts.append(len(made))
    assert counts[0] >= 300
    assert counts[1] == counts[2] < 10
