"""A draft of another vocabulary changes no token, whatever it makes of the text."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.models.demos import demo_folder
from specdec.checkpoint.compat import map_vocabularies
from specdec.core.backends import DraftJob
from specdec.core.grammar import Grammar
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine import warmup
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.drafter import VocabularyMapper
from specdec.engine.engine import SpeculativeEngine
from specdec.models.loading import ModelSource, load_tokenizer
from specdec.sampling.pipeline import NOISE_CACHE_BYTES
from tests.sizes import sized, some
from tests.specdec.engine.pairs import run_with_branches
from tests.specdec.vocabularies import DRAFT, save_shuffled, save_smaller

PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Reader:\n    def __init__(self", "# Größe µ\nsizes = {"]
OPTIONS = BackendOptions(max_model_len=512)
DRAFT_OPTIONS = replace(OPTIONS, other_vocabulary=True)
MAKERS: dict[str, Callable[[Path], Path]] = {"shuffled": save_shuffled, "smaller": save_smaller}


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), device="cpu", dtype="float32")


TARGETS = {"plain": source(DRAFT.parent / "target"), "hybrid": source(demo_folder("hybrid"))}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    folder = tmp_path_factory.mktemp("drafts")
    return {name: source(make(folder / name)) for name, make in MAKERS.items()} | {"own": source(DRAFT)}


def engine(target: str, draft: ModelSource) -> SpeculativeEngine:
    return SpeculativeEngine.from_pretrained(TARGETS[target], draft, options=OPTIONS, draft_options=DRAFT_OPTIONS)


def generate(of: SpeculativeEngine, sampling: SamplingParams, num_speculative_tokens: int) -> tuple[list[str], int]:
    """The texts, and how many draft tokens were accepted."""
    of.reset_stats()
    results = of.generate_batch(PROMPTS, sampling, seed=3, max_tokens=50, num_speculative_tokens=num_speculative_tokens)
    return [result.text for result in results], of.stats.num_accepted_tokens


@pytest.mark.parametrize(("target", "draft"), some([("plain", "shuffled"), ("hybrid", "smaller")]))
def test_texts_are_those_of_plain_decoding(draft: str, target: str, drafts: dict[str, ModelSource]) -> None:
    pair = engine(target, drafts[draft])
    for temperature in some((0.0, 1.0)):
        sampling = SamplingParams(temperature=temperature)
        plain, _ = generate(pair, sampling, 0)
        for num_draft_tokens in sized((4,), (1, 4, 8)):
            texts, num_accepted = generate(pair, sampling, num_draft_tokens)
            assert texts == plain
            assert num_accepted > 20


def test_the_same_tokens_under_other_numbers_are_accepted_as_often(drafts: dict[str, ModelSource]) -> None:
    sampling = SamplingParams(temperature=1.0)
    _, num_own = generate(engine("plain", drafts["own"]), sampling, 4)
    _, num_shuffled = generate(engine("plain", drafts["shuffled"]), sampling, 4)
    assert num_shuffled >= 0.9 * num_own, "but for ties, the very same"


def test_a_grammar_holds_for_drafts_too(drafts: dict[str, ModelSource]) -> None:
    pair = engine("plain", drafts["smaller"])
    sampling = SamplingParams(temperature=1.0, grammar=Grammar("regex", r"(yes|no|perhaps)(, (never|always)){20}"))
    plain, _ = generate(pair, sampling, 0)
    texts, num_accepted = generate(pair, sampling, 4)
    assert texts == plain
    assert num_accepted > 20


def test_branches_are_promoted(drafts: dict[str, ModelSource]) -> None:
    target, _ = build_target(TARGETS["plain"], OPTIONS)
    drafter, _ = build_drafter(drafts["smaller"], DRAFT_OPTIONS, TARGETS["plain"])
    prompts = load_tokenizer(TARGETS["plain"])(PROMPTS).input_ids
    run_with_branches(target, drafter, prompts, Plan(4, 8, acceptance_rate=0.5), 6)


def test_a_text_longer_in_the_draft_s_spelling_than_it_can_read_goes_on_without(drafts: dict[str, ModelSource]) -> None:
    short = replace(DRAFT_OPTIONS, max_model_len=40)
    pair = SpeculativeEngine.from_pretrained(TARGETS["plain"], drafts["smaller"], options=OPTIONS, draft_options=short)
    sampling = SamplingParams(temperature=0.0)
    texts, num_accepted = generate(pair, sampling, 4)
    assert texts == generate(pair, sampling, 0)[0]
    assert 0 < num_accepted < 3 * 40


def job(tokens: list[int], agreed: int = 0, *, key: str = "a", fork_of: str | None = None) -> DraftJob:
    spec = SequenceSpec(SamplingParams(), 0, 1, 9, ())
    return DraftJob(key, tokens, spec, agreed, num_committed=1, fork_of=fork_of)


def test_jobs_are_translated_as_logs_grow_shrink_and_fork(tmp_path: Path) -> None:
    mapping = map_vocabularies(load_tokenizer(source(DRAFT)), load_tokenizer(source(save_smaller(tmp_path / "draft"))))
    mapper = VocabularyMapper(mapping)
    long = next(i for i, ids in enumerate(mapping.spelled) if len(ids) == 3)

    def spelled(*tokens: int) -> list[int]:
        return [piece for token in tokens for piece in mapping.spelled[token]]

    first = mapper.mapped(job([long, 7, 8]))
    assert (first.tokens, first.agreed, first.num_committed) == (spelled(long, 7, 8), 0, 3)
    # What was drafted came otherwise, behind what agrees.
    second = mapper.mapped(job([long, 7, long, 9], agreed=2))
    assert (second.tokens, second.agreed) == (spelled(long, 7, long, 9), 4)
    branch = mapper.mapped(job([long, 7, 10], agreed=2, key="b", fork_of="a"))
    assert (branch.tokens, branch.agreed) == (spelled(long, 7, 10), 4)
    assert mapper.mapped(job([long, 7, long, 9, 11], agreed=4)).tokens == spelled(long, 7, long, 9, 11)
    mapper.rename("b", "a")
    assert mapper.mapped(job([long, 7, 10, 12], agreed=3)).tokens == spelled(long, 7, 10, 12)
    # What its cache is known to agree with may be less than what was translated before.
    assert mapper.mapped(job([long, 7, 10, 12, 13], agreed=1)).agreed == 3
    mapper.release("a")
    again = mapper.mapped(job([long, 5]))
    assert (again.tokens, again.agreed) == (spelled(long, 5), 0)


def test_the_plan_counts_noise_of_the_targets_vocabulary(
    drafts: dict[str, ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "_measured", lambda devices: nullcontext({}))  # what a process grows by is chance
    *_, mapped = build_drafter(drafts["shuffled"], DRAFT_OPTIONS, TARGETS["plain"])
    *_, own = build_drafter(drafts["own"], OPTIONS, TARGETS["plain"])
    assert mapped.memory.activation_bytes == own.memory.activation_bytes + NOISE_CACHE_BYTES
