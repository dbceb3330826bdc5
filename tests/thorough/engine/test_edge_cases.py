"""Known edge cases of speculation through the whole engine, by their numbers in the project's list."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from specdec.core.backends import DraftJob, Proposal
from specdec.core.messages import Message, Offer, Plan, PlanUpdate
from specdec.core.params import SamplingParams
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.protocol.draft_sequence import DraftSequence
from tests.letters import spelled
from tests.sizes import some
from tests.specdec.engine.pairs import (
    EOS,
    MAX_MODEL_LEN,
    Case,
    Output,
    assert_same,
    backend,
    collect,
    deliver,
    greedy,
    make_draft,
    make_model,
    make_service,
    run,
    start,
)

HALF_RIGHT, ALWAYS_RIGHT = 0.06, 0.0
PROMPT = (5, 9, 77, 31, 64, 12, 90)
GREEDY = SamplingParams(temperature=0.0)
TEMPERATURES = [0.0, 1.0]


def plain(case: Case) -> list[int]:
    """The tokens without speculation."""
    (tokens,), _ = run(make_service("llama", HALF_RIGHT, 0), [case])
    return tokens


def rounds(output: Output) -> list[tuple[int, int]]:
    """(output tokens before it, draft tokens) of each round; the rounds of a sequence that was not cut mid-run."""
    found, before = [], 0
    for i, (letter, num_drafted) in enumerate(zip(spelled(output.notes), output.notes.num_drafted, strict=True)):
        if letter != "a" or num_drafted:
            found.append((before, num_drafted))
            before = i + 1
    return found


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_edge_03_an_end_inside_a_run_drops_the_rest_of_it(temperature: float) -> None:
    """Suffix and bonus reach neither the log, nor usage, nor the counters, nor the blocks that others may reuse."""
    without_end = plain(Case(PROMPT, 24, SamplingParams(temperature=temperature), 3))
    at = next(i for i in range(10, 16) if without_end[i] not in without_end[:i])
    case = Case(PROMPT, 24, SamplingParams(temperature=temperature), 3, eos_token_ids=(EOS, without_end[at]))
    service = make_service("llama", ALWAYS_RIGHT, 8)
    (output,) = collect(service, [case])
    assert (output.tokens, output.finish) == (without_end[: at + 1], "stop")
    assert spelled(output.notes)[-1] == "a"  # no bonus after it, and nothing was drafted beyond it
    counters = service.target.counters
    assert counters.num_committed_tokens == len(spelled(output.notes)) == at + 1
    assert counters.num_accepted_tokens == sum(counters.num_accepted_per_position) == spelled(output.notes).count("a")
    assert counters.num_draft_tokens == sum(output.notes.num_drafted) == counters.num_accepted_tokens
    gauges = service.target._backend.metrics()
    assert gauges["kv_blocks_in_use"] == gauges["num_cached_sequences"] == 0
    collect(service, [Case((*PROMPT, *without_end), 2, GREEDY)])
    num_reused = service.target._backend.metrics()["num_reused_tokens"]
    assert 0 < num_reused <= len(PROMPT) + at + 1


@pytest.mark.parametrize("is_drafter_bounded", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10, 19])
def test_edge_04_a_draft_is_never_longer_than_what_may_be_committed(
    max_tokens: int, is_drafter_bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target cuts by itself what a drafter offers beyond the end."""
    wanted = plain(Case(PROMPT, 20, GREEDY))[:max_tokens]
    service = make_service("llama", ALWAYS_RIGHT, 8)
    if not is_drafter_bounded:
        monkeypatch.setattr(DraftSequence, "num_wanted", property(lambda row: row.plan.num_draft_tokens))
    (output,) = collect(service, [Case(PROMPT, max_tokens, GREEDY)])
    assert (output.tokens, output.finish) == (wanted, "length")
    assert all(num_drafted <= min(8, max_tokens - before - 1) for before, num_drafted in rounds(output))
    assert rounds(output)[0] == (0, min(8, max_tokens - 1))


@pytest.mark.parametrize("left", [0, 1, 2, 7, 11])
def test_edge_04_output_ends_with_the_models_length(left: int) -> None:
    prompt = tuple(3 + i * i % 120 for i in range(MAX_MODEL_LEN - left))
    (want,) = collect(make_service("llama", HALF_RIGHT, 0), [Case(prompt, 50, GREEDY)])
    (got,) = collect(make_service("llama", ALWAYS_RIGHT, 4), [Case(prompt, 50, GREEDY)])
    assert (got.tokens, got.finish) == (want.tokens, want.finish)
    assert (len(got.tokens), got.finish) == (left, "length")


def test_edge_04_min_tokens_counts_tokens_and_not_rounds() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=11, logit_bias=((EOS, 100.0),))
    for k in (0, 1, 4, 8):
        (output,) = collect(make_service("llama", ALWAYS_RIGHT, k), [Case(PROMPT, 30, sampling)])
        assert (len(output.tokens), output.tokens.index(EOS), output.finish) == (12, 11, "stop")


def test_edge_04_a_row_goes_plain_beyond_the_drafts_length() -> None:
    case = Case(PROMPT, 40, GREEDY)
    draft = backend(ModelDrafter, make_model("llama"), max_model_len=20)
    (output,) = collect(InProcessService(backend(ModelTarget, make_model("llama")), draft, 4), [case])
    assert output.tokens == plain(case)
    assert spelled(output.notes)[:10].count("a") == 8
    assert set(spelled(output.notes)[15:]) == {"p"}


@torch.inference_mode()
def penalised(case: Case) -> list[int]:
    """Greedy decoding that counts the output by hand."""
    model, log = make_model("llama"), list(case.prompt)
    for _ in range(case.max_tokens):
        logits = model(torch.tensor([log]), use_cache=False).logits[0, -1]
        counts = torch.bincount(torch.tensor(log[len(case.prompt) :], dtype=torch.int64), minlength=len(logits))
        sampling = case.sampling
        logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        log.append(int(logits.argmax()))
    return log[len(case.prompt) :]


@pytest.mark.parametrize("noise", [HALF_RIGHT, ALWAYS_RIGHT])
def test_edge_06_penalties_count_every_accepted_token(noise: float) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, ignore_eos=True)
    case = Case(PROMPT, 30, sampling)
    want = penalised(case)
    assert want != plain(replace(case, sampling=replace(sampling, frequency_penalty=0.0, presence_penalty=0.0)))
    for k in (0, 1, 4, 8):
        (tokens,), stats = run(make_service("llama", noise, k), [case])
        assert tokens == want
        assert k == 0 or stats.num_accepted_tokens > 3


def test_edge_07_min_p_and_logit_bias_act_on_accepted_corrected_and_bonus_tokens() -> None:
    banned = tuple((token, -100.0) for token in range(0, 128, 2))
    case = Case(PROMPT, 60, SamplingParams(min_p=0.35, logit_bias=banned, ignore_eos=True), 3)
    want, model = plain(case), make_model("llama")
    for k in (1, 4, 8):
        (output,) = collect(make_service("llama", HALF_RIGHT, k), [case])
        assert output.tokens == want
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *want]]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
        share = (logits - logits[:, 1::2].amax(1, keepdim=True)).exp()
        kinds: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        for i, letter in enumerate(spelled(output.notes)):
            kinds.setdefault(letter, []).append(i)
        for letter in "abc":
            assert len(kinds[letter]) > 1
            for i in kinds[letter]:
                assert want[i] % 2
                assert share[i, want[i]] > 0.35 - 1e-5


def test_edge_10_a_seed_has_a_stream_of_its_own() -> None:
    """Neighbours, draft lengths and what was drawn beyond an end shift nothing."""
    sampling = SamplingParams(temperature=1.0)
    cases = [Case(PROMPT, 16, sampling, seed) for seed in (1, 2, 1, 2**63 + 5, 2, 2**32 + 1)]
    alone = [plain(case) for case in cases]
    assert len(set(map(tuple, alone))) == 4
    for k in (0, 1, 4, 8):
        service = make_service("llama", ALWAYS_RIGHT, k)
        for max_tokens in (16, 5, 16):
            shorter = [replace(case, max_tokens=max_tokens) for case in cases]
            assert run(service, shorter)[0] == [tokens[:max_tokens] for tokens in alone]


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_edge_12_a_bonus_is_no_accepted_token_and_the_draft_catches_up(temperature: float) -> None:
    """After a full acceptance the draft has not read its own last token; what it lacks would make it err."""
    sampling = SamplingParams(temperature=temperature, top_p=0.9, frequency_penalty=0.4, ignore_eos=True)
    case = Case(PROMPT, 41, sampling, 8)
    for k in (1, 4):
        service = make_service("llama", ALWAYS_RIGHT, k)
        (output,) = collect(service, [case])
        assert output.tokens == plain(case)
        runs, last = divmod(41, k + 1)
        assert spelled(output.notes) == ("a" * k + "b") * runs + ("p" if last else "")
        assert service.target.counters.num_accepted_tokens == k * runs


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
@pytest.mark.parametrize("spoils", [False, True])
def test_edge_13_offers_that_come_a_round_late_do_no_harm(
    temperature: float, spoils: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Useful tails are used, the rest is dropped and counted; an offer for another log with the same length too."""
    cases = [Case(PROMPT[i:], 30, SamplingParams(temperature=temperature, ignore_eos=True), i) for i in range(4)]
    service = make_service("llama", HALF_RIGHT, 4)
    assert service.drafter is not None
    take_outbox, held = service.drafter.take_outbox, list[Message]()

    def late() -> dict[str, list[Message]]:
        nonlocal held
        outbox = take_outbox()
        fresh = [message for batch in outbox.values() for message in batch]
        if not fresh:
            return {}
        offers = [message for message in fresh if isinstance(message, Offer)]
        sent = [message for message in fresh if not isinstance(message, Offer)] + held
        held = [spoilt(offer) for offer in offers] if spoils else list[Message](offers)
        return {"router": sent} if sent else {}

    def spoilt(offer: Offer) -> Offer:
        return structs.replace(offer, prefix_hash=offer.prefix_hash._replace(digest=offer.prefix_hash.digest ^ 1))

    monkeypatch.setattr(service.drafter, "take_outbox", late)
    outputs, stats = run(service, cases)
    assert outputs == [plain(case) for case in cases]
    assert service.target.counters.num_stale_offers > 5
    assert (stats.num_accepted_tokens == 0) == spoils


@pytest.mark.parametrize("temperature", some(TEMPERATURES))
def test_edge_14_speculation_switched_on_again_catches_up(temperature: float) -> None:
    """A draft that is always right stays so: it has read what was decided without it, in several chunks."""
    case = Case(PROMPT, 90, SamplingParams(temperature=temperature, ignore_eos=True), 4)
    want = plain(case)
    service = make_service("llama", ALWAYS_RIGHT, 4)
    (name,) = start(service, [case])
    output = Output()

    def advance(num_tokens: int) -> str:
        """How the tokens came until there are so many."""
        begin = len(output.tokens)
        while len(output.tokens) < num_tokens:
            deliver(service, {name: output})
        return spelled(output.notes)[begin:]

    def plan(num_draft_tokens: int) -> None:
        for machine in (service.target, service.drafter):
            assert machine is not None
            row = machine._sequences.get(name)
            assert row is not None
            machine.receive(PlanUpdate(name, row.epoch, Plan(num_draft_tokens, mode="sequential")), 0.0)

    assert advance(10) == "aaaab" * 2
    plan(0)
    assert advance(50) == "p" * 40
    plan(4)
    assert advance(90) == "aaaab" * 8
    assert (output.tokens, output.finish) == (want, "length")


def test_edge_18_equality_holds_up_to_ties_which_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def make_tied() -> torch.nn.Module:
        model = make_model("llama")
        with torch.no_grad():
            model.lm_head.weight[64:] = model.lm_head.weight[:64]  # every token has a twin
        return model

    case, stock = Case((5, 9, 77), 30, GREEDY, eos_token_ids=()), make_tied()
    outputs = []
    for k in (0, 1, 4, 8):
        service = InProcessService(backend(ModelTarget, make_tied()), backend(ModelDrafter, make_tied()), k)
        outputs.append(run(service, [case])[0][0])
    assert all(output == outputs[0] for output in outputs)
    assert max(outputs[0]) < 64  # the lowest of those that tie
    want = greedy(stock, replace(case, eos_token_ids=(EOS, EOS + 64)))
    assert_same(outputs[0][: len(want)], want, case, stock)
    twin = [outputs[0][0] + 64, *outputs[0][1:]]
    assert_same(outputs[0], twin, case, stock)
    assert "a tie at token 0" in caplog.text
    with pytest.raises(AssertionError, match="their logits differ"):
        assert_same(outputs[0], [(outputs[0][0] + 1) % 64, *outputs[0][1:]], case, stock)


def test_edge_19_without_drafts_the_draft_model_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with a draft length of 0 open no row on the drafter; neither do those with nothing left to draft."""
    draft = backend(ModelDrafter, make_draft("llama", HALF_RIGHT))
    service = InProcessService(backend(ModelTarget, make_model("llama")), draft, 4)
    assert service.drafter is not None
    asked: set[str] = set()
    opened: set[str] = set()
    propose, receive = draft.propose, service.drafter.receive

    def noting_propose(jobs: list[DraftJob]) -> list[Proposal]:
        asked.update(job.key for job in jobs)
        return propose(jobs)

    def noting_receive(message: Message, now_s: float) -> None:
        opened.add(getattr(message, "seq", ""))
        receive(message, now_s)

    monkeypatch.setattr(draft, "propose", noting_propose)
    monkeypatch.setattr(service.drafter, "receive", noting_receive)
    cases = [Case(PROMPT[i:], 12, GREEDY, num_speculative_tokens=0) for i in range(4)]
    outputs = collect(service, cases)
    assert [spelled(output.notes) for output in outputs] == ["p" * len(output.tokens) for output in outputs]
    assert asked == opened - {""} == set()
    assert service.drafter.counters.num_steps == draft.metrics()["num_cached_sequences"] == 0
    again = [replace(cases[0], num_speculative_tokens=None), cases[1], Case(PROMPT, 1, GREEDY), cases[2]]
    names = start(service, again)
    mixed = {name: Output() for name in names}
    while any(output.finish is None for output in mixed.values()):
        deliver(service, mixed)
    assert asked == {names[0]}
    assert [output.tokens for output in mixed.values()] == [
        outputs[0].tokens,
        outputs[1].tokens,
        outputs[0].tokens[:1],
        outputs[2].tokens,
    ]
