"""Reported log probabilities are those of one whole forward pass, with and without drafts."""

import random

import pytest
import torch

from specdec.protocol.messages import Notes, TokenLogprobs
from specdec.sampling.params import SamplingParams, SequenceSpec
from tests.specdec.engine.pairs import make_model, make_service


def generate(prompt: tuple[int, ...], sampling: SamplingParams, k: int) -> tuple[list[int], Notes]:
    service = make_service("llama", 0.06, k)
    service.start("one", prompt, SequenceSpec(sampling, 3, len(prompt), 14, ()))
    tokens, notes = [], Notes()
    while True:
        for delivery in service.pump():
            tokens += delivery.tokens
            notes = notes + delivery.notes
            if delivery.finish is not None:
                return tokens, notes


def check(entries: list[TokenLogprobs], rows: torch.Tensor, tokens: list[int]) -> None:
    for entry, row, token in zip(entries, rows, tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.logprob < 0.0
        assert entry.rank == int((row > row[token]).sum()) + 1
        top = row.topk(3)
        assert [i for i, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edge_05_logprobs_come_from_the_targets_own_row(temperature: float) -> None:
    rng = random.Random(4)
    prompt = tuple(rng.randrange(3, 128) for _ in range(41))  # three prefill chunks
    sampling = SamplingParams(temperature=temperature, logprobs=3, prompt_logprobs=3, top_k=40)
    seen = [generate(prompt, sampling, k) for k in (0, 1, 4, 8)]
    tokens, notes = seen[0]
    assert {len(other) for other, _ in seen} == {14}
    assert all(other == tokens for other, _ in seen)
    with torch.inference_mode():
        whole = make_model("llama")(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    for _, notes in seen:
        assert notes.prompt_logprobs is not None
        assert notes.prompt_logprobs[0] is None
        check(list(notes.prompt_logprobs[1:]), whole[: len(prompt) - 1], list(prompt[1:]))
        check(list(notes.logprobs or ()), whole[len(prompt) - 1 : -1], tokens)
