"""Training: a draft learns what was recorded, goes on after an interrupt, and what it writes loads everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import Adapter, ModelSource
from specdec.audition.audition import audition_model
from specdec.audition.report import verdict
from specdec.audition.training import CHECKPOINT, TrainingPlan, split, train_draft
from specdec.core.errors import InvalidParameterError, ModelLoadError
from tests.specdec.audition.learned import cycles, sample, shuffled
from tests.specdec.engine.features import OPTIONS, demo

DRAFT = demo("draft")
PLAN = TrainingPlan(num_epochs=2, batch_tokens=256, learning_rate=3e-3, checkpoint_steps=3)
LOW_RANK = replace(PLAN, lora_rank=8, learning_rate=2e-2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def nothing(_: str) -> None:
    pass


@pytest.mark.parametrize("plan", [PLAN, LOW_RANK, replace(PLAN, has_bfloat16=True)], ids=["all", "LoRA", "bfloat16"])
def test_a_draft_that_learned_is_better_and_loads_in_transformers_and_here(tmp_path: Path, plan: TrainingPlan) -> None:
    samples, out = cycles(150), tmp_path / "out"
    train_draft(samples, DRAFT, out, plan, nothing)
    _, held_out = split(samples)
    drafts = [
        audition_model(held_out, DRAFT, one, replace(OPTIONS, max_draft_tokens=4), [4])
        for one in (DRAFT, ModelSource(str(out), dtype="float32", device="cpu"))
    ]
    found = verdict(*drafts, 4)
    assert found.is_better, found
    assert drafts[1].total(4).tokens_per_round > 2
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16  # as the draft's own checkpoint
    assert model.state_dict().keys() == weights(Path(DRAFT.path)).keys()
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(DRAFT.path).get_vocab()
    assert not (out / CHECKPOINT).exists()


def test_shuffled_answers_teach_nothing(tmp_path: Path) -> None:
    samples, out = cycles(150), tmp_path / "out"
    train_draft(samples, DRAFT, tmp_path / "good", PLAN, nothing)
    good = replace(DRAFT, path=str(tmp_path / "good"))
    train_draft(shuffled(samples), good, out, PLAN, nothing)
    _, held_out = split(samples)
    drafts = [audition_model(held_out, DRAFT, one, OPTIONS, [4]) for one in (good, replace(DRAFT, path=str(out)))]
    assert verdict(*drafts, 4).is_worse


@pytest.mark.parametrize("plan", [PLAN, LOW_RANK], ids=["all", "LoRA"])
def test_an_interrupted_training_ends_with_the_same_weights(tmp_path: Path, plan: TrainingPlan) -> None:
    samples, lines = cycles(60), []
    train_draft(samples, DRAFT, tmp_path / "whole", replace(plan, checkpoint_steps=100), nothing)

    def interrupting(line: str) -> None:
        lines.append(line)
        if line.startswith("step 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_draft(samples, DRAFT, tmp_path / "parts", plan, interrupting)
    assert (tmp_path / "parts" / CHECKPOINT).exists()
    train_draft(samples, DRAFT, tmp_path / "parts", plan, lines.append)
    steps = [line.split(" of ")[0] for line in lines if line.startswith("step ")]
    assert steps[:4] == ["step 0", "step 3", "step 3", "step 6"]
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert any(not torch.equal(whole[name], tensor) for name, tensor in weights(Path(DRAFT.path)).items())


def test_the_loss_is_that_of_output_tokens_without_their_padding(tmp_path: Path) -> None:
    samples, lines = cycles(60), []
    train_draft(samples, DRAFT, tmp_path / "out", replace(PLAN, num_epochs=1), lines.append)
    model = AutoModelForCausalLM.from_pretrained(DRAFT.path, dtype=torch.float32)
    losses = []
    for one in split(samples)[1]:
        ids = torch.tensor([[*one.prompt_token_ids, *one.output_token_ids]])
        logits = model(ids[:, :-1]).logits[0, len(one.prompt_token_ids) - 1 :]
        losses.append(cross_entropy(logits, torch.tensor(one.output_token_ids), reduction="none"))
    [first, *_] = [line for line in lines if line.startswith("step 0 ")]
    assert first.endswith(f"held-out loss {torch.cat(losses).mean().item():.4f}")


def test_a_tenth_of_prompts_is_held_out_whatever_their_answers() -> None:
    samples = cycles(1000)
    learned, held_out = split(samples)
    assert 60 < len(held_out) < 140
    other = [replace(one, output_token_ids=one.output_token_ids[::-1]) for one in samples]
    assert [one.prompt_token_ids for one in split(other)[1]] == [one.prompt_token_ids for one in held_out]
    assert split([*samples, sample((1,), ()), replace(samples[0], draft_adapter=Adapter("a", "a", "f"))])[0] == learned


def test_what_cannot_be_trained_is_refused_with_its_parameter(tmp_path: Path) -> None:
    samples = cycles(60)
    for parameter, changed, out in (
        ("file", [], "new"),
        ("file", samples[:1], "new"),
        ("file", [replace(one, output_token_ids=()) for one in samples], "new"),
        ("draft", [*samples, sample((4096,), (1,)), sample((1,), ())], "new"),
        ("out", samples, ""),
    ):
        (tmp_path / "file").touch()
        with pytest.raises(InvalidParameterError) as refused:
            train_draft(changed, DRAFT, tmp_path / out, PLAN, nothing)
        assert refused.value.parameter == parameter
    with pytest.raises(InvalidParameterError, match="lower --learning-rate"):
        train_draft(samples, DRAFT, tmp_path / "far", replace(PLAN, learning_rate=1e30, num_epochs=4), nothing)
    with pytest.raises(ModelLoadError, match="there is no folder"):
        train_draft(samples, ModelSource(str(tmp_path / "none")), tmp_path / "new", PLAN, nothing)


def test_a_checkpoint_of_other_samples_is_refused(tmp_path: Path) -> None:
    def interrupting(line: str) -> None:
        if line.startswith("step 3"):
            raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training.part").touch()  # a first checkpoint was not written to its end
    with pytest.raises(KeyboardInterrupt):
        train_draft(cycles(60), DRAFT, tmp_path / "out", PLAN, interrupting)
    with pytest.raises(InvalidParameterError, match="a training of other samples"):
        train_draft(cycles(60, seed=1), DRAFT, tmp_path / "out", PLAN, nothing)
