"""Models with recurrent layers as targets and as drafts: the output is the target's own."""

import random

import pytest

import specdec.executor.recurrence as recurrence_module
from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import checked_window
from specdec.core.params import SamplingParams
from specdec.drafting.heads import DraftHeads, with_heads
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.results import SpecStats
from specdec.engine.sequences import DECIDED, SequenceStates
from specdec.engine.target import ModelTarget
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.sampling.pipeline import Sampler
from tests.specdec.engine.pairs import (
    MAX_MODEL_LEN,
    Case,
    add_noise,
    assert_same,
    greedy,
    make_draft,
    make_model,
    run,
)
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.specdec.models.rounds import whole_forwards
from tests.thorough.models.test_recurrent import EVERY_ONE, ONE_OF_A_KIND, TOLERANCE, keep_refused

GREEDY = SamplingParams(temperature=0.0)
NOISE = 0.05
"""What makes a draft of a family's twin half right."""


def make_runner(
    model: object, num_state_slots: int = 8, num_blocks: int = 300, heads: DraftHeads | None = None
) -> ModelRunner:
    loaded = prepare_model(model, "tiny")
    loaded = loaded if heads is None else with_heads(loaded, heads)
    window = checked_window(18)
    return ModelRunner(loaded, num_blocks=num_blocks, block_size=4, num_state_slots=num_state_slots, window=window)


def make_service(target: ModelRunner, draft: ModelRunner, num_draft_tokens: int = 4) -> InProcessService:
    lengths = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 16}
    return InProcessService(
        ModelTarget(target, Sampler(VOCAB_SIZE), **lengths),
        ModelDrafter(draft, Sampler(VOCAB_SIZE), **lengths),
        num_draft_tokens,
    )


def make_cases(sampling: SamplingParams = GREEDY, draft_lengths: tuple[int | None, ...] = (None,)) -> list[Case]:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (1, 5, 37, 18)]
    return [
        Case(prompt, 16 + 3 * i, sampling, seed=i, num_speculative_tokens=draft_lengths[i % len(draft_lengths)])
        for i, prompt in enumerate(prompts)
    ]


def in_use(runner: ModelRunner) -> tuple[int, int]:
    return runner.pool.num_in_use, 0 if runner.states is None else runner.states.num_in_use


@pytest.mark.parametrize("family", EVERY_ONE)
def test_greedy_output_is_that_of_transformers(family: str) -> None:
    """Target and draft are of the family, and drafts are sometimes right and sometimes wrong."""
    target = make_runner(make_recurrent(family))
    draft = make_runner(add_noise(make_recurrent(family), NOISE))
    cases = make_cases()
    outputs, stats = run(make_service(target, draft), cases)
    stock = make_recurrent(family)
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert len({token for output in outputs for token in output}) > 8
    assert 0.05 < stats.acceptance_rate < 0.9, stats
    assert in_use(target) == in_use(draft) == (0, 0)


@pytest.mark.parametrize("family", EVERY_ONE)
@pytest.mark.parametrize("hybrid", ["target", "draft"])
def test_hybrids_pair_with_plain_models(family: str, hybrid: str) -> None:
    """The drafts of another model are refused nearly always: every round rolls back."""
    models = [make_recurrent(family), make_model("llama")]
    target, draft = models if hybrid == "target" else reversed(models)
    cases = make_cases(draft_lengths=(1, 2, 5, 8))
    outputs, stats = run(make_service(make_runner(target), make_runner(draft)), cases)
    stock = make_recurrent(family) if hybrid == "target" else make_model("llama")
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_a_seed_gives_the_same_tokens_with_and_without_drafts(family: str) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    outputs = []
    for num_draft_tokens in (0, 1, 4):
        target = make_runner(make_recurrent(family))
        draft = make_runner(add_noise(make_recurrent(family), NOISE))
        outputs.append(run(make_service(target, draft, num_draft_tokens), make_cases(sampling))[0])
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_a_draft_that_is_rolled_back_proposes_what_one_proposes_that_reads_all_again(family: str) -> None:
    def play(draft: ModelRunner) -> tuple[SpecStats, float]:
        service = make_service(make_runner(make_recurrent(family)), draft, 5)
        stats = run(service, make_cases())[1]
        assert service.drafter is not None
        return stats, service.drafter._backend.metrics()["num_reread_tokens"]

    rolling, forgetful = (make_runner(add_noise(make_recurrent(family), NOISE)) for _ in range(2))
    truncate = forgetful.truncate

    def forget(sequence: CachedSequence, length: int) -> None:
        truncate(sequence, length if length == len(sequence.tokens) else 0)

    forgetful.truncate = forget  # type: ignore[method-assign]
    (stats, num_reread), (wanted, num_reread_always) = play(rolling), play(forgetful)
    assert stats == wanted
    assert num_reread == 0 < num_reread_always
    assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_a_target_that_is_not_rolled_back_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = make_cases()
    stock = make_recurrent(family)
    wanted = [greedy(stock, case) for case in cases]
    monkeypatch.setattr(recurrence_module, "state_row", keep_refused)
    target = make_runner(make_recurrent(family))
    draft = make_runner(make_draft("llama", float("inf")))
    assert run(make_service(target, draft), cases)[0] != wanted


@pytest.mark.parametrize(("num_state_slots", "num_blocks"), [(2, 300), (8, 42)])
def test_scarce_slots_and_blocks_change_no_token(num_state_slots: int, num_blocks: int) -> None:
    """Four sequences and room for two of them: some wait, some are preempted and read again."""
    stock, cases = make_recurrent("qwen3_5"), make_cases()
    scarce = {"num_state_slots": num_state_slots, "num_blocks": num_blocks}
    target = make_runner(make_recurrent("qwen3_5"), **scarce)
    draft = make_runner(add_noise(make_recurrent("qwen3_5"), NOISE), **scarce)
    outputs, _ = run(make_service(target, draft), cases)
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert in_use(target) == in_use(draft) == (0, 0)


def test_drafts_longer_than_the_window_are_cut() -> None:
    stock, cases = (
        make_recurrent("bamba"),
        make_cases(draft_lengths=(40,))[2:],
    )  # which no end-of-sequence token cuts short
    target = make_runner(make_recurrent("bamba"))
    draft = make_runner(make_recurrent("bamba"))
    outputs, stats = run(make_service(target, draft), cases)
    for got, case in zip(outputs, cases, strict=True):
        assert_same(got, greedy(stock, case), case, stock)
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("family", ["lfm2", "llama"])
def test_nothing_is_held_after_mixed_work(family: str) -> None:
    """Sequences that come and go, are cancelled and are preempted: all get on, and give back blocks and slots."""
    make = make_model if family == "llama" else make_recurrent
    scarce = {"num_state_slots": 3, "num_blocks": 24}
    target = make_runner(make(family), **scarce)
    draft = make_runner(add_noise(make(family), NOISE), **scarce)
    service = make_service(target, draft)
    rng = random.Random(8)
    open_names: list[str] = []
    num_cancelled = most_slots = 0
    for step in range(200):
        if step < 150 and len(open_names) < 6:
            prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40)))
            service.start(f"mixed-{step}", prompt, Case(prompt, rng.randint(1, 12), GREEDY).spec(arrival_s=step))
            open_names.append(f"mixed-{step}")
        if open_names and rng.random() < 0.2:
            service.cancel(open_names.pop(rng.randrange(len(open_names))))
            num_cancelled += 1
        for delivery in service.pump():
            if delivery.finish is not None:
                open_names.remove(delivery.seq)
                service.cancel(delivery.seq)
        most_slots = max(most_slots, in_use(target)[1])
    assert not open_names
    assert num_cancelled > 10
    assert most_slots == (3 if family == "lfm2" else 0)
    gauges = service.target._backend.metrics()
    assert gauges["num_evictions"] > 0
    assert gauges["state_slots_in_use"] == gauges["kv_blocks_in_use"] == 0
    assert in_use(target) == in_use(draft) == (0, 0)


def test_a_prompt_that_was_read_is_not_read_again() -> None:
    stock, (case,) = make_recurrent("qwen3_5"), make_cases()[2:3]
    target, draft = (make_runner(make_recurrent("qwen3_5")) for _ in range(2))
    service = make_service(target, draft)
    for _ in range(3):
        outputs, _ = run(service, [case])
        assert_same(outputs[0], greedy(stock, case), case, stock)
    assert service.target._backend.metrics()["num_reused_tokens"] > 0
    assert in_use(target) == in_use(draft) == (0, 0)


def test_what_reaches_further_back_than_the_window_goes_on_from_a_kept_copy() -> None:
    runner = make_runner(make_recurrent("qwen3_5"))
    states, rng = SequenceStates(runner), random.Random(9)
    tokens = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]

    def read(wanted: list[int]) -> tuple[int, float]:
        """Tokens that were cached, and the largest difference of the last token's logits from a whole forward's."""
        states.want("one", wanted, 0, b"", (DECIDED, 0, 0.0, "one"))
        assert states.allocate("one", 99) is not None
        sequence = states.sequence("one")
        num_cached = len(sequence)
        logits = runner.forward([RowInput(sequence, wanted[num_cached:], 1)])
        whole = whole_forwards(make_recurrent("qwen3_5"), [wanted])[0]
        return num_cached, (logits[-1] - whole[-1]).abs().max().item()

    assert read(tokens[:22])[0] == 0
    states.keep_prefix("one", 22)
    assert read(tokens)[0] == 22
    other = [*tokens[:30], 5, 6, 7]
    num_cached, difference = read(other)
    assert num_cached == 20
    assert difference <= TOLERANCE
    assert states.num_reread_tokens == 10
    states.release("one")
    assert in_use(runner) == (0, 0)
