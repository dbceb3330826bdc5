"""The contract of a target, held by those that need no other environment; vLLM's is in ``tests/vllm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.emulation import Around
from benchmarks.scripted import Script, ScriptedTarget
from specdec.core.backends import Status, TargetBackend, Verification, VerifyJob
from specdec.engine.target import ModelTarget
from specdec.sampling.pipeline import RowGroup
from tests.specdec.engine import contract
from tests.specdec.engine.contract import SAMPLINGS, Soak
from tests.specdec.engine.pairs import backend
from tests.specdec.models.families import VOCAB_SIZE, make_model

PROMPTS = tuple(tuple((7 * i + j) % VOCAB_SIZE for j in range(40)) for i in range(4))
PLAIN = tuple(replace(one, logit_bias=(), prompt_logprobs=None, logprobs=None) for one in SAMPLINGS.values())


class WrongAtTimes(Around):
    """Says another token in the 20th decision."""

    num_decided = 0

    def verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = self._inner.verify(jobs)
        for i, result in enumerate(results):
            if result.status is not Status.DECIDED:
                continue
            self.num_decided += 1
            if self.num_decided == 20:
                results[i] = result._replace(run=(*result.run[:-1], (result.run[-1] + 1) % VOCAB_SIZE))
        return results


def own(**options: Any) -> ModelTarget:
    return backend(ModelTarget, make_model("llama"), **options)


def test_a_scripted_target() -> None:
    script = Script(0.8, 0.95, tuple(range(VOCAB_SIZE)))
    soak = Soak(
        ScriptedTarget(script, 160), ScriptedTarget(script, 160), PROMPTS, vocab_size=VOCAB_SIZE, samplings=PLAIN
    )
    seen = soak.run(2_000)
    assert seen["decided"] >= 2_000
    assert 0 < seen["accepted"] < seen["drafted"]


def test_our_own_with_little_room_decides_as_with_much() -> None:
    soak = Soak(
        own(num_blocks=60, chunk=16), own(num_blocks=2000, chunk=160), PROMPTS, vocab_size=VOCAB_SIZE, samplings=PLAIN
    )
    seen = soak.run(400)
    assert min(seen["waiting"], seen["prefilling"], seen["released"]) > 0
    assert 0 < seen["accepted"] < seen["drafted"]
    assert soak.shadow.metrics()["num_evictions"] > 0


@pytest.mark.parametrize("make", [own, lambda: ScriptedTarget(Script(0.8, 0.95, tuple(range(VOCAB_SIZE))), 160)])
def test_a_wrong_decision_is_found(make: type[TargetBackend]) -> None:
    soak = Soak(WrongAtTimes(make()), make(), PROMPTS, vocab_size=VOCAB_SIZE, samplings=PLAIN)
    with pytest.raises(AssertionError, match="draft"):
        soak.run(200)


@pytest.mark.parametrize("name", ["T0", "T1"])
def test_logits_that_are_off_are_found(name: str) -> None:
    """By a decision that is further away than rounding takes it, though rounding were allowed."""

    def off(groups: Sequence[RowGroup], logits: Tensor) -> Tensor:
        return logits + 0.05 * torch.sin(torch.arange(VOCAB_SIZE))

    inner, samplings = own(processors=(off,)), (replace(SAMPLINGS[name], logprobs=None),)
    soak = Soak(inner, own(), PROMPTS, vocab_size=VOCAB_SIZE, samplings=samplings, most_rounded=200)
    with pytest.raises(AssertionError, match="away"):
        soak.run(200)


@pytest.mark.parametrize("most", [0, 1])
def test_what_rounding_may_change_is_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if any token were near."""
    monkeypatch.setattr(contract, "MOST_SHORT", math.inf)
    sampling = replace(SAMPLINGS["T1"], logprobs=None)
    inner = WrongAtTimes(own())
    soak = Soak(inner, own(), PROMPTS, vocab_size=VOCAB_SIZE, samplings=(sampling,), most_rounded=most)
    with nullcontext() if most else pytest.raises(AssertionError, match="one too many"):
        assert soak.run(40)["rounded"] == 1
