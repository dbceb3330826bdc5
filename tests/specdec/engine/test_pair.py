"""A draft model in the target's process: tokens are the target's own, and no drafts cost nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from specdec.core.backends import DraftJob, Proposal, VerifyJob
from specdec.core.errors import DeviceLostError
from specdec.core.messages import Message
from specdec.core.params import SamplingParams
from specdec.drafting.length import DraftLengths
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.pair import PairedTarget
from specdec.engine.target import ModelTarget
from specdec.engine.timing import StepTimer
from tests.sizes import one_of_each
from tests.specdec.engine.pairs import (
    Case,
    backend,
    collect,
    make_draft,
    make_model,
    make_service,
    run,
)
from tests.specdec.engine.test_exactness import GREEDY, HALF_RIGHT, make_cases
from tests.specdec.engine.test_faults import POISON_SEED, raising
from tests.specdec.engine.test_faults import cases as cases_with_poison
from tests.specdec.operators import Operators

NOISE = HALF_RIGHT["llama"]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)


def pair(
    num_draft_tokens: int = 4,
    *,
    noise: float = NOISE,
    of_draft: dict[str, Any] | None = None,
    drafts_first: bool = False,
    **options: Any,
) -> PairedTarget:
    """A target with a draft model; ``of_draft`` are the draft's own options."""
    target = backend(ModelTarget, make_model("llama"), **options)
    drafter = backend(ModelDrafter, make_draft("llama", noise), **(options if of_draft is None else of_draft))
    return PairedTarget(target, drafter, num_draft_tokens, drafts_first=drafts_first)


def service(*args: Any, ngram: NgramOptions | None = None, **options: Any) -> InProcessService:
    """The same behind a router that knows of no drafter."""
    return InProcessService(pair(*args, **options), None, 0, ngram=ngram)


def plainly(cases: Sequence[Case]) -> list[list[int]]:
    return run(make_service("llama", NOISE, 0), cases)[0]


SCARCE = {"num_blocks": 20}
"""Room for one sequence, and no more."""
ROOMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "scarce": SCARCE,
    "scarce draft": {"of_draft": SCARCE},
    "short draft": {"of_draft": {"max_model_len": 30}},
}


SAMPLINGS = {"T0": GREEDY, "T1": SAMPLED}


@pytest.mark.parametrize(("of", "room"), one_of_each([*SAMPLINGS], [*ROOMS]))
def test_the_tokens_are_those_without_drafts(of: str, room: str) -> None:
    """With room, with sequences of either model preempted, and with a draft model that reads less."""
    sampling, options = SAMPLINGS[of], ROOMS[room]
    cases = make_cases(sampling, (None, 0, 1, 3, None))
    wanted = plainly(cases)
    service_ = service(**options)
    outputs, stats = run(service_, cases)
    assert outputs == wanted
    assert stats.num_accepted_tokens > (10 if "max_model_len" not in options.get("of_draft", {}) else 0)
    counters = service_.target.counters
    assert set(counters.by_source) == {"model"}
    assert counters.by_source["model"].num_draft_tokens == stats.num_draft_tokens
    paired = service_.target._backend
    for one in (paired._target, paired._drafter):
        assert one.metrics()["num_cached_sequences"] == 0
    assert (paired._drafter.metrics()["num_evictions"] > 0) == (SCARCE in (options, options.get("of_draft")))
    assert paired._sequences == {}


def test_the_tokens_are_those_without_drafts_of_a_model_that_gives_several_in_a_pass() -> None:
    """As PARD does; what this one makes of its mask tokens is of no use, but for the first of each draft."""
    cases = make_cases(SAMPLED, (None, 0, 1, 3, None))
    drafter = backend(partial(ModelDrafter, mask_token_id=1, num_step_tokens=3), make_draft("llama", 0.0))
    paired = PairedTarget(backend(ModelTarget, make_model("llama")), drafter, 4)
    with patch.object(drafter, "propose", side_effect=drafter.propose) as proposed:
        outputs, stats = run(InProcessService(paired, None, 0), cases)
    assert outputs == plainly(cases)
    assert stats.num_draft_tokens > proposed.call_count
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert paired._sequences == {}


@pytest.mark.parametrize(("drafts_first", "rounds", "accepted"), [(False, 5, 15), (True, 4, 16)])
def test_a_draft_is_verified_in_every_round(drafts_first: bool, rounds: int, accepted: int) -> None:
    """One that is always right: as many accepted as two processes in turn have, but for the first token's."""
    cases = [replace(case, max_tokens=20, eos_token_ids=()) for case in make_cases(SAMPLED)]
    service_ = service(4, noise=0.0, chunk=128, drafts_first=drafts_first)
    outputs, stats = run(service_, cases)
    assert outputs == run(make_service("llama", 0.0, 4), cases)[0]
    found = stats.num_rounds, stats.num_drafts, stats.num_accepted_tokens
    assert found == (rounds * len(cases), 4 * len(cases), accepted * len(cases))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T0", "T1"])
def test_it_drafts_what_two_processes_in_turn_do(sampling: SamplingParams) -> None:
    """A draft that is refused now and then is taken back: as many tokens are accepted in as many rounds."""
    cases = [replace(case, max_tokens=30, eos_token_ids=()) for case in make_cases(sampling)]
    found = run(service(4, chunk=128, drafts_first=True), cases)
    assert found == run(make_service("llama", NOISE, 4, chunk=128), cases)
    assert 0.1 < found[1].acceptance_rate < 0.9


def test_a_long_prompt_is_read_by_the_draft_beside_what_others_draft() -> None:
    rng = random.Random(2)
    cases = [
        Case(tuple(rng.randrange(3, 120) for _ in range(length)), 40, GREEDY, eos_token_ids=()) for length in (3, 70)
    ]
    service_ = service(2, noise=0.0)
    outputs = collect(service_, cases)
    assert [output.tokens for output in outputs] == plainly(cases)
    kinds = [bytes(output.notes.provenance) for output in outputs]
    assert min(len(set(kind)) for kind in kinds) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_match_goes_before_the_draft_model_and_a_short_one_does_not(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    cases = make_cases(sampling)
    wanted = plainly(cases)
    predicted = [replace(case, prediction=tuple(out[:9])) for case, out in zip(cases, wanted, strict=True)]
    service_ = service(ngram=NgramOptions(8))
    assert run(service_, predicted)[0] == wanted
    by_source = service_.target.counters.by_source
    assert min(by_source[name].num_accepted_tokens for name in ("prediction", "model")) > 10


class Counting(ModelDrafter):
    """Counts its steps."""

    num_steps = 0

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        self.num_steps += 1
        return super().propose(jobs)


def test_a_draft_model_that_nobody_asks_costs_no_operator() -> None:
    """Rounds of requests that take no drafts launch what they launch without a draft model, and no draft step."""
    cases = [replace(case, num_speculative_tokens=0) for case in make_cases(SAMPLED)]
    names: list[list[str]] = []
    for has_draft in (False, True):
        target = backend(ModelTarget, make_model("llama"))
        drafter = backend(Counting, make_draft("llama", NOISE))
        served = InProcessService(PairedTarget(target, drafter, 4) if has_draft else target, None, 0)
        with Operators() as operators:
            collect(served, cases)
        assert drafter.num_steps == 0
        names.append(operators.names)
    assert names[0] == names[1]


def test_a_drafter_that_nobody_asks_hears_of_its_leases_alone() -> None:
    """Of a process of its own, too: no sequence is opened on it, and it makes no step."""
    cases = [replace(case, num_speculative_tokens=0) for case in make_cases(SAMPLED)]
    served, heard = make_service("llama", NOISE, 4), Counter[str]()
    assert served.drafter is not None
    receive = served.drafter.receive

    def noting(message: Message, now_s: float) -> None:
        heard[type(message).__name__] += 1
        receive(message, now_s)

    served.drafter.receive = noting  # type: ignore[method-assign]
    run(served, cases)
    assert set(heard) <= {"Live"}, heard
    assert served.drafter.metrics()["num_steps"] == 0


@pytest.mark.parametrize("kind", ["row", "step"])
def test_what_goes_wrong_in_the_draft_model_costs_drafts_alone(kind: str) -> None:
    cases = cases_with_poison(0.0)
    wanted = plainly(cases)
    if kind == "row":
        broken = backend(ModelDrafter, make_draft("llama", NOISE), processors=(raising,))
    else:
        broken = backend(Failing, make_draft("llama", NOISE))
    served = InProcessService(PairedTarget(backend(ModelTarget, make_model("llama")), broken, 3), None, 0)
    outputs = collect(served, cases)
    assert [output.tokens for output in outputs] == wanted
    metrics = served.target.metrics()
    assert (metrics["num_errors"], metrics["num_suspects"], metrics["num_failed_steps"]) == (0, 0, 0)
    # Once in company, once alone; the others are drafted for again.
    assert served.target._backend.metrics()["num_failed_draft_steps"] == (2 if kind == "step" else 0)
    num_accepted = [sum(byte & 3 == 1 for byte in output.notes.provenance) for output in outputs]
    assert served.target.counters.num_accepted_tokens > 15, num_accepted
    assert broken.metrics()["num_cached_sequences"] == 0


class Failing(ModelDrafter):
    """A step fails as a whole where one sequence is in it, from its sixth token on."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        if any(job.spec.seed == POISON_SEED and job.num_committed >= job.spec.output_start + 5 for job in jobs):
            raise RuntimeError("no such kernel")
        return super().propose(jobs)


def test_a_device_that_is_lost_while_drafting_is_lost() -> None:
    class Lost(ModelDrafter):
        def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
            raise DeviceLostError("gone")

    served = InProcessService(
        PairedTarget(backend(ModelTarget, make_model("llama")), backend(Lost, make_model("llama")), 3), None, 0
    )
    with pytest.raises(DeviceLostError):
        collect(served, make_cases(GREEDY))


def test_a_step_of_the_target_that_fails_leaves_nothing_of_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried without them at once, by all its sequences; then they are drafted for again."""
    cases = make_cases(SAMPLED)
    served, calls = service(), list[int]()
    target = served.target._backend._target
    verify = target.verify

    def failing(jobs: Sequence[VerifyJob]) -> Any:
        calls.append(len(jobs))
        if len(calls) == 5:
            raise RuntimeError("no such kernel")
        return verify(jobs)

    monkeypatch.setattr(target, "verify", failing)
    assert run(served, cases)[0] == plainly(cases)
    counters = served.target.counters
    assert (counters.num_failed_steps, counters.num_suspects) == (0, 0)
    assert served.target._backend.metrics()["num_failed_draft_steps"] == 1
    assert counters.num_accepted_tokens > 15


def timed(seconds: Any) -> StepTimer:
    timer = StepTimer()
    for rows in range(1, 9):
        for tokens in range(rows, 17 * rows, rows):
            timer.add(rows, tokens, seconds(rows, tokens))
    return timer


@pytest.mark.parametrize(
    ("draft_s", "verify_s", "least", "most"),
    [(0.0, lambda rows, tokens: 1.0, 7.0, 16.0), (0.2, lambda rows, tokens: 1.0, 1.5, 5.0), (2.0, max, 0.0, 0.2)],
    ids=["free", "dear", "too dear"],
)
def test_how_much_is_drafted_is_what_both_step_times_are_worth(
    draft_s: float, verify_s: Any, least: float, most: float
):
    """E·t(1) / (t(K + 1) + K·d) is greatest at the chosen length."""
    cases = [replace(case, max_tokens=60, eos_token_ids=()) for case in make_cases(SAMPLED)]
    chooser = DraftLengths(timed(verify_s).metrics, timed(lambda rows, tokens: max(draft_s, 1e-6)).metrics)
    served = InProcessService(pair(16, noise=0.02, chunk=128), None, 0, chooser=chooser)
    assert run(served, cases)[0] == plainly(cases)
    counters = served.target.counters
    assert least <= counters.num_draft_tokens / counters.num_rounds <= most
    assert counters.num_drafts > 0
