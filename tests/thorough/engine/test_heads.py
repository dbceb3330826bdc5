"""Drafts of heads on the target, alone and beside others: fewer steps, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor

from specdec.core.drafts import Draft, DraftChooser
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.heads import HeadDrafter, HeadRow
from specdec.drafting.length import DraftLengths
from specdec.drafting.ngram import NgramOptions
from specdec.engine.drafter import ModelDrafter
from specdec.engine.engine import InProcessService
from specdec.engine.target import ModelTarget
from specdec.engine.timing import StepTimer
from specdec.executor.runner import ModelRunner
from specdec.models.hidden import AFTER_NORM
from specdec.sampling.pipeline import LogitsProcessor, Sampler
from tests.letters import ACCEPTED
from tests.sizes import some
from tests.specdec.engine.pairs import MAX_MODEL_LEN, Case, backend, collect, greedy, make_model, run
from tests.specdec.engine.test_hostile_network import runner
from tests.specdec.models.recurrent_families import VOCAB_SIZE, make_recurrent
from tests.thorough.engine.test_ngram import letters_of, predicted_cases
from tests.thorough.engine.test_recurrent import NOISE, make_cases

LENGTHS = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64}
FAMILIES = ("llama", "qwen3_5", "gemma2")
NUM_HEADS = 3


@dataclass(frozen=True)
class LinearHeads:
    """Logits are linear in the hidden state, one of which may stand for each token: [heads, hidden size, V]."""

    weights: Tensor

    hidden_layers, cache_layers, num_bytes = (AFTER_NORM,), (), 0

    @property
    def num_tokens(self) -> int:
        return len(self.weights)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return (states[0] @ self.weights).transpose(0, 1)

    def logits(self, features: Tensor, place: int) -> Tensor:
        return features[:, place]


@lru_cache
@torch.inference_mode()
def fitted(family: str) -> LinearHeads:
    """What a model says some tokens later, by least squares from what it sees now, in greedy texts of its own."""
    model = make_recurrent(family) if family == "qwen3_5" else make_model(family)
    seen: list[Tensor] = []
    hidden: list[Tensor] = []
    later: list[list[Tensor]] = [[] for _ in range(NUM_HEADS)]
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    for case in make_cases():
        text = [*case.prompt, *greedy(model, replace(case, max_tokens=40, eos_token_ids=(0,)))]
        logits = model(torch.tensor([text]), use_cache=False).logits[0, len(case.prompt) - 1 :]
        hidden.append(seen[-1][len(case.prompt) - 1 : -NUM_HEADS])
        for ahead, of_head in enumerate(later, 1):
            of_head.append(logits[ahead:][: len(hidden[-1])])
    x = torch.cat(hidden)
    return LinearHeads(torch.stack([torch.linalg.lstsq(x, torch.cat(of_head)).solution for of_head in later]))


def with_heads(
    family: str,
    most: int = NUM_HEADS,
    draft: Callable[[], ModelRunner] | None = None,
    ngram: NgramOptions | None = None,
    num_blocks: int = 300,
    tree: int = 0,
    chunk: int = 64,
    processors: tuple[LogitsProcessor, ...] = (),
    chooser: DraftChooser | None = None,
) -> InProcessService:
    """A target with heads, without a draft model or with one; ``tree`` is how many tokens a tree has."""
    model = make_model(family) if family != "qwen3_5" else make_recurrent(family)
    if family == "qwen3_5":
        made = runner(family, 0.0, num_blocks, fitted(family))
        sampler = Sampler(VOCAB_SIZE)
        target = ModelTarget(made, sampler, **LENGTHS, heads=HeadDrafter(fitted(family), made, sampler, most, tree))
    else:
        options = {"num_blocks": num_blocks, "chunk": chunk, "processors": processors}
        target = backend(ModelTarget, model, heads=(fitted(family), most, tree), **options)
    drafter = None if draft is None else ModelDrafter(draft(), Sampler(VOCAB_SIZE), **LENGTHS)
    return InProcessService(target, drafter, 4, ngram=ngram, chooser=chooser)


def plainly(family: str, cases: list[Case]) -> list[list[int]]:
    return run(with_heads(family), [replace(case, num_speculative_tokens=0) for case in cases])[0]


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
@pytest.mark.parametrize("family", some(FAMILIES))
def test_the_tokens_are_those_without_drafts(family: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    cases = [replace(case, max_tokens=40, eos_token_ids=()) for case in make_cases(sampling)]
    wanted = plainly(family, cases)
    for most in (1, NUM_HEADS):
        outputs, stats = run(with_heads(family, most), cases)
        assert outputs == wanted
        assert stats.num_accepted_tokens > 8
        assert stats.num_draft_tokens <= most * stats.num_drafts
        assert stats.num_drafts >= stats.num_rounds - 2 * len(cases)  # all but the first, and the last
    for tree in (5, 20):
        outputs, of_trees = run(with_heads(family, tree=tree), cases)
        assert outputs == wanted
        assert of_trees.num_accepted_tokens >= stats.num_accepted_tokens + 5 * (family != "qwen3_5")
    bounded = [replace(case, num_speculative_tokens=i) for i, case in enumerate(cases)]
    for tree in (0, 12):
        outputs, stats = run(with_heads(family, tree=tree), bounded)
        assert outputs == wanted


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
@pytest.mark.parametrize(("free_tokens", "least", "most"), [(1 << 20, 11.5, 12.0), (3, 1.0, 2.5), (1, 0.0, 0.0)])
def test_as_much_of_a_tree_is_verified_as_its_step_time_is_worth(
    temperature: float, free_tokens: int, least: float, most: float
) -> None:
    """All where a step costs the same, a chain where it has room for no more, hardly any where each token costs."""
    sampling = SamplingParams(temperature=temperature)
    cases = [replace(case, max_tokens=60, eos_token_ids=()) for case in make_cases(sampling)]
    timer = StepTimer()
    for rows in range(1, len(cases) + 1):
        for tokens in range(rows, 33 * rows, rows):
            timer.add(rows, tokens, max(1.0, tokens / (rows * free_tokens)))
    service = with_heads("llama", tree=12, chooser=DraftLengths(timer.metrics))
    outputs, _ = run(service, cases)
    assert outputs == plainly("llama", cases)
    counters = service.target.counters
    if most:
        assert counters.num_drafts > 0.5 * counters.num_rounds
        assert least <= counters.num_draft_tokens / counters.num_drafts <= most
    else:
        assert 0 < counters.num_drafts < 0.1 * counters.num_rounds


def test_with_lengths_that_are_learned_drafts_go_in_order_and_no_token_changes() -> None:
    cases = predicted_cases("llama", SamplingParams(temperature=1.0, top_p=0.95))
    timer = StepTimer()
    timer.add(1, 1, 1.0)
    draft, chooser = partial(runner, "llama", NOISE), DraftLengths(timer.metrics)
    outputs = collect(with_heads("llama", draft=draft, ngram=NgramOptions(16), tree=12, chooser=chooser), cases)
    assert [output.tokens for output in outputs] == plainly("llama", cases)
    letters = letters_of(outputs)
    assert min(letters["a"], letters["x"]) > 0, letters


def test_greedy_output_is_that_of_transformers() -> None:
    stock, cases = make_model("llama"), make_cases(SamplingParams(temperature=0.0))
    for tree in (0, 12):
        outputs, stats = run(with_heads("llama", tree=tree), cases)
        assert outputs == [greedy(stock, case) for case in cases]
        assert stats.num_accepted_tokens > 10


@pytest.mark.parametrize("temperature", some([0.0, 1.0]))
def test_beside_a_draft_model_and_look_up_every_way_is_taken(temperature: float) -> None:
    """The draft model goes first; what it does not say, the heads do, or a longer match."""
    cases = predicted_cases("llama", SamplingParams(temperature=temperature, top_p=0.95))
    wanted = plainly("llama", cases)
    service = with_heads("llama", draft=partial(runner, "llama", NOISE), ngram=NgramOptions(16))
    outputs = collect(service, cases)
    assert [output.tokens for output in outputs] == wanted
    letters = letters_of(outputs)
    assert min(letters["a"], letters["x"]) > 0, letters
    service = with_heads("llama", ngram=NgramOptions(16), tree=12)
    outputs = collect(service, [replace(case, prediction=()) for case in cases])
    assert [output.tokens for output in outputs] == wanted
    assert letters_of(outputs)["h"] > 0


@pytest.mark.parametrize("tree", [0, 12])
def test_logprobs_and_prompt_logprobs_are_those_without_drafts(tree: int) -> None:
    sampling = SamplingParams(temperature=1.0, logprobs=2, prompt_logprobs=1)
    cases = make_cases(sampling)
    plain = collect(with_heads("llama"), [replace(case, num_speculative_tokens=0) for case in cases])
    drafted = collect(with_heads("llama", tree=tree), cases)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert "h" in letters_of(drafted)
    for one, other in zip(drafted, plain, strict=True):
        for got, want in zip(one.notes.logprobs, other.notes.logprobs, strict=True):
            assert got.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert one.notes.prompt_logprobs is not None


def test_notes_and_counters_tell_that_heads_drafted() -> None:
    cases = make_cases(SamplingParams(temperature=1.0))
    service = with_heads("llama")
    outputs = collect(service, cases)
    letters, counters = letters_of(outputs), service.target.counters
    assert set(letters) <= {"p", *"hij"}
    assert letters["h"] == counters.num_accepted_tokens == sum(letters[letter] for letter in ACCEPTED) > 0
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert getattr(counters.by_source["heads"], f"num_{name}") == getattr(counters, f"num_{name}") > 0
    assert set(counters.by_source) == {"heads"}


@pytest.mark.parametrize(
    ("most", "tree", "longest"), [(0, 0, 0), (0, 8, 0), (2, 0, 2), (9, 0, 3), (2, 5, 2), (9, 20, 3)]
)
def test_drafts_are_as_far_as_is_allowed_and_there_are_heads(most: int, tree: int, longest: int) -> None:
    spec = make_cases(SamplingParams(temperature=1.0))[0].spec()
    drafter = HeadDrafter(fitted("llama"), runner("llama", 0.0), Sampler(VOCAB_SIZE), most, tree)

    def drafted(spec: SequenceSpec) -> Draft:
        row = HeadRow(None, 2, [0], [6], spec, [1, 5, 6], drafter.count(spec))
        return drafter.drafts((torch.zeros(1, 64),), [row])[0]

    draft = drafted(spec)
    assert draft.depth == longest
    assert len(draft.tokens) == (tree if tree and longest else longest)
    assert bool(draft.parents) == (tree > longest > 0)
    bounded = drafted(replace(spec, num_speculative_tokens=1))
    assert bounded.depth == min(longest, 1)
