"""Stepping by hand gives transformers' own logits, whatever was taken back or branched off in between."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.models.demos import demo_folder
from specdec import BackendOptions, ModelSource, Stepper
from specdec.core.errors import InvalidParameterError, MemoryPlanError

TEXT = "def read_lines(path):\n    with open(path) as file:\n"
TREE = ((40, 41, 42, 43, 44, 45), (-1, 0, 0, 2, -1, 4))
"""Tokens and parents: paths 40 41, 40 42 43 and 44 45."""


@pytest.fixture(scope="module", params=["target", "hybrid"])
def pair(request: pytest.FixtureRequest) -> tuple[Stepper, PreTrainedModel]:
    folder = str(demo_folder(request.param))
    stepper = Stepper.from_pretrained(ModelSource(folder, dtype="float32", device="cpu"))
    return stepper, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def stepper(pair: tuple[Stepper, PreTrainedModel]) -> Stepper:
    pair[0].rollback_to(0)
    pair[0].observe(pair[0].encode(TEXT))
    return pair[0]


@torch.no_grad()
def assert_close(got: torch.Tensor, pair: tuple[Stepper, PreTrainedModel], tokens: list[int]) -> None:
    want = pair[1](torch.tensor([tokens]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_logits_and_hidden_state_after_a_text(pair, stepper):
    assert_close(stepper.next_logits(), pair, [*stepper.tokens])
    hidden = stepper.last_hidden_state()
    with torch.no_grad():
        output = pair[1](torch.tensor([stepper.tokens]), output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(hidden, output.hidden_states[-1][0, -1], rtol=0, atol=1e-3)
        torch.testing.assert_close(pair[1].lm_head(hidden), stepper.next_logits(), rtol=0, atol=1e-3)


def test_what_was_taken_back_leaves_no_trace(pair, stepper):
    tokens = [*stepper.tokens]
    stepper.next_logits()
    stepper.observe(range(50, 53))
    stepper.next_logits()
    for length in (len(tokens) + 1, len(tokens), len(tokens) - 1, 3):
        stepper.rollback_to(length)
        assert_close(stepper.next_logits(), pair, [*tokens, 50, 51, 52][:length])
    stepper.observe([60])
    assert_close(stepper.next_logits(), pair, [*tokens[:3], 60])
    assert stepper.tokens == (*tokens[:3], 60)
    stepper.rollback_to(1)
    stepper.observe([61, 62])
    assert_close(stepper.next_logits(), pair, [tokens[0], 61, 62])


def test_continuations_are_read_side_by_side(pair, stepper):
    tokens, continuations = [*stepper.tokens], [[70], [], [70, 71, 72], [73, 74]]
    logits = stepper.batched_logits(continuations)
    assert logits.shape == (4, 4096)
    for got, continuation in zip(logits, continuations, strict=True):
        assert_close(got, pair, tokens + continuation)
    assert stepper.tokens == tuple(tokens)
    assert_close(stepper.next_logits(), pair, tokens)
    assert stepper.batched_logits([]).shape[0] == 0


def test_a_tree_is_read_along_its_paths(pair, stepper):
    logits = stepper.tree_logits(*TREE)
    paths = ([40], [40, 41], [40, 42], [40, 42, 43], [44], [44, 45])
    for got, path in zip(logits, paths, strict=True):
        assert_close(got, pair, [*stepper.tokens, *path])
    stepper.observe([40])
    torch.testing.assert_close(stepper.next_logits(), logits[0], rtol=0, atol=1e-3)
    assert stepper.last_hidden_state().shape == (256,)


def test_a_long_text_is_read_in_chunks(pair, stepper):
    stepper.observe([i % 90 + 3 for i in range(1100)])
    assert_close(stepper.next_logits(), pair, [*stepper.tokens])


def test_scarce_room_takes_more_steps_and_gives_the_same():
    source = ModelSource(str(demo_folder("target")), dtype="float32", device="cpu")
    wide, narrow = (
        Stepper.from_pretrained(source, BackendOptions(max_model_len=160, max_num_seqs=most)) for most in (64, 1)
    )
    for one in (wide, narrow):
        one.observe(range(3, 133))
    logits = [one.batched_logits([[token, token + 1] for token in range(40, 60)]) for one in (wide, narrow)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)
    narrow.observe(range(3, 13))
    with pytest.raises(MemoryPlanError, match="no room for 20 tokens after the text"):
        narrow.batched_logits([range(3, 23)])


def test_what_is_wrong_is_named(stepper):
    for call, words in {
        lambda: stepper.observe([4096]): "tokens holds 4096 at index 0",
        lambda: stepper.observe([]): "tokens must hold at least one",
        lambda: stepper.observe([5] * 2048): "the model reads 2048 tokens, not",
        lambda: stepper.rollback_to(1000): r"length must be in \[0, ",
        lambda: stepper.tree_logits([5, 6], [1, -1]): "parents must name, for each token, an earlier one or -1",
        lambda: stepper.tree_logits([5], []): "parents must name",
    }.items():
        with pytest.raises(InvalidParameterError, match=words):
            call()
    stepper.rollback_to(0)
    with pytest.raises(InvalidParameterError, match="observe at least one token first"):
        stepper.next_logits()
