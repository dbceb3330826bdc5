"""Drafts that real backends cannot verify, or that fail while they are made: each sequence gets its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.core.backends import DraftJob, Proposal, Status, Verification, VerifyJob
from specdec.core.drafts import Draft
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.medusa.heads import HeadsConfig, MedusaHeads
from specdec.drafting.ngram import NgramOptions, Reading
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from specdec.engine.target import ModelTarget
from tests.specdec.engine.pairs import VOCAB_SIZE, Case, backend, collect, make_model

GREEDY = SamplingParams(temperature=0.0)
CASES = [Case((5, 9, 77, 31 + i), 20, GREEDY, seed=i, eos_token_ids=()) for i in range(4)]
FAULTY_SEED = 1


def target() -> ModelTarget:
    model_target: ModelTarget = backend(ModelTarget, make_model("llama"))
    return model_target


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What the target says without drafts."""
    return [output.tokens for output in collect(InProcessService(target(), None, 0), CASES)]


class WildDrafter:
    """A draft model that says a token which the target does not have, for one sequence."""

    max_model_len = 160

    def __init__(self, token: int) -> None:
        self.token = token

    def metrics(self) -> dict[str, float]:
        return {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        return [Proposal(Status.DECIDED, self.token if job.spec.seed == FAULTY_SEED else 7) for job in jobs]

    def rest(self) -> None:
        pass

    def rename(self, key: str, new_key: str) -> None:
        pass

    def release(self, key: str) -> None:
        pass


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1, 2**31])
def test_an_offered_token_that_the_target_does_not_have_fails_no_step(token: int, plain: list[list[int]]) -> None:
    service = InProcessService(target(), WildDrafter(token), 3)
    assert [output.tokens for output in collect(service, CASES)] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_suspects, counters.num_errors) == (0, 0, 0)


class WildTokens:
    """A drafter from tokens whose drafts begin well and end with a token that the target does not have."""

    is_long = True

    def __init__(self, spec: SequenceSpec, most: int) -> None:
        self.is_wild = spec.seed == FAULTY_SEED

    def draft(self, log: TokenLog, room: int, reading: Reading) -> Draft:
        # A tree, of which what comes before the bad token may be verified.
        return Draft(
            (3, 4, VOCAB_SIZE + 9, 5) if self.is_wild else (3,),
            source="wild",
            parents=(-1, 0, 1, 0)[: 1 + 3 * self.is_wild],
        )

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        pass


def test_what_comes_before_a_token_that_the_target_does_not_have_is_verified(plain: list[list[int]]) -> None:
    service = InProcessService(target(), None, 0, ngram=NgramOptions(3, new=WildTokens))
    assert [output.tokens for output in collect(service, CASES)] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_errors) == (0, 0)
    assert counters.num_draft_tokens > counters.num_drafts


class FaultyHeads(MedusaHeads):
    """Raises where it drafts for more sequences than it can."""

    error: BaseException = RuntimeError("a head fails")
    calls = 0
    most_rows = 0

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        type(self).calls += 1
        if len(states[0]) > self.most_rows:
            raise self.error
        return super().fuse(states)


def served_by(heads: MedusaHeads) -> InProcessService:
    return InProcessService(backend(ModelTarget, make_model("llama"), heads=(heads, 3, 0)), None, 0)


def make_heads(kind: type[MedusaHeads]) -> MedusaHeads:
    config = make_model("llama").config
    torch.manual_seed(0)
    heads: MedusaHeads = kind(HeadsConfig(config.hidden_size, config.vocab_size, 3)).eval().requires_grad_(False)
    return heads


def test_heads_that_raise_are_switched_off_and_what_was_decided_is_delivered(plain: list[list[int]]) -> None:
    class Faulty(FaultyHeads):
        pass

    service = served_by(make_heads(Faulty))
    assert [output.tokens for output in collect(service, CASES)] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_suspects, counters.num_errors) == (0, 0, 0)
    assert counters.num_drafts == 0
    assert Faulty.calls <= 3 * len(CASES), "they are asked no more"


def test_heads_that_fail_in_company_draft_for_each_alone(plain: list[list[int]]) -> None:
    class Faulty(FaultyHeads):
        most_rows = 1

    service = served_by(make_heads(Faulty))
    assert [output.tokens for output in collect(service, CASES)] == plain
    assert service.target.counters.num_drafts > 0


def test_heads_that_run_out_of_memory_rest_and_the_target_keeps_its_budget(plain: list[list[int]]) -> None:
    class Faulty(FaultyHeads):
        error = torch.OutOfMemoryError("CUDA out of memory")

    service = served_by(make_heads(Faulty))
    model_target = service.target._backend
    outputs = collect(service, CASES)
    assert [output.tokens for output in outputs] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_suspects, counters.num_errors) == (0, 0, 0)
    assert Faulty.calls == 1
    assert model_target._scheduler._budget == model_target._scheduler.max_num_batched_tokens


class FailsWithDrafts(ModelTarget):
    """A step fails if it verifies a draft of some sequences."""

    faulty: tuple[int, ...] = ()

    def _verify(self, jobs: Sequence[VerifyJob]) -> list[Verification]:
        results = super()._verify(jobs)
        if any(job.draft and job.spec.seed in self.faulty for job in jobs):
            raise RuntimeError("a kernel that verifies drafts")
        return results


@pytest.mark.parametrize("faulty", [(FAULTY_SEED,), (0, 1, 2, 3)])
def test_a_pair_whose_drafts_make_steps_fail_goes_on_without_them(
    faulty: tuple[int, ...], plain: list[list[int]]
) -> None:
    class Faulty(FailsWithDrafts):
        pass

    Faulty.faulty = faulty
    pair = PairedTarget(backend(Faulty, make_model("llama")), backend(ModelDrafter, make_model("llama")), 3)
    service = InProcessService(pair, None, 0)
    assert [output.tokens for output in collect(service, CASES)] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_suspects, counters.num_errors) == (0, 0, 0)
    assert pair.metrics()["num_failed_draft_steps"] == len(faulty) + 1
    assert (counters.num_drafts > 0) == (len(faulty) < len(CASES))


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1, 2**31])
def test_a_pair_outlives_tokens_that_the_target_does_not_have(token: int, plain: list[list[int]]) -> None:
    service = InProcessService(PairedTarget(target(), WildDrafter(token), 3), None, 0)
    assert [output.tokens for output in collect(service, CASES)] == plain
    counters = service.target.counters
    assert (counters.num_failed_steps, counters.num_suspects, counters.num_errors) == (0, 0, 0)
