"""Every decision of a target over vLLM, replayed on our own; and what it does where steps fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from specdec.core.backends import Status, VerifyJob
from specdec.core.errors import DeviceLostError
from specdec.core.log import TokenLog
from specdec.core.params import SequenceSpec
from specdec.engine.target import ModelTarget
from specdec.engine.vllm.target import VllmTarget
from tests.specdec.engine.contract import SAMPLINGS, Shadow, Soak, decided
from tests.specdec.hooks import by_row
from tests.vllm.models import VOCAB_SIZE, prompts, spec_of

PROMPTS = prompts()


def soak(target: VllmTarget, reference: ModelTarget, num_decisions: int, seed: int = 1) -> Counter[str]:
    """Of a thousand decisions one may be another by rounding."""
    most = num_decisions // 1000
    seen = Soak(target, reference, PROMPTS, vocab_size=VOCAB_SIZE, most_rounded=most, seed=seed).run(num_decisions)
    assert seen["decided"] >= num_decisions
    assert 0 < seen["accepted"] < seen["drafted"]
    assert (
        min(seen[name] for name in ("waiting", "prefilling", "released", "cached", "logprobs", "prompt_logprobs")) > 0
    )
    return seen


@pytest.mark.timeout(1200)
def test_2000_decisions_with_little_room(engine: VllmTarget, reference: ModelTarget) -> None:
    soak(engine, reference, 2_000)
    assert engine.metrics()["num_evictions"] > 0
    assert engine.metrics()["kv_blocks_in_use"] == engine.metrics()["num_cached_sequences"] == 0


@pytest.mark.timeout(1200)
def test_drafts_that_are_filled_up(engine: VllmTarget, reference: ModelTarget) -> None:
    """Every step has the same number of rows for each sequence; the decisions are those without."""
    filled = VllmTarget(engine._core, engine._sampler, max_draft=4, fills_up=True)
    soak(filled, reference, 300, seed=2)
    assert filled._fills_up
    engine._install()


@pytest.mark.whole
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(3, 13))
def test_20000_decisions(engine: VllmTarget, reference: ModelTarget, seed: int) -> None:
    soak(engine, reference, 2_000, seed)


class Steps:
    """Sequences that are driven by hand, each decision compared."""

    def __init__(self, target: Any, reference: ModelTarget) -> None:
        self.shadow = Shadow(target, reference)
        self.target = target
        self.logs: dict[str, TokenLog] = {}
        self.specs: dict[str, SequenceSpec] = {}

    def open(self, key: str, i: int, length: int | None = None, **changes: Any) -> None:
        self.logs[key] = TokenLog(PROMPTS[i][:length])
        self.specs[key] = replace(spec_of(SAMPLINGS["T1"], i), output_start=len(self.logs[key]), **changes)

    def step(self, *keys: str, draft: tuple[int, ...] = ()) -> dict[str, int]:
        """One step for these; gives how many tokens vLLM has read of each."""
        before = {key: self._computed(key) for key in keys}
        for key, result in zip(keys, self.shadow.verify([self._job(key, draft) for key in keys]), strict=True):
            self.logs[key].extend(result.run)
        return {key: self._computed(key) - before[key] for key in keys}

    def _computed(self, key: str) -> int:
        held = self.target._held.get(key)
        return 0 if held is None else held.request.num_computed_tokens

    def _job(self, key: str, draft: tuple[int, ...]) -> VerifyJob:
        return VerifyJob(key, self.logs[key], draft, self.specs[key], source="chain")


def test_what_is_held_back_is_not_read_again(engine: VllmTarget, reference: ModelTarget) -> None:
    steps = Steps(engine, reference)
    steps.open("a", 2)
    steps.open("b", 1)
    for _ in range(3):
        steps.step("a", "b", draft=(1, 2))
    for _ in range(5):
        steps.step("a", draft=(4,))
    assert steps.step("a", "b", draft=(9, 9))["b"] <= 3
    for key in "ab":
        steps.shadow.release(key)


def test_a_prompt_of_a_better_priority_is_read_first(engine: VllmTarget, reference: ModelTarget) -> None:
    engine._scheduler.reset_prefix_cache()
    steps = Steps(engine, reference)
    steps.open("earlier", 4, priority=1)
    steps.open("better", 7)
    assert steps.step("better", "earlier") == {"better": 64, "earlier": 0}
    for key in steps.logs:
        steps.shadow.release(key)


def test_what_is_opened_again_comes_from_the_cache(engine: VllmTarget, reference: ModelTarget) -> None:
    """All full blocks of 32; of another log, what both begin with."""
    engine._scheduler.reset_prefix_cache()
    steps = Steps(engine, reference)
    steps.open("a", 4)
    for _ in range(4):
        steps.step("a")
    reused = engine.metrics()["num_reused_tokens"]
    steps.shadow.release("a")
    steps.step("a")
    assert engine.metrics()["num_reused_tokens"] - reused == 96
    steps.logs["a"] = TokenLog([*steps.logs["a"].tokens[:70], 7, 8, 9])
    steps.specs["a"] = replace(steps.specs["a"], output_start=60)
    steps.step("a")
    assert engine.metrics()["num_reused_tokens"] - reused == 96 + 64
    assert steps.shadow.seen["decided"] == 5
    steps.shadow.release("a")


def test_the_longest_sequence(engine: VllmTarget, reference: ModelTarget) -> None:
    steps = Steps(engine, reference)
    steps.open("a", 7)
    steps.logs["a"] = TokenLog((PROMPTS[7] * 3)[:490])
    steps.specs["a"] = replace(steps.specs["a"], output_start=490, max_tokens=22)
    while len(steps.logs["a"]) < 512:
        steps.step("a", draft=(1, 2, 3, 4)[: max(0, 511 - len(steps.logs["a"]))])
    steps.shadow.release("a")
    assert engine._scheduler.get_num_unfinished_requests() == 0


def test_of_a_tree_a_chain_is_verified(engine: VllmTarget, reference: ModelTarget) -> None:
    spec = spec_of(SAMPLINGS["T0"], 1)
    log = TokenLog(PROMPTS[1])
    for _ in range(2):
        log.extend(decided(engine, VerifyJob("a", log, (), spec)).run)
    right = decided(reference, VerifyJob("probe", log, (), spec)).run[0]
    tree = VerifyJob("a", log, (right, right + 1, 5), spec, source="heads", parents=(-1, -1, 0))
    result = decided(engine, tree)
    assert (result.run[0], result.num_accepted, result.num_drafted) == (right, len(result.run) - 1, 2)
    assert result.num_accepted >= 1
    for key, target in (("a", engine), ("probe", reference)):
        target.release(key)


@pytest.mark.parametrize(
    "where", ["_prepare_inputs", "_model_forward", "_update_states_after_model_execute", "get_grammar_bitmask"]
)
def test_a_step_that_fails_is_forgotten(
    engine: VllmTarget, reference: ModelTarget, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in and after the forward pass, and before tokens are asked for; nothing that it left behind is used."""
    steps = Steps(engine, reference)
    for key, i in (("a", 3), ("b", 4)):
        steps.open(key, i)
    for _ in range(5):
        steps.step("a", "b", draft=(4, 5))
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    owner = engine._scheduler if where == "get_grammar_bitmask" else runner
    steps.open("c", 6)  # of whose blocks two are filled in the step that fails

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, fail)
        with pytest.raises(RuntimeError, match="injected"):
            steps.step("a", "b", "c", draft=(1,))
    assert engine.metrics()["kv_blocks_in_use"] == 0
    for _ in range(10):
        steps.step("a", "b", "c", draft=(1, 2))
    for key in "abc":
        steps.shadow.release(key)


def test_an_engine_that_cannot_begin_again_is_lost(engine: VllmTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    job = VerifyJob("a", TokenLog(PROMPTS[0]), (), spec_of(SAMPLINGS["T1"], 0))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_execute", fail)
        patch.setattr(engine._scheduler, "reset_prefix_cache", fail)
        with pytest.raises(DeviceLostError, match="injected"):
            engine.verify([job])
    engine._start_over(RuntimeError())


@by_row
def raising(spec: SequenceSpec, tokens: list[int], logits: Tensor) -> None:
    """Fails for one sequence, after some tokens of it."""
    if spec.seed == 1001 and len(tokens) >= spec.output_start + 3:
        raise ValueError("no such state")


def test_a_hook_that_raises_ends_its_own_sequence(engine: VllmTarget) -> None:
    target = VllmTarget(engine._core, engine._sampler, (raising,), max_draft=4)
    logs = [TokenLog(prompt) for prompt in PROMPTS[:2]]
    ended = []
    for _ in range(12):
        jobs = [VerifyJob(f"{i}", log, (), spec_of(SAMPLINGS["T1"], i)) for i, log in enumerate(logs) if i not in ended]
        for job, result in zip(jobs, target.verify(jobs), strict=True):
            logs[int(job.key)].extend(result.run)
            if result.status is Status.FAILED:
                assert "no such state" in result.reason
                ended.append(int(job.key))
                target.release(job.key)
    assert ended == [1]
    assert len(logs[1]) == len(PROMPTS[1]) + 3
    assert len(logs[0]) > len(PROMPTS[0]) + 3
    target.release("0")
    engine._install()
