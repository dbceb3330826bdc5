"""Drafts that go from the draft model to the target on their device, before anybody has read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from specdec.core.backends import VerifyJob
from specdec.core.params import SamplingParams
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.observed import ObservedDrafter, ObservedTarget, StepRecord
from specdec.engine.pair import PairedTarget
from specdec.engine.target import ModelTarget
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.protocol.ingress import TokenDelta
from specdec.protocol.target import TargetMachine
from specdec.sampling.pipeline import Sampler
from tests.sizes import one_of_each
from tests.specdec.engine.pairs import (
    MAX_MODEL_LEN,
    Case,
    Output,
    collect,
    deliver,
    make_draft,
    make_model,
    make_service,
    prepare_tiny,
    run,
    start,
)
from tests.specdec.engine.test_exactness import GREEDY, HALF_RIGHT, make_cases
from tests.specdec.engine.test_hostile_network import LENGTHS, TARGET, TIMES, HostileService
from tests.specdec.engine.test_pair import ROOMS, SAMPLED, SCARCE, plainly
from tests.specdec.kernels.in_torch import decide_in_torch
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.models.families import VOCAB_SIZE

NUM_DRAFT_TOKENS = 4


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    decide_in_torch(monkeypatch)


def recorded(
    kind: Any,
    noise: float | None,
    *,
    num_blocks: int = 400,
    max_model_len: int = MAX_MODEL_LEN,
    chunk: int = 64,
    is_parallel: bool = False,
) -> Any:
    """A backend whose steps are recorded, and are decided by kernels; of the target without noise."""
    model = make_model("llama") if noise is None else make_draft("llama", noise)
    runner = ModelRunner(prepare_tiny(model), num_blocks=num_blocks, block_size=4)
    of_chains = {"num_chained_passes": NUM_DRAFT_TOKENS} if kind is not ModelTarget else {}
    limits = ExecutorLimits(16, 128, MAX_MODEL_LEN, NUM_DRAFT_TOKENS, num_extra_words=1 << 12, **of_chains)
    if is_parallel:
        limits = replace(limits, is_parallel=True)
        of_chains |= {"mask_token_id": 1, "num_step_tokens": NUM_DRAFT_TOKENS}
    runner.record_graphs(limits)
    assert not runner.graphs_failure
    sampler = Sampler(VOCAB_SIZE, on_kernels=True)
    return kind(runner, sampler, max_model_len=max_model_len, max_num_batched_tokens=chunk, **of_chains)


class Handing(PairedTarget):
    """Counts drafts that were handed over unread, and others."""

    num_handed = num_read = longest = 0

    def _drafting(self, jobs: Sequence[VerifyJob]) -> Any:
        drafting, unread = super()._drafting(jobs)
        self.longest = max([self.longest, *(len(one.drawn) for one in drafting)])
        num_drafts = sum(bool(one.drawn) for one in drafting)
        if unread is None:
            self.num_read += num_drafts
        else:
            self.num_handed += num_drafts
        return drafting, unread


def pair(noise: float = HALF_RIGHT["llama"], *, of_draft: dict[str, Any] | None = None, **options: Any) -> Handing:
    drafter = recorded(ModelDrafter, noise, **(options if of_draft is None else of_draft))
    return Handing(recorded(ModelTarget, None, **options), drafter, NUM_DRAFT_TOKENS)


@pytest.mark.parametrize(("sampling", "room"), one_of_each([GREEDY, SAMPLED], [*ROOMS]))
def test_the_tokens_are_those_without_drafts(sampling: SamplingParams, room: str) -> None:
    """With room, with sequences of either model preempted, and with a draft model that reads less; and once more."""
    cases, paired = make_cases(sampling, (None, 0, 1, 3, None)), pair(**ROOMS[room])
    service, wanted = InProcessService(paired, None, 0), plainly(cases)
    for _ in range(2):
        outputs, stats = run(service, cases)
        assert outputs == wanted
    assert paired.num_handed > 20
    assert paired.num_read == 0
    assert stats.num_accepted_tokens > (10 if room != "short draft" else 0)
    for one in (paired._target, paired._drafter):
        metrics = one.metrics()
        assert metrics["num_cached_sequences"] == 0
        assert metrics["num_reused_tokens"] > 0  # of prompts, when they come again
    assert (paired._drafter.metrics()["num_evictions"] > 0) == (SCARCE in (ROOMS[room], ROOMS[room].get("of_draft")))


def test_drafts_of_one_pass_are_handed_over_too() -> None:
    """What this model makes of its mask tokens is of no use, but for the first of each draft."""
    cases, paired = make_cases(SAMPLED, (None, 0, 1, 3, None)), pair(0.0, of_draft={"is_parallel": True})
    outputs, stats = run(InProcessService(paired, None, 0), cases)
    assert outputs == plainly(cases)
    assert paired.num_handed > 20
    assert paired.num_read == 0
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens


@interpreted
def test_the_kernels_themselves_give_the_tokens_without_drafts() -> None:
    cases = [replace(case, max_tokens=8, eos_token_ids=()) for case in make_cases(SAMPLED)[:2]]
    paired = pair()
    outputs, stats = run(InProcessService(paired, None, 0), cases)
    assert outputs == plainly(cases)
    assert min(paired.num_handed, stats.num_accepted_tokens) > 3
    assert paired.num_read == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T0", "T1"])
def test_as_much_is_drafted_and_kept_as_where_drafts_are_read_first(sampling: SamplingParams) -> None:
    cases = [replace(case, max_tokens=30, eos_token_ids=()) for case in make_cases(sampling)]
    handing, reading = pair(), pair()
    reading._most_unread = 0
    services = [InProcessService(one, None, 0) for one in (handing, reading)]
    found, other = (run(service, cases) for service in services)
    assert found == other
    assert 0.1 < found[1].acceptance_rate < 0.9
    # A next turn begins with what was kept of both texts: of drafts, too, that nobody had read when they were cached.
    cases = [
        replace(case, prompt=(*case.prompt, *output), max_tokens=4)
        for case, output in zip(cases, found[0], strict=True)
    ]
    found, other = (run(service, cases) for service in services)
    assert found == other
    for name in "_target", "_drafter":
        ours, theirs = (getattr(one, name).metrics()["num_reused_tokens"] for one in (handing, reading))
        assert ours == theirs > 100
    assert (handing.num_handed > 20, handing.num_read) == (True, 0)
    assert (reading.num_handed, reading.num_read > 20) == (0, True)


def test_rows_with_matches_and_with_reports_are_decided_beside_drafts_that_nobody_has_read() -> None:
    cases = [replace(case, sampling=replace(SAMPLED, logprobs=2)) for case in make_cases(SAMPLED)]
    wanted = collect(make_service("llama", 0.0, 0), cases)
    cases = [
        replace(case, prediction=tuple(output.tokens[:9]) if i % 2 else ())
        for i, (case, output) in enumerate(zip(cases, wanted, strict=True))
    ]
    paired = pair()
    service = InProcessService(paired, None, 0, ngram=NgramOptions(8))
    outputs = collect(service, cases)
    assert [one.tokens for one in outputs] == [one.tokens for one in wanted]
    for output, plain in zip(outputs, wanted, strict=True):
        for ours, theirs in zip(output.notes.logprobs or (), plain.notes.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, *_ in ours.top] == [token for token, *_ in theirs.top]
    assert paired.num_handed > 20
    by_source = service.target.counters.by_source
    assert min(by_source[name].num_accepted_tokens for name in ("prediction", "model")) > 5


def test_a_draft_whose_numbers_are_not_finite_costs_itself_alone() -> None:
    """Its tokens are verified before anybody knows. Nothing more is drafted for its sequence, at last."""
    cases = [replace(case, eos_token_ids=()) for case in make_cases(GREEDY)]
    wanted, paired = plainly(cases), pair()
    once = {
        token
        for token in wanted[3]
        if sum(token in (*case.prompt, *out) for case, out in zip(cases, wanted, strict=True)) == 1
    }
    broken = next(token for token in wanted[3][5:] if token in once)
    with torch.no_grad():
        paired._drafter._runner.loaded.model.get_input_embeddings().weight[broken] = float("nan")
    service = InProcessService(paired, None, 0)
    assert run(service, cases)[0] == wanted
    assert paired.num_handed > 20
    by_source = service.target.counters.by_source
    assert set(by_source) == {"model"}
    assert by_source["model"].num_draft_tokens == service.target.counters.num_draft_tokens


def test_drafts_that_depend_on_their_tokens_are_read_first() -> None:
    """Beside one of them all are, as one pass draws for all."""
    cases = make_cases(SAMPLED)
    edited = SamplingParams(temperature=1.0, min_tokens=8)
    cases[0] = replace(cases[0], max_tokens=12, sampling=edited)
    wanted = plainly(cases)
    paired = pair()
    assert run(InProcessService(paired, None, 0), cases)[0] == wanted
    assert min(paired.num_handed, paired.num_read) > 5


def test_a_draft_that_is_longer_than_a_chain_is_read_first() -> None:
    cases, paired = make_cases(GREEDY, (NUM_DRAFT_TOKENS + 3,)), pair()
    assert run(InProcessService(paired, None, 0), cases)[0] == plainly(cases)
    assert paired.longest == NUM_DRAFT_TOKENS + 3
    assert paired.num_read > paired.num_handed  # what is left of a text may be shorter


def test_a_step_of_the_target_that_fails_leaves_nothing_of_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, paired, calls = make_cases(SAMPLED), pair(), list[int]()
    service = InProcessService(paired, None, 0)
    forward = paired._target._runner.forward

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(paired.num_handed)
        if len(calls) == 5:
            raise RuntimeError("no such kernel")
        return forward(*args, **options)

    monkeypatch.setattr(paired._target._runner, "forward", failing)
    assert run(service, cases)[0] == plainly(cases)
    assert (service.target.counters.num_failed_steps, paired.metrics()["num_failed_draft_steps"]) == (0, 1)
    assert paired.num_handed > calls[4] > calls[3]
    assert paired._drafter.metrics()["num_cached_sequences"] == 0


class HostilePair(HostileService):
    """Its target has a draft model in its process, too; both die at once."""

    def _begin(self, name: str) -> None:
        if name != TARGET:
            return super()._begin(name)
        self.paired = pair(max_model_len=LENGTHS["max_model_len"])
        self._target = TargetMachine(name, self.paired, TIMES)
        self._router.worker_joined(name, "target", self._now)
        return None

    def count(self, name: str) -> None:
        if name == TARGET:
            self.counts["handed over"] += self.paired.num_handed
        super().count(name)


def test_no_token_changes_where_workers_die_and_messages_are_lost() -> None:
    cases = [replace(case, max_tokens=40) for case in make_cases(SAMPLED)]
    wanted = plainly(cases)
    drafter = partial(ModelRunner, prepare_tiny(make_draft("llama", HALF_RIGHT["llama"])), num_blocks=300)
    service = HostilePair(drafter, drafter, 1, restart_rate=0.15)
    assert [output.tokens for output in collect(service, cases)] == wanted
    service.count(TARGET)
    assert service.counts["T restarted"] > 1
    assert service.counts["handed over"] > 20


class TwoPairs(InProcessService):
    """A pair, and another one that joins when the first drains."""

    def __init__(self, first: PairedTarget, second: PairedTarget) -> None:
        self.other: TargetMachine | None = None
        super().__init__(first, None, 0)
        self._second = second

    def drain_first(self) -> None:
        now_s = self._clock()
        self.other = TargetMachine("other", self._second, self.target._times)
        self.router.worker_joined("other", "target", now_s)
        self.target.drain(now_s)

    def pump(self) -> list[TokenDelta]:
        if self.other is not None:
            self.other.step(self._clock())
        return super().pump()

    def _exchange(self) -> None:
        machines = {m.name: m for m in (self.ingress, self.router, self.target, self.other) if m is not None}
        while sent := [(to, m) for one in machines.values() for to, ms in one.take_outbox().items() for m in ms]:
            for name, message in sent:
                machines[name].receive(message, self._clock())


def test_what_a_pair_has_that_drains_goes_on_with_another_pair() -> None:
    """In the middle of texts, with drafts on both sides; nothing is left of them, in either model."""
    cases = [replace(case, max_tokens=40, eos_token_ids=()) for case in make_cases(SAMPLED)]
    first, second = pair(), pair()
    service, outputs = TwoPairs(first, second), dict[str, Output]()
    outputs |= {name: Output() for name in start(service, cases)}
    for number in range(200):
        if number == 8:
            assert all(0 < len(output.tokens) < 40 for output in outputs.values())
            service.drain_first()
        deliver(service, outputs)
        if service.target.is_draining:
            assert service.target.is_drained
            assert (first._sequences, first._drafter.metrics()["num_cached_sequences"]) == ({}, 0)
        if all(output.finish is not None for output in outputs.values()):
            break
    assert [output.tokens for output in outputs.values()] == plainly(cases)
    assert service.router.counters.num_handed_over == len(cases)
    assert min(first.num_handed, second.num_handed) > 20


@pytest.mark.parametrize("fails", [False, True])
def test_steps_are_told_of_as_where_drafts_are_read_first(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's step ends, and the target's begins, when the drafts are read. One of the target's may fail after it."""
    cases: list[Case] = [replace(case, eos_token_ids=()) for case in make_cases(GREEDY)[:2]]
    steps: list[StepRecord] = []
    time = iter(range(1_000_000))
    target, drafter = recorded(ModelTarget, None), recorded(ModelDrafter, 0.0)
    observed = [
        kind(one, [steps.append], lambda: next(time))
        for kind, one in ((ObservedTarget, target), (ObservedDrafter, drafter))
    ]
    paired, decide = PairedTarget(*observed, NUM_DRAFT_TOKENS), target._results

    def failing(*args: Any) -> Any:
        if fails and steps and steps[-1].role == "drafter" and not service.target.counters.num_failed_steps:
            raise RuntimeError("no such kernel")
        return decide(*args)

    monkeypatch.setattr(target, "_results", failing)
    service = InProcessService(paired, None, 0)
    run(service, cases)
    assert service.target.counters.num_failed_steps == fails
    pairs = [(one, two) for one, two in pairwise(steps) if one.role == "drafter"]
    assert len(pairs) > 2
    for draft, verify in pairs:
        assert verify.role == "target"
        assert draft.since_ns == draft.start_ns < draft.end_ns < verify.start_ns < verify.end_ns
        assert draft.num_passes == NUM_DRAFT_TOKENS or fails
        assert all(token.token >= 0 for result in draft.results for token in (result, *result.further))
