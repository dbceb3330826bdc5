"""What may draft for the chat demo: each learns, is read as others' checkpoints are, and drafts as it was taught to."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from examples.train_draft import chat, chat_drafters, models
from examples.train_draft.chat import Chats
from examples.train_draft.chat_drafters import Kind, Lesson
from examples.train_draft.loop import Plan
from examples.train_draft.models import Shape
from examples.train_draft.optimizers import Rates
from specdec.checkpoint.parallel_drafting import step_tokens
from specdec.drafting.heads import HeadsOptions, load_heads
from specdec.executor.rows import HeadInput
from specdec.executor.runner import ModelRunner
from specdec.models.hidden import AFTER_NORM
from specdec.models.loading import ModelSource, load_tokenizer, prepare_model
from tests.specdec.models.families import randomize
from tests.specdec.vocabularies import DRAFT

NUM_CHATS, NUM_TOKENS = 5, 24
SHAPE = Shape(num_layers=6, hidden_size=32, intermediate_size=48, num_heads=2, vocab_size=64, max_positions=64)
PLAN = Plan(num_steps=30, window_tokens=NUM_TOKENS, batch_size=2, seed=3)
RATES = Rates(matrices=0.02, others=0.01, num_warmup_steps=2)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return randomize(models.build(SHAPE, 1), 1).requires_grad_(False)


@pytest.fixture(scope="module")
def chats(target: PreTrainedModel) -> Chats:
    rows = torch.randint(3, SHAPE.vocab_size, (NUM_CHATS, NUM_TOKENS), generator=torch.Generator().manual_seed(4))
    hidden = target.model(rows, use_cache=False).last_hidden_state
    answers = torch.arange(NUM_TOKENS).expand(NUM_CHATS, -1) > 6
    return Chats(rows.numpy().astype(np.uint16), answers.numpy(), hidden.half().numpy(), num_held_out=1)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "pard"])
def test_each_learns_resumes_exactly_and_is_read_as_others_are(
    kind: Kind, target: PreTrainedModel, chats: Chats, tmp_path: Path
) -> None:
    tokenizer, draft = load_tokenizer(ModelSource(str(DRAFT))), chat.begin_draft(target)

    def trained(work: Path, plan: Plan) -> PreTrainedModel:
        return chat_drafters.train(kind, target, draft, tokenizer, chats, plan, RATES, work).model

    lesson = Lesson.of(target, chats)
    layers = [2, 3, 3]
    read = chat_drafters.write_read_states(target, layers, chats, tmp_path / "states.bin")

    def loss(model: PreTrainedModel) -> float:
        if kind == "eagle3":
            model.reads(target.get_input_embeddings().weight)
        loss_of = {
            "medusa": lambda: chat_drafters.medusa_loss(model, lesson),
            "eagle3": lambda: chat_drafters.eagle3_loss(model, lesson, read),
            "pard": lambda: chat_drafters.pard_loss(model, lesson),
        }[kind]()
        return float(loss_of(torch.arange(4)[:, None]).detach())

    before = loss(trained(tmp_path / "none", replace(PLAN, num_steps=0)))
    whole = trained(tmp_path / "whole", PLAN)
    assert loss(whole) < 0.95 * before
    for _ in range(3):
        parts = trained(tmp_path / "parts", replace(PLAN, num_steps=2, deadline_s=0.0))
    torch.testing.assert_close(
        parts.state_dict(), trained(tmp_path / "two", replace(PLAN, num_steps=2)).state_dict(), rtol=0, atol=0
    )
    exported = tmp_path / "whole" / "pair" / f"chat-{kind}"
    if kind == "pard":
        config = AutoConfig.from_pretrained(exported)
        assert step_tokens(config, "it", 9) == replace(step_tokens(config, "it", 8), notes=())
        assert step_tokens(config, "it", 9).count == config.para_num == 8
        assert torch.equal(whole.model.embed_tokens.weight, target.model.embed_tokens.weight)
    else:
        served = prepare_model(copy.deepcopy(target), "tiny")
        _, heads = load_heads(HeadsOptions(str(exported), 4, method=kind), served)
        assert heads.hidden_layers == (tuple(layers) if kind == "eagle3" else (AFTER_NORM,))
        states = [torch.randn(3, SHAPE.hidden_size) for _ in heads.hidden_layers]
        assert heads.logits(heads.fuse(states), 0).shape == (3, SHAPE.vocab_size)


@torch.inference_mode()
def test_packed_drafts_of_a_head_are_those_that_it_drafts(tmp_path: Path) -> None:
    target = randomize(models.build(SHAPE, 1), 1)
    head = randomize(chat_drafters.begin_eagle3(target), 5).to(torch.bfloat16).float()
    head.reads(target.get_input_embeddings().weight)
    models.export_eagle3(head, tmp_path)
    loaded, heads = load_heads(HeadsOptions(str(tmp_path), 3, method="eagle3"), prepare_model(target, "tiny"))
    runner = ModelRunner(loaded, num_blocks=16, block_size=4)
    tokens = torch.randint(3, SHAPE.vocab_size, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    fused = head.fuse([torch.randn(8, SHAPE.hidden_size) for _ in range(3)])
    packed = chat_drafters.packed_drafts(head, fused, torch.tensor(tokens[1:]), 3)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, len(tokens))
    for start in range(6):
        features = runner.forward_heads(
            heads.forward, [HeadInput(sequence, start, [tokens[start + 1]])], fused[start : start + 1]
        )
        for place, of_place in enumerate(packed):
            if place:
                drafted = HeadInput(sequence, start + place, [tokens[start + 1 + place]])
                features = runner.forward_heads(heads.forward, [drafted], features)
            torch.testing.assert_close(features[0], of_place[start + place], rtol=1e-4, atol=1e-4)


def test_the_text_is_seen_up_to_where_a_draft_began_and_its_own_tokens() -> None:
    sees = chat_drafters.seen_in_drafts(4, 3).int().tolist()
    assert sees[3] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert sees[4 + 3] == [1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert sees[8 + 3] == [1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
