"""Who gets room on a model whose blocks do not suffice for all: by priority, then those that came first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.cache.blocks import BlockPool
from specdec.cache.recurrent.slots import Window
from specdec.core.backends import DraftJob, Status, VerifyJob
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.sequences import BRANCH, DECIDED, DRAFTED, SequenceStates, rank_of
from specdec.engine.target import ModelTarget
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import Case, Output, deliver, make_service, run, start
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import make_recurrent

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


def spec(arrival_s: float, priority: int = 0) -> object:
    return Case((1, 2, 3), 100, GREEDY, priority=priority).spec(arrival_s)


def prompt(start: int, length: int) -> list[int]:
    return [(start + i) % VOCAB_SIZE for i in range(length)]


def runner(num_blocks: int) -> ModelRunner:
    loaded = prepare_model(make_model("llama"), "llama")
    return ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)


@pytest.fixture
def shared() -> tuple[ModelDrafter, ModelTarget, SequenceStates]:
    """A drafter and a target over one model with eight blocks, as on a draft worker."""
    model = runner(8)
    states = SequenceStates(model)
    sampler = Sampler(model.vocab_size)
    lengths = {"max_model_len": 32, "max_num_batched_tokens": 64}
    return (
        ModelDrafter(model, sampler, states=states, **lengths),
        ModelTarget(model, sampler, states=states, **lengths),
        states,
    )


def verify_job(
    key: str, start: int, length: int, arrival_s: float, draft: tuple[int, ...] = (), priority: int = 0
) -> VerifyJob:
    return VerifyJob(key, TokenLog(prompt(start, length)), draft, spec(arrival_s, priority))


def draft_job(
    key: str, start: int, length: int, arrival_s: float, fork_of: str | None = None, priority: int = 0
) -> DraftJob:
    tokens = prompt(start, length)
    return DraftJob(key, tokens, spec(arrival_s, priority), length - 1 if fork_of else 0, length, fork_of)


def test_a_prompts_first_token_tells_how_much_of_it_was_not_read() -> None:
    model = runner(16)
    target = ModelTarget(model, Sampler(model.vocab_size), max_model_len=32, max_num_batched_tokens=64)

    def fits(key: str, length: int) -> int:
        job = VerifyJob(key, TokenLog(prompt(1, length)), (), Case(tuple(prompt(1, length)), 9, GREEDY).spec(0.0))
        (result,) = target.verify([job])
        job.log.extend(result.run)
        (later,) = target.verify([job])
        assert (result.status, later.num_cached_tokens) == (Status.DECIDED, 0)
        target.release(key)
        return result.num_cached_tokens

    assert fits("first", 11) == 0
    assert fits("again", 11) == 2 * BLOCK_SIZE
    assert fits("shorter", 6) == BLOCK_SIZE


@pytest.mark.parametrize(
    ("held", "wanted", "keeps"),
    [((0, 0.0), (0, 1.0), True), ((0, 1.0), (0, 0.0), False), ((1, 0.0), (0, 1.0), False), ((-1, 1.0), (0, 0.0), True)],
)
def test_without_work_the_first_in_order_keeps_its_room_and_another_yields(
    shared: tuple, held: tuple[int, float], wanted: tuple[int, float], keeps: bool
) -> None:
    _, target, states = shared
    assert target.verify([verify_job("held", 1, 24, held[1], priority=held[0])])[0].status is Status.DECIDED
    status = target.verify([verify_job("wanted", 5, 20, wanted[1], priority=wanted[0])])[0].status
    assert status is (Status.WAITING if keeps else Status.DECIDED)
    assert [states.num_computed_tokens(key) for key in ("held", "wanted")] == ([24, 0] if keeps else [0, 20])
    assert states.num_evictions == (not keeps)


@pytest.mark.parametrize("is_older", [True, False])
def test_what_a_model_decides_itself_has_room_before_what_it_drafts(shared: tuple, is_older: bool) -> None:
    drafter, target, states = shared
    drafted_s, own_s = (0.0, 1.0) if is_older else (1.0, 0.0)
    assert drafter.propose([draft_job("drafted", 1, 24, drafted_s)])[0].status is Status.DECIDED
    assert target.verify([verify_job("own", 5, 20, own_s)])[0].status is Status.DECIDED
    assert [states.num_computed_tokens(key) for key in ("drafted", "own")] == [0, 20]
    assert drafter.propose([draft_job("drafted", 1, 24, drafted_s)])[0].status is Status.WAITING


def test_whoever_waits_holds_nothing(shared: tuple) -> None:
    """A prompt whose prefix is cached must not keep that prefix from the others while it waits."""
    _, target, states = shared
    target.verify([verify_job("gone", 1, 17, 0.0)])
    target.release("gone")
    target.verify([verify_job("old", 50, 16, 1.0)])
    assert target.verify([verify_job("new", 1, 24, 2.0)])[0].status is Status.WAITING
    assert states.metrics()["kv_blocks_in_use"] == 4


def test_the_newest_prompt_waits_while_an_older_one_is_read() -> None:
    """Decoding rows that came later must not keep an older sequence from being read again."""
    model = runner(8)
    target = ModelTarget(model, Sampler(model.vocab_size), max_model_len=32, max_num_batched_tokens=64)
    assert target.verify([verify_job("new", 5, 18, 1.0)])[0].status is Status.DECIDED
    results = target.verify([verify_job("old", 9, 20, 0.0), verify_job("new", 5, 19, 1.0, draft=(7, 8))])
    assert [result.status for result in results] == [Status.DECIDED, Status.WAITING]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_prompt_waits_for_one_of_a_worse_priority_only_while_that_one_is_read_in_its_place(drafts: bool) -> None:
    """All of the prompt is common: it is read once, and none comes between the two."""
    model, options = runner(60), {"max_model_len": 64, "max_num_batched_tokens": 8}
    states = SequenceStates(model)
    drafter = ModelDrafter(model, Sampler(model.vocab_size), states=states, **options)
    target = ModelTarget(model, Sampler(model.vocab_size), states=states, **options)

    def step(*sequences: tuple[str, int, int]) -> None:
        if drafts:
            drafter.propose([draft_job(key, start, 40, 0.0, priority=priority) for key, start, priority in sequences])
        else:
            target.verify([verify_job(key, start, 40, 0.0, priority=priority) for key, start, priority in sequences])

    step(("begun", 1, 5))
    held: list[list[int]] = []
    for _ in range(6):
        step(("best", 1, 0), ("between", 50, 1), ("begun", 1, 5))
        held.append([states.num_computed_tokens(key) for key in ("best", "between", "begun")])
    assert held[:2] == [[0, 0, 16], [0, 0, 24]]
    assert held[-1][0] == 40, "then it is read"


def test_drafts_shrink_before_anybody_yields() -> None:
    model = runner(8)
    target = ModelTarget(model, Sampler(model.vocab_size), max_model_len=32, max_num_batched_tokens=64)
    job = verify_job("a", 1, 15, 0.0, draft=tuple(range(1, 9)))
    assert target.verify([job])[0].num_drafted == 8
    results = target.verify([job, verify_job("b", 9, 15, 1.0)])
    assert [result.status for result in results] == [Status.DECIDED] * 2
    assert results[0].num_drafted == 1


def test_a_branch_begins_with_its_sequences_state_and_yields_first(shared: tuple) -> None:
    drafter, _, states = shared
    drafter.propose([draft_job("s", 1, 14, 0.0)])
    branch = draft_job("s#1", 1, 12, 0.0, fork_of="s")
    assert drafter.propose([branch])[0].status is Status.DECIDED
    assert states.num_computed_tokens("s#1") == 12
    assert states.metrics()["kv_blocks_in_use"] == 5  # three shared, one of each
    assert drafter.propose([draft_job("later", 50, 16, 5.0)])[0].status is Status.DECIDED
    assert drafter.propose([draft_job("last", 30, 8, 6.0)])[0].status is Status.WAITING
    assert states.num_computed_tokens("s") == 14


def test_a_promoted_branch_takes_its_sequences_place(shared: tuple) -> None:
    drafter, _, states = shared
    drafter.propose([draft_job("s", 1, 14, 0.0)])
    drafter.propose([draft_job("s#1", 1, 12, 0.0, fork_of="s")])
    drafter.rename("s#1", "s")
    drafter.rename("unknown", "s")
    assert states.num_computed_tokens("s") == 12
    assert states.num_computed_tokens("s#1") == 0
    assert len(states) == 1
    assert drafter.propose([draft_job("later", 50, 24, 5.0)])[0].status is Status.WAITING
    assert states.num_computed_tokens("s") == 12
    drafter.release("s")
    assert states.metrics()["kv_blocks_in_use"] == 0


def test_branches_come_after_all_sequences() -> None:
    assert rank_of("s#1", spec(0.0), BRANCH) > rank_of("other", spec(9.0), DRAFTED)
    specs = (("a", spec(1.0)), ("b", spec(1.0)), ("a", spec(2.0)), ("a", spec(0.0, 1)))
    ranks = [rank_of("z", spec(9.0, 1), DECIDED), *(rank_of(key, one, DRAFTED) for key, one in specs)]
    assert ranks == sorted(ranks)


def finished(
    service: InProcessService, cases: list[Case], late: Case | None = None
) -> tuple[list[int], list[list[int]]]:
    """In which order the cases end, the late one begun after three rounds, and each one's tokens."""
    outputs = {name: Output() for name in start(service, cases)}
    ended: list[str] = []
    for number in range(1000):
        if number == 3 and late is not None:
            service.start("late", late.prompt, late.spec(arrival_s=9.0))
            outputs["late"] = Output()
        deliver(service, outputs)
        ended += [name for name, one in outputs.items() if one.finish is not None and name not in ended]
        if len(ended) == len(cases) + (late is not None):
            return [list(outputs).index(name) for name in ended], [one.tokens for one in outputs.values()]
    raise AssertionError("never finished")


def test_priorities_change_who_comes_first_and_no_token() -> None:
    """Room for one: a later request of a better priority overtakes who waits, and who runs yields to it."""
    hot = SamplingParams(temperature=1.0)
    *cases, late = [Case(tuple(prompt(3 * i, 40)), 20, (GREEDY, hot)[i % 2], seed=i) for i in range(4)]
    _, plain = finished(make_service("llama", 0.06, 4), [*cases, late])
    scarce = {"num_blocks": 20}
    assert finished(make_service("llama", 0.06, 4, **scarce), cases, late) == ([0, 1, 2, 3], plain)
    ranked = [replace(case, priority=priority) for case, priority in zip(cases, (7, 1, 0), strict=True)]
    service = make_service("llama", 0.06, 4, **scarce)
    assert finished(service, ranked, replace(late, priority=-1)) == ([3, 2, 1, 0], plain)
    assert service.target._backend.metrics()["num_evictions"] > 0


def test_nobody_is_evicted_in_vain() -> None:
    """A draft model with room for few: the first of those that do not fit must not take turns with those behind it."""
    cases = [Case(tuple(range(3 + i, 3 + i + length)), 30, GREEDY) for i, length in enumerate((40, 60, 50, 70, 33))]
    plain, _ = run(make_service("llama", 0.06, 0), cases)
    scarce, _ = run(make_service("llama", 0.06, 4, num_blocks=42), cases)
    assert scarce == plain


def test_whoever_waits_again_keeps_what_it_had(shared: tuple) -> None:
    _, target, states = shared
    assert target.verify([verify_job("new", 1, 12, 1.0)])[0].status is Status.DECIDED
    assert target.verify([verify_job("old", 50, 20, 0.0)])[0].status is Status.DECIDED
    assert target.verify([verify_job("new", 1, 16, 1.0)])[0].status is Status.WAITING
    assert states.num_computed_tokens("new") == 12
    assert states.num_evictions == 0


@pytest.mark.parametrize(("window", "finds_all"), [(8, True), (4, False)])
def test_a_prompt_of_any_length_is_found_again_where_states_reach_back_a_block(window: int, finds_all: bool) -> None:
    loaded = prepare_model(make_recurrent("falcon_h1"), "falcon_h1")
    model = ModelRunner(loaded, num_blocks=64, block_size=8, num_state_slots=16, window=Window(window))
    target = ModelTarget(model, Sampler(model.vocab_size), max_model_len=64, max_num_batched_tokens=64)
    found = {}
    for length in range(17, 25):
        tokens = [(length + 3 * i) % VOCAB_SIZE for i in range(length)]
        for key in ("first", "again"):
            job = VerifyJob(f"{key} {length}", TokenLog(tokens), (), Case(tuple(tokens), 9, GREEDY).spec(0.0))
            (result,) = target.verify([job])
            target.release(job.key)
        found[length] = result.num_cached_tokens
    whole_blocks = {length: (length - 1) // 8 * 8 for length in found}
    assert (found == whole_blocks) is finds_all, found


def test_prompts_that_wait_for_room_are_looked_up_once_and_take_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin alike with one that decodes. What that one adds to the cache costs each of them one look at most."""
    model = runner(24)
    target = ModelTarget(model, Sampler(model.vocab_size), max_model_len=64, max_num_batched_tokens=64)
    common = prompt(1, 40)
    looked, reused = list[int](), list[int]()
    find_prefix, reuse_prefix = BlockPool.find_prefix, BlockPool.reuse_prefix

    def count_find(self: BlockPool, *args: Any, **named: Any) -> int:
        looked.append(1)
        return find_prefix(self, *args, **named)

    def count_reuse(self: BlockPool, *args: Any, **named: Any) -> int:
        reused.append(1)
        return reuse_prefix(self, *args, **named)

    monkeypatch.setattr(BlockPool, "find_prefix", count_find)
    monkeypatch.setattr(BlockPool, "reuse_prefix", count_reuse)

    def job(i: int) -> VerifyJob:
        tokens = (*common, *prompt(i, 20))
        return VerifyJob(str(i), TokenLog(tokens), (), Case(tokens, 60, GREEDY).spec(float(i)))

    def step() -> list[Status]:
        results = target.verify(jobs)
        for each, result in zip(jobs, results, strict=True):
            each.log.extend(result.run)
        return [result.status for result in results]

    jobs = [job(0)]
    assert step() == [Status.DECIDED]
    jobs += [job(i) for i in range(1, 31)]
    assert step().count(Status.DECIDED) == 2, "one more has room"
    looked.clear()
    reused.clear()
    num_looked = list[int]()
    for _ in range(7):
        statuses = step()
        assert statuses.count(Status.WAITING) == 29
        num_looked.append(len(looked))
        looked.clear()
    assert reused == []
    assert max(num_looked) <= 17
    assert sorted(num_looked)[:4] == [0] * 4, "nothing is looked up while the cache has nothing new"
