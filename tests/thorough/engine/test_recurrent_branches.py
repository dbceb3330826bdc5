"""Branches of a draft with recurrent layers take a state slot each: no token changes, no prompt is read twice."""

import random
from collections.abc import Callable

import pytest

from specdec.cache.blocks import CachedSequence
from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.sampling.pipeline import Sampler
from tests.sizes import some
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Case, add_noise, make_model, run
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.thorough.engine.test_recurrent import NOISE, in_use, make_cases, make_runner, make_service

FAMILY = "qwen3_5"
LENGTHS = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)


def make_overlap(target: ModelRunner, draft: ModelRunner, plan: Plan, draft_steps: Callable[[], int]) -> OverlapService:
    verifying = ModelTarget(target, Sampler(VOCAB_SIZE), **LENGTHS)
    return OverlapService(verifying, ModelDrafter(draft, Sampler(VOCAB_SIZE), **LENGTHS), plan, draft_steps)


def draft_runner(num_state_slots: int, family: str = FAMILY) -> ModelRunner:
    return make_runner(add_noise(make_recurrent(family), NOISE), num_state_slots)


def target_runner(family: str) -> ModelRunner:
    return make_runner(make_model(family) if family == "llama" else make_recurrent(family))


def ahead_at_random(seed: int) -> Callable[[], int]:
    rng = random.Random(seed)
    return lambda: rng.randrange(9)


def note_rows(runner: ModelRunner) -> list[tuple[int, int]]:
    """A list that grows with every row that is read: tokens cached before, and tokens read."""
    rows, forward = list[tuple[int, int]](), runner.forward

    def noting(inputs: list[RowInput], **more: object) -> object:
        rows.extend((len(row.sequence), len(row.tokens)) for row in inputs)
        return forward(inputs, **more)  # type: ignore[arg-type]

    runner.forward = noting  # type: ignore[method-assign, assignment]
    return rows


def count_refused(runner: ModelRunner) -> list[int]:
    """One number, of the forks that found no slot."""
    count, fork = [0], runner.fork

    def counting(sequence: CachedSequence) -> CachedSequence:
        forked = fork(sequence)
        count[0] += len(forked) < len(sequence)
        return forked

    runner.fork = counting  # type: ignore[method-assign]
    return count


def refused(sequence: CachedSequence) -> CachedSequence:
    raise AssertionError("copied in vain")


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def job(key: str, tokens: list[int], num_committed: int, arrival_s: float, fork_of: str | None = None) -> DraftJob:
    spec = Case(tuple(tokens[:num_committed]), 50, SamplingParams()).spec(arrival_s)
    return DraftJob(key, tokens, spec, num_committed if fork_of else 0, num_committed, fork_of, num_guesses=2)


def statuses(proposals: list[Proposal]) -> list[Status]:
    return [proposal.status for proposal in proposals]


def test_a_branch_without_a_slot_waits_and_no_other_branch_is_lost_for_it() -> None:
    """The older sequence's branch comes later: the newer one's keeps the only slot that is left."""
    runner = draft_runner(3)
    rows, drafter = note_rows(runner), ModelDrafter(runner, Sampler(VOCAB_SIZE), **LENGTHS)
    old, new = tokens_of(1, 30), tokens_of(2, 20)
    drafter.propose([job("old", old, 30, 0.0), job("new", new, 20, 1.0)])
    branches = [job("old#0", [*old, 5], 30, 0.0, "old"), job("new#0", [*new, 6], 20, 1.0, "new")]
    assert statuses(drafter.propose(branches[1:])) == [Status.DECIDED]
    assert statuses(drafter.propose([branches[0], job("new#0", [*new, 6, 7], 20, 1.0, "new")])) == [
        Status.WAITING,
        Status.DECIDED,
    ]
    gauges = drafter.metrics()
    assert (gauges["num_evictions"], gauges["num_state_slots"], gauges["state_slots_in_use"]) == (0, 3, 3)
    drafter.release("new#0")
    (proposal,) = drafter.propose(branches[:1])
    assert rows == [(0, 30), (0, 20), (20, 1), (21, 1), (30, 1)]
    alone = ModelDrafter(draft_runner(3), Sampler(VOCAB_SIZE), **LENGTHS)
    (wanted,) = alone.propose([job("alone", [*old, 5], 30, 0.0)])
    assert proposal.token == wanted.token


def test_a_branch_from_before_the_window_waits_and_nothing_is_copied_for_it() -> None:
    runner = draft_runner(8)
    runner.fork = refused  # type: ignore[method-assign]
    rows, drafter = note_rows(runner), ModelDrafter(runner, Sampler(VOCAB_SIZE), **LENGTHS)
    tokens = tokens_of(1, 64)
    drafter.propose([job("s", tokens, 40, 0.0)])
    assert statuses(drafter.propose([job("s#0", [*tokens[:40], 5], 40, 0.0, "s")])) == [Status.WAITING]
    assert rows == [(0, 64)]
    assert drafter.metrics()["num_reread_tokens"] == 0
    assert in_use(runner)[1] == 1


@pytest.mark.parametrize("num_branches", [1, 4])
def test_two_sequences_and_one_slot_for_branches_read_each_prompt_once(num_branches: int) -> None:
    draft = draft_runner(3)
    rows, cases = note_rows(draft), make_cases(SAMPLED)[1:3]
    service = make_overlap(target_runner(FAMILY), draft, Plan(3, num_branches), lambda: 6)
    run(service, cases)
    assert service.drafter.counters.num_promoted > 0
    assert [row for row in rows if row[0] == 0] == [(0, len(case.prompt)) for case in cases]
    assert service.drafter._backend.metrics()["num_evictions"] == 0
    assert in_use(draft) == (0, 0)


@pytest.fixture(scope="module", params=[("qwen3_5", "qwen3_5"), ("bamba", "bamba"), ("llama", "qwen3_5")], ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[str, str, list[list[int]]]:
    """Families of a target and its draft, and what the target says to the cases without a draft."""
    target, draft = request.param
    service = make_service(target_runner(target), draft_runner(8, draft), 0)
    return target, draft, run(service, make_cases(SAMPLED))[0]


@pytest.mark.parametrize("num_slots", some([64, 6, 3], 2))
def test_tokens_are_those_of_plain_decoding(pair: tuple[str, str, list[list[int]]], num_slots: int) -> None:
    """Slots for all branches of four sequences, for two branches, and not even for all sequences."""
    target_family, draft_family, wanted = pair
    target, draft = target_runner(target_family), draft_runner(num_slots, draft_family)
    num_refused = count_refused(draft)
    service = make_overlap(target, draft, Plan(4, 8, acceptance_rate=0.5), ahead_at_random(num_slots))
    outputs, stats = run(service, make_cases(SAMPLED))
    assert outputs == wanted
    assert stats.num_draft_tokens > 5
    assert service.drafter.counters.num_promoted > 0
    assert (num_refused[0] > 0) == (num_slots < 64)
    assert in_use(target) == in_use(draft) == (0, 0)
