"""Drafts that real backends cannot verify, or that fail while they are made: each sequence gets its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.drafts import Draft
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.ngram import NgramOptions, Reading
from specdec.engine.engine import InProcessService
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
