"""A draft model that gives several tokens in one pass: what it reads in their place leaves no trace."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.models.demos import demo_folder
from specdec.core.backends import DraftJob, Proposal, Status
from specdec.core.errors import ModelLoadError
from specdec.core.grammar import Grammar
from specdec.core.messages import Plan
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.engine.build import BackendOptions, build_drafter, build_target
from specdec.engine.engine import SpeculativeEngine
from specdec.models.loading import ModelSource, load_tokenizer
from tests.sizes import sized, some
from tests.specdec.engine.pairs import run_with_branches
from tests.specdec.vocabularies import DRAFT, save_masked

PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Reader:\n    def __init__(self", "x = [1, 2, 3, 4, 5, 6"]
NUM_STEP_TOKENS = 5
OPTIONS = BackendOptions(max_model_len=256, block_size=4)
DRAFT_OPTIONS = replace(OPTIONS, num_step_tokens=NUM_STEP_TOKENS)


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), device="cpu", dtype="float32")


TARGET = source(DRAFT.parent / "target")
HYBRID = source(demo_folder("hybrid"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The demo draft with a mask token that it was not taught to read."""
    return source(save_masked(tmp_path_factory.mktemp("draft") / "masked"))


def job(tokens: list[int], num_tokens: int, *, key: str = "a", agreed: int = 0, fork_of: str | None = None) -> DraftJob:
    spec = SequenceSpec(SamplingParams(temperature=0.0), 0, 3, 99, (0,))
    return DraftJob(key, tokens, spec, agreed, 3, fork_of, 0, num_tokens)


def said(proposal: Proposal) -> list[int | None]:
    assert proposal.status is Status.DECIDED
    return [one.token for one in (proposal, *proposal.further)]


@torch.inference_mode()
def reference(folder: str, tokens: list[int], count: int) -> list[int]:
    """What the plain model says after the tokens and in the place of masks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = [*tokens, *[model.config.pard_token] * (count - 1)]
    logits = model(torch.tensor([inputs]), use_cache=False).logits[0, len(tokens) - 1 :, :4096]
    return logits.argmax(-1).tolist()


def test_a_pass_gives_what_the_plain_model_says_in_the_place_of_masks(draft: ModelSource) -> None:
    drafter, _ = build_drafter(draft, DRAFT_OPTIONS, TARGET)
    tokens = load_tokenizer(TARGET)(PROMPTS[1]).input_ids
    (first,) = drafter.propose([job(tokens, 9)])
    assert said(first) == reference(draft.path, tokens, NUM_STEP_TOKENS)
    # The tokens are read in the next pass, and the masks are forgotten.
    longer = [*tokens, *said(first)]
    (second,) = drafter.propose([job(longer, 3, agreed=len(tokens))])
    assert said(second) == reference(draft.path, longer, 3)
    # So are those of the sequence where a branch begins with a copy of it.
    other = [*tokens, 77]
    further, branch = drafter.propose(
        [job([*longer, 5], 2, agreed=len(longer)), job(other, 4, key="a#1", fork_of="a", agreed=len(tokens))]
    )
    assert said(further) == reference(draft.path, [*longer, 5], 2)
    assert said(branch) == reference(draft.path, other, 4)


def test_no_pass_reaches_beyond_what_the_model_can_read(draft: ModelSource) -> None:
    drafter, _ = build_drafter(draft, replace(DRAFT_OPTIONS, max_model_len=32), TARGET)
    for length, count in ((27, 5), (30, 3), (31, 2), (32, 1)):
        (proposal,) = drafter.propose([job([*range(3, 3 + length)], 9)])
        assert len(said(proposal)) == count
        drafter.release("a")


def engine(target: ModelSource, draft: ModelSource) -> SpeculativeEngine:
    return SpeculativeEngine.from_pretrained(target, draft, options=OPTIONS, draft_options=DRAFT_OPTIONS)


@pytest.mark.parametrize("target", some([TARGET, HYBRID]), ids=some(["plain", "hybrid"]))
def test_texts_are_those_of_plain_decoding(target: ModelSource, draft: ModelSource) -> None:
    pair = engine(target, draft)
    grammar = Grammar("regex", r"(yes|no|perhaps)(, (never|always)){20}")
    for sampling in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, presence_penalty=0.5),
        SamplingParams(temperature=1.0, grammar=grammar),
    ):
        plain = pair.generate_batch(PROMPTS, sampling, seed=3, max_tokens=40, num_speculative_tokens=0)
        for num_draft_tokens in sized((4,), (1, 4, 8)):
            pair.reset_stats()
            results = pair.generate_batch(
                PROMPTS, sampling, seed=3, max_tokens=40, num_speculative_tokens=num_draft_tokens
            )
            assert [result.text for result in results] == [result.text for result in plain]
            assert pair.stats.num_accepted_tokens > 10


def test_branches_are_drafted_whole_in_one_step(draft: ModelSource) -> None:
    target, _ = build_target(TARGET, OPTIONS)
    drafter, _ = build_drafter(draft, DRAFT_OPTIONS, TARGET)
    prompts = load_tokenizer(TARGET)(PROMPTS).input_ids
    service = run_with_branches(target, drafter, prompts, Plan(3, 8, acceptance_rate=0.5), 2)
    counters = service.drafter.counters
    assert counters.num_proposed_tokens > 3 * counters.num_branches_forked, "each branch has three tokens and one more"


def test_a_model_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"names no mask token \(pard_token or ptd_token_id\)"):
        build_drafter(source(DRAFT), DRAFT_OPTIONS, TARGET)


def test_the_mask_token_is_found_by_its_other_name(draft: ModelSource, tmp_path: Path) -> None:
    shutil.copytree(draft.path, tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    fields = json.loads(file.read_text())
    fields["ptd_token_id"] = fields.pop("pard_token")
    file.write_text(json.dumps(fields))
    drafter, _ = build_drafter(source(tmp_path / "draft"), DRAFT_OPTIONS, TARGET)
    assert drafter.metrics()["num_step_tokens"] == NUM_STEP_TOKENS
