"""Which tokens backends forward where a step has no room for all. Properties are in test_scheduler.py."""

from __future__ import annotations

import pytest

from specdec.core.backends import DraftJob, Status, Verification, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from tests.specdec.engine.pairs import Case, backend
from tests.specdec.models.families import VOCAB_SIZE, make_model

GREEDY = SamplingParams(temperature=0.0)
PROMPT_LENGTH = 8


def tokens_of(i: int, length: int = PROMPT_LENGTH) -> list[int]:
    return [(7 * i + j) % VOCAB_SIZE for j in range(length)]


def verify_job(i: int, num_drafted: int = 0, length: int = PROMPT_LENGTH) -> VerifyJob:
    log = TokenLog(tokens_of(i, length))
    spec = Case(tuple(tokens_of(i)), 100, GREEDY).spec(float(i))
    return VerifyJob(str(i), log, tuple(range(3, 3 + num_drafted)), spec)


def decoding(num_sequences: int, chunk: int) -> ModelTarget:
    """A target that has read so many prompts."""
    target = backend(ModelTarget, make_model("llama"), chunk=chunk)
    for i in range(num_sequences):
        statuses = [target.verify([verify_job(i)])[0].status for _ in range(PROMPT_LENGTH)]
        assert Status.DECIDED in statuses
    return target


def verify(target: ModelTarget, drafts: list[int]) -> list[Verification]:
    """A step in which sequence i, one token further, has a draft of so many tokens."""
    return target.verify([verify_job(i, count, PROMPT_LENGTH + 1) for i, count in enumerate(drafts)])


@pytest.mark.parametrize(
    ("drafts", "verified"),
    [
        ([4, 4, 4, 4], [3, 3, 3, 3]),
        ([8, 0, 8, 0], [6, 0, 6, 0]),
        ([1, 1, 9, 8], [1, 1, 5, 5]),
        ([1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_drafts_share_what_is_left_evenly(drafts: list[int], verified: list[int]) -> None:
    results = verify(decoding(4, chunk=16), drafts)
    assert [result.num_drafted for result in results] == verified
    assert all(result.status is Status.DECIDED for result in results)


def test_where_there_is_less_than_a_token_each_they_take_turns() -> None:
    target = decoding(4, chunk=6)
    jobs = [verify_job(i, 4, PROMPT_LENGTH + 1) for i in range(4)]
    verified = [[result.num_drafted for result in target.verify(jobs)] for _ in range(4)]
    assert all(sum(counts) == 2 for counts in verified)
    assert [sum(counts) for counts in zip(*verified, strict=True)] == [2] * 4


def test_a_step_has_no_more_rows_than_tokens() -> None:
    results = verify(decoding(6, chunk=4), [4] * 6)
    assert [result.status for result in results] == [Status.DECIDED] * 4 + [Status.WAITING] * 2
    assert sum(result.num_drafted for result in results) == 0


def test_a_prompt_is_read_beside_drafts_that_would_take_all_room() -> None:
    target = decoding(4, chunk=16)
    others = [verify_job(i, 16, PROMPT_LENGTH + 1) for i in range(4)]
    statuses = [target.verify([*others, verify_job(9)])[4].status for _ in range(2)]
    assert statuses == [Status.PREFILLING, Status.DECIDED]


def test_a_first_token_comes_with_the_first_step_that_has_room_for_its_prompt() -> None:
    target = backend(ModelTarget, make_model("llama"), chunk=20)
    waiting, came = list(range(6)), []
    while waiting:
        results = target.verify([verify_job(i) for i in waiting])
        came.append([i for i, result in zip(waiting, results, strict=True) if result.status is Status.DECIDED])
        waiting = [i for i in waiting if i not in came[-1]]
    assert came == [[0, 1], [2, 3, 4], [5]], "of 8 tokens each, in order of arrival, the third begun in the first step"


def test_drafts_have_what_prompts_leave() -> None:
    target = decoding(1, chunk=16)
    results = target.verify([verify_job(0, 12, PROMPT_LENGTH + 1), verify_job(9, length=3)])
    assert [result.num_drafted for result in results] == [12, 0]
    assert all(result.status is Status.DECIDED for result in results)


def test_a_prompt_leaves_the_other_chains_and_branches_a_token_each() -> None:
    drafter = backend(ModelDrafter, make_model("llama"), chunk=12)
    first = DraftJob("0", tokens_of(0), verify_job(0).spec)
    assert drafter.propose([first])[0].status is Status.DECIDED
    branches = [DraftJob(f"0#{n}", [*tokens_of(0), n], first.spec, 8, 8, "0") for n in range(4)]
    prompt = DraftJob("1", tokens_of(1, 8 + 8), verify_job(1).spec)
    for of_prompt in (Status.PREFILLING, Status.DECIDED):
        statuses = [proposal.status for proposal in drafter.propose([prompt, *branches])]
        assert statuses == [of_prompt, *[Status.DECIDED] * 4]


def test_a_step_drafts_for_as_many_chains_as_it_has_tokens() -> None:
    drafter = backend(ModelDrafter, make_model("llama"), chunk=4)
    jobs = [DraftJob(str(i), tokens_of(i, 1), verify_job(i).spec) for i in range(6)]
    statuses = [proposal.status for proposal in drafter.propose(jobs)]
    assert statuses == [Status.DECIDED] * 4 + [Status.WAITING] * 2
