"""The same tokens as our own target's, whatever is drafted; with as many drafts kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.engine.vllm.target import VllmTarget
from tests.specdec.engine.contract import SAMPLINGS, Shadow, generate
from tests.specdec.engine.pairs import Case, collect
from tests.vllm.models import NUM_TOKENS, VOCAB_SIZE, own_drafter, prompts, spec_of

PROMPTS = prompts()
K = 4
"""Longest draft."""


class Drafts:
    """Drafts for outputs that are known."""

    def __init__(self, outputs: list[list[int]]) -> None:
        self._outputs = outputs
        self._rng = random.Random(7)

    def right(self, i: int, log: TokenLog) -> list[int]:
        return self._outputs[i][len(log) - len(PROMPTS[i]) :][:K]

    def drawn(self, i: int, log: TokenLog) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randrange(K + 1))]

    def partly_right(self, i: int, log: TokenLog) -> list[int]:
        draft = self.right(i, log)[: self._rng.randrange(K + 1)]
        if draft and self._rng.random() < 0.5:
            draft[-1] = self._rng.randrange(VOCAB_SIZE)
        return draft


@pytest.fixture(scope="module")
def plain(reference: ModelTarget) -> dict[str, list[list[int]]]:
    """What our own target says without drafts."""
    return {name: generate(reference, PROMPTS, lambda i, s=SAMPLINGS[name]: spec_of(s, i))[0] for name in SAMPLINGS}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", ["none", "right", "drawn", "partly_right"])
def test_any_draft_gives_the_same_tokens(
    engine: VllmTarget, reference: ModelTarget, plain: dict[str, list[list[int]]], kind: str, name: str
) -> None:
    """In as many steps a sequence as our own target takes, and one more each time it is begun: it has no draft then."""
    drafts = getattr(Drafts(plain[name]), kind, lambda i, log: ())
    evicted = engine.metrics()["num_evictions"]
    outputs, seen = generate(engine, PROMPTS, lambda i: spec_of(SAMPLINGS[name], i), drafts)
    assert outputs == plain[name]
    if kind == "right":
        _, own = generate(reference, PROMPTS, lambda i: spec_of(SAMPLINGS[name], i), drafts)
        evicted = engine.metrics()["num_evictions"] - evicted
        assert own["decided"] < seen["decided"] <= own["decided"] + len(PROMPTS) + evicted
        assert seen["accepted"] == seen["drafted"] > 5 * NUM_TOKENS
    elif kind == "partly_right":
        assert 0 < seen["accepted"] < seen["drafted"]
    else:
        assert (seen["drafted"] > 0) == (kind == "drawn")


def cases(sampling: SamplingParams) -> list[Case]:
    return [Case(tuple(prompt), NUM_TOKENS, sampling, 1000 + i, eos_token_ids=(0,)) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_real_draft_model(engine: VllmTarget, reference: ModelTarget, name: str) -> None:
    """Through the protocol's machines; every decision is also our own target's."""
    sampling = SAMPLINGS[name]
    shadow = Shadow(engine, reference)
    outputs = collect(InProcessService(shadow, own_drafter(), K), cases(sampling))
    assert shadow.seen["decided"] > 0
    assert 0 < shadow.seen["accepted"] < shadow.seen["drafted"]
    wanted = collect(InProcessService(reference, None, 0), cases(sampling))
    assert [(one.tokens, one.finish) for one in outputs] == [(one.tokens, one.finish) for one in wanted]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_ends_a_text(
    engine: VllmTarget, reference: ModelTarget, plain: dict[str, list[list[int]]], name: str
) -> None:
    """A stop token in the middle of a kept draft, the longest text, and the most tokens."""
    stops = [outputs[len(outputs) // 2] for outputs in plain[name]]
    wanted = [
        replace(case, sampling=replace(case.sampling, stop_token_ids=(stop,)))
        for case, stop in zip(cases(SAMPLINGS[name]), stops, strict=True)
    ]
    wanted += [
        replace(cases(SAMPLINGS[name])[2], max_tokens=1),
        replace(cases(SAMPLINGS[name])[7], max_tokens=512 - 182),
    ]
    found = collect(InProcessService(engine, own_drafter(), K), wanted)
    own = collect(InProcessService(reference, None, 0), wanted)
    assert [(one.tokens, one.finish) for one in found] == [(one.tokens, one.finish) for one in own]
    assert {one.finish for one in found} == {"stop", "length"}
