"""Reported log probabilities are those of one whole forward pass, with and without drafts."""

import random
from dataclasses import replace

import pytest
import torch

from specdec.core.messages import Notes
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import TokenLogprobs
from specdec.executor.rows import RowInput
from specdec.sampling import rows
from tests.sizes import some
from tests.specdec.engine.pairs import Case, Output, collect, make_model, make_service


def generate(prompt: tuple[int, ...], sampling: SamplingParams, k: int) -> tuple[list[int], Notes]:
    service = make_service("llama", 0.06, k)
    service.start("one", prompt, SequenceSpec(sampling, 3, len(prompt), 14, ()))
    tokens, notes = [], Notes()
    while True:
        for delivery in service.pump():
            tokens += delivery.tokens
            notes = notes + delivery.notes
            if delivery.finish is not None:
                return tokens, notes


def check(entries: list[TokenLogprobs], rows: torch.Tensor, tokens: list[int]) -> None:
    for entry, row, token in zip(entries, rows, tokens, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.logprob < 0.0
        assert entry.rank == int((row > row[token]).sum()) + 1
        top = row.topk(3)
        assert [i for i, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_edge_05_logprobs_come_from_the_targets_own_row(temperature: float) -> None:
    rng = random.Random(4)
    prompt = tuple(rng.randrange(3, 128) for _ in range(41))  # three prefill chunks
    sampling = SamplingParams(temperature=temperature, logprobs=3, prompt_logprobs=3, top_k=40)
    seen = [generate(prompt, sampling, k) for k in (0, 1, 4, 8)]
    tokens, notes = seen[0]
    assert {len(other) for other, _ in seen} == {14}
    assert all(other == tokens for other, _ in seen)
    with torch.inference_mode():
        whole = make_model("llama")(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    for _, notes in seen:
        assert notes.prompt_logprobs is not None
        first, *others = notes.prompt_logprobs.unpack()
        assert first is None
        check(others, whole[: len(prompt) - 1], list(prompt[1:]))
        check(list(notes.logprobs or ()), whole[len(prompt) - 1 : -1], tokens)


def alone(case: Case) -> Output:
    """The output of a case that has everything to itself."""
    return collect(make_service("llama", 0.06, 4), [case])[0]


def assert_same_logprobs(got: Output, want: Output) -> None:
    assert got.tokens == want.tokens
    entries, wanted = ((*o.notes.prompt_logprobs.unpack()[1:], *(o.notes.logprobs or ())) for o in (got, want))
    assert len(entries) == len(wanted) > 60
    for a, b in zip(entries, wanted, strict=True):
        assert a is not None
        assert b is not None
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert (a.rank, [i for i, _ in a.top]) == (b.rank, [i for i, _ in b.top])


def asking_case(prompt: tuple[int, ...]) -> Case:
    return Case(prompt, 14, SamplingParams(temperature=1.0, ignore_eos=True, logprobs=2, prompt_logprobs=2), 3)


def make_prompt(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 128) for _ in range(50))


def test_prompt_logprobs_of_a_prompt_whose_prefix_is_cached() -> None:
    """What others left in the cache has no logits: the prompt is read from its beginning."""
    prompt = make_prompt(4)
    wanted = alone(asking_case(prompt))
    service = make_service("llama", 0.06, 4)
    plain = replace(asking_case(prompt), sampling=SamplingParams(temperature=1.0, ignore_eos=True))
    assert collect(service, [plain])[0].tokens == wanted.tokens
    collect(service, [plain])
    num_reused = service.target._backend.metrics()["num_reused_tokens"]
    assert num_reused == 48, "the prefix is there for others"
    (output,) = collect(service, [asking_case(prompt)])
    assert_same_logprobs(output, wanted)
    assert service.target._backend.metrics()["num_reused_tokens"] == num_reused


def test_a_step_has_no_more_logits_of_prompts_than_are_sampled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [asking_case(make_prompt(seed)) for seed in range(3)]
    wanted = [alone(case) for case in cases]
    monkeypatch.setattr(rows, "MAX_SLICE_BYTES", 8 * 4 * 128)
    service = make_service("llama", 0.06, 4, chunk=64)
    runner, seen = service.target._backend._runner, []
    forward = runner.forward

    def counting(rows: list[RowInput], **more: object) -> torch.Tensor:
        seen.append(sum(max(0, min(row.num_logits, 50 - len(row.sequence))) for row in rows))
        return forward(rows, **more)

    monkeypatch.setattr(runner, "forward", counting)
    for output, want in zip(collect(service, cases), wanted, strict=True):
        assert_same_logprobs(output, want)
    assert 8 <= max(seen) <= 8 + len(cases) - 1


@pytest.mark.parametrize("num_blocks", [26, 28])
def test_prompt_logprobs_under_preemption(num_blocks: int) -> None:
    """A prompt that yields its blocks half-read, or after its report, is read again; nothing is reported twice."""
    cases = [asking_case(make_prompt(seed)) for seed in range(5)]
    wanted = [alone(case) for case in cases]
    service = make_service("llama", 0.06, 4, num_blocks=num_blocks, max_model_len=80)
    for output, want in zip(collect(service, cases), wanted, strict=True):
        assert_same_logprobs(output, want)
    assert service.target._backend.metrics()["num_evictions"] > 0
