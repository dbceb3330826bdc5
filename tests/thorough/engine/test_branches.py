"""Branches over real models: whatever the drafter prepares, and whenever it comes, no token changes."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from specdec.core.backends import DraftJob, Status
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.target import ModelTarget
from tests.letters import spelled
from tests.sizes import sized, some
from tests.specdec.engine.overlap import OverlapService
from tests.specdec.engine.pairs import Case, backend, collect, make_draft, make_model, make_service, run
from tests.specdec.engine.test_exactness import HALF_RIGHT, make_cases

NOISE = HALF_RIGHT["llama"]
PLANS = [(1, 0), (1, 4), (4, 0), (4, 4), (4, 16)]


def make_overlap(
    num_draft_tokens: int, num_branches: int, draft_steps: Callable[[], int], **options: int
) -> OverlapService:
    plan = Plan(num_draft_tokens, num_branches, acceptance_rate=0.5)
    target = backend(ModelTarget, make_model("llama"))
    drafter = backend(ModelDrafter, make_draft("llama", NOISE), chunk=128, **options)
    return OverlapService(target, drafter, plan, draft_steps)


def ahead_at_random(seed: int) -> Callable[[], int]:
    rng = random.Random(seed)
    return lambda: rng.randrange(9)


@pytest.fixture(scope="module", params=some([0.0, 1.0]))
def reference(request: pytest.FixtureRequest) -> tuple[list[Case], list[list[int]]]:
    """Cases, and what the target says of them without a draft."""
    cases = make_cases(SamplingParams(temperature=request.param, top_p=0.95))
    return cases, run(make_service("llama", NOISE, 0), cases)[0]


@pytest.mark.parametrize(("num_draft_tokens", "num_branches"), some(PLANS, 3))
def test_tokens_are_those_of_plain_decoding(num_draft_tokens: int, num_branches: int, reference: tuple) -> None:
    cases, wanted = reference
    num_hits = 0
    for seed in range(sized(1, 3)):
        service = make_overlap(num_draft_tokens, num_branches, ahead_at_random(seed))
        outputs = collect(service, cases)
        assert [output.tokens for output in outputs] == wanted
        letters = Counter("".join(spelled(output.notes) for output in outputs))
        assert letters["a"] > 5
        assert letters["a"] == service.target.counters.num_accepted_tokens
        num_hits += service.target.counters.num_branch_hits
        assert (service.drafter.counters.num_promoted > 0) == (num_branches > 0)
    assert (num_hits > sized(4, 20)) == (num_branches > 0)


@pytest.mark.parametrize("num_blocks", [45, 60, 70])
def test_where_room_is_short_branches_yield_and_no_token_changes(num_blocks: int, reference: tuple) -> None:
    cases, wanted = reference
    service = make_overlap(4, 16, lambda: 6, num_blocks=num_blocks)
    outputs, stats = run(service, cases)
    assert outputs == wanted
    assert service.drafter._backend.metrics()["num_evictions"] > 2
    assert stats.num_accepted_tokens > 5


def test_branches_prepare_more_drafts() -> None:
    """The drafter has time for one round: without branches only a chain that was accepted in full goes on."""
    cases = make_cases(SamplingParams(temperature=1.0))
    shares = []
    for num_branches in (0, 16):
        service = make_overlap(4, num_branches, lambda: 6)
        run(service, cases)
        shares.append(service.target.counters.num_drafts / service.target.counters.num_rounds)
    assert shares[1] > 1.3 * shares[0]


def test_nothing_is_held_after_the_end() -> None:
    service = make_overlap(4, 16, lambda: 5)
    run(service, make_cases(SamplingParams()))
    assert service.drafter._backend.metrics()["num_cached_sequences"] == 0
    assert service.drafter._backend.metrics()["kv_blocks_in_use"] == 0


# Forks in the draft model's caches.

TOKENS = [5, 9, 77, 31, 8, 40, 3, 66, 12]
SPEC = Case((5, 9, 77), 50, SamplingParams()).spec()


def job(key: str, tokens: list[int], agreed: int = 0, fork_of: str | None = None) -> DraftJob:
    return DraftJob(key, tokens, SPEC, agreed, 3, fork_of, num_guesses=3)


def drafter(**options: int) -> ModelDrafter:
    return backend(ModelDrafter, make_model("llama"), **options)


def from_nothing(tokens: list[int]) -> tuple:
    (proposal,) = drafter().propose([job("s", tokens)])
    return proposal.token, proposal.guesses


@pytest.mark.parametrize("position", [5, 7, 8])
def test_a_branch_reads_on_from_a_copy_of_its_sequence(position: int) -> None:
    model = drafter()
    model.propose([job("s", TOKENS)])
    branch, chain = [*TOKENS[:position], 50], [*TOKENS, 21]
    other = [*TOKENS[:position], 51]
    jobs = [job("s", chain, 9), job("s#0", branch, position, "s"), job("s#1", other, position, "s")]
    proposals = model.propose(jobs)
    for proposal, tokens in zip(proposals, (chain, branch, other), strict=True):
        assert (proposal.token, proposal.guesses) == from_nothing(tokens)
    model.rename("s#1", "s")
    model.release("s#0")
    after = [*other, 33, 34]
    assert model.metrics()["num_cached_sequences"] == 1
    (proposal,) = model.propose([job("s", after, position)])
    assert (proposal.token, proposal.guesses) == from_nothing(after)


def test_a_branch_without_its_sequence_waits_and_no_prompt_is_read_for_it() -> None:
    model = drafter()
    waiting = job("s#0", [*TOKENS[:5], 50], 5, "s")
    assert model.propose([waiting])[0].status is Status.WAITING
    assert model.metrics()["num_cached_sequences"] == 0
    model.propose([job("s", TOKENS)])
    assert model.propose([waiting])[0].status is Status.DECIDED


def test_a_branch_that_was_taken_begins_again() -> None:
    """Room for one branch: the second sequence takes it, and the branch is copied anew when that is gone."""
    model = drafter(num_blocks=4)
    model.propose([job("s", TOKENS)])
    branch = [*TOKENS, 50]
    (proposal,) = model.propose([job("s#0", branch, 9, "s")])
    assert proposal.status is Status.DECIDED
    assert model.propose([job("t", [7, 8, 9])])[0].status is Status.DECIDED
    longer = job("s#0", [*branch, 51], 9, "s")
    assert model.propose([longer])[0].status is Status.WAITING
    model.release("t")
    (proposal,) = model.propose([longer])
    assert (proposal.token, proposal.guesses) == from_nothing([*branch, 51])
