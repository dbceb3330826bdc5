"""Ragged, split, rolled back forwards of models with recurrent layers against whole forwards of each row."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import specdec.executor.recurrence as recurrence_module
from specdec.cache.recurrent.slots import SequenceState, Window
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.kernels.recurrent_metadata import StateRow
from specdec.models.loading import prepare_model
from tests.sizes import sized
from tests.specdec.models.recurrent_families import RECURRENT, make_recurrent
from tests.specdec.models.rounds import WINDOW, Rounds, make_runner, pair, play, whole_forwards

TOLERANCE = 2e-4
DRAFT_LENGTHS = (1, 2, 5, 8)
ONE_OF_A_KIND = ("qwen3_5", "kimi_linear", "bamba", "jamba", "lfm2")
EVERY_ONE = sized(ONE_OF_A_KIND, tuple(RECURRENT))


NUM_ROUNDS = 8


def verify_each(family: str) -> float:
    """Eight rounds with each draft length, as a target reads them: the largest difference of a logit."""
    return max(
        play(family, lambda game, k=k: [game.verify(k) for _ in range(NUM_ROUNDS)], seed=k)  # type: ignore[misc]
        for k in DRAFT_LENGTHS
    )


@pytest.mark.parametrize("family", EVERY_ONE)
def test_edge_16_convolutions_and_states_roll_back_together(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    difference = verify_each(family)
    record_property("max_difference", difference)
    assert difference <= TOLERANCE


def draft_mixed(game: Rounds) -> None:
    for index in range(NUM_ROUNDS):
        game.draft(DRAFT_LENGTHS[index % len(DRAFT_LENGTHS)])


@pytest.mark.parametrize("family", EVERY_ONE)
def test_drafts_read_token_by_token_are_taken_back(family: str, record_property: Callable[[str, object], None]) -> None:
    difference = play(family, draft_mixed)
    record_property("max_difference", difference)
    assert difference <= TOLERANCE


@pytest.mark.whole
@pytest.mark.parametrize("num_draft_tokens", DRAFT_LENGTHS)
@pytest.mark.parametrize("family", EVERY_ONE)
def test_drafts_of_each_length_are_taken_back(
    family: str, num_draft_tokens: int, record_property: Callable[[str, object], None]
) -> None:
    difference = play(family, lambda game: [game.draft(num_draft_tokens) for _ in range(NUM_ROUNDS)])
    record_property("max_difference", difference)
    assert difference <= TOLERANCE


def keep_refused(
    start: int, count: int, past: int, state: SequenceState, window: Window, has_kernels: bool = False
) -> StateRow:
    """A state that goes on from where it was, whatever was taken back."""
    row = original_state_row(start, count, past, state, window, has_kernels)
    return replace(row, num_computed_tokens=max(state.newest, past))


original_state_row = recurrence_module.state_row


@pytest.mark.parametrize("family", EVERY_ONE)
def test_the_comparison_sees_a_state_that_is_not_rolled_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence_module, "state_row", keep_refused)
    assert play(family, lambda game: [game.verify(5) for _ in range(3)]) > 1e-2
    assert play(family, lambda game: [game.draft(2) for _ in range(3)]) > 1e-2


def test_forks_take_their_state_along_and_how_far_it_goes_back() -> None:
    loaded, stock = pair("qwen3_5")
    game = Rounds(make_runner(loaded), stock, seed=1)
    game.prefill([30], max_chunk=7)
    sequence, have = game.rows[0]
    game.forward([(sequence, list(have), game.tokens(6))])
    forks = [game.runner.fork(sequence) for _ in range(4)]
    for fork, length in zip(forks, (36, 33, 30, 25), strict=True):
        game.runner.truncate(fork, length)
        assert len(fork) == length
    for _ in range(3):
        everyone = (*forks, sequence)
        game.forward([(one, list(one.tokens), game.tokens(game.rng.randint(1, 3))) for one in everyone])
    assert game.difference <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_5", "lfm3"])
def test_what_reaches_further_back_than_the_window_is_read_again(family: str) -> None:
    loaded, stock = pair(family)
    game = Rounds(make_runner(loaded), stock, seed=2)
    game.prefill([60], max_chunk=60)
    sequence, have = game.rows[0]
    assert sequence.state is not None
    oldest = sequence.state.oldest
    assert oldest <= len(have) - WINDOW
    game.runner.truncate(sequence, oldest)
    assert len(sequence) == oldest
    game.forward([(sequence, have[:oldest], game.tokens(3))])
    game.runner.truncate(sequence, oldest - 1)
    assert (sequence.tokens, sequence.state) == ([], None)
    assert game.runner.pool.num_in_use == 0
    game.forward([(sequence, [], have)])
    assert game.difference <= TOLERANCE


def test_slots_run_out_and_come_back() -> None:
    loaded, _ = pair("lfm2")
    runner = make_runner(loaded, num_state_slots=2)
    first, second, third = (runner.new_sequence() for _ in range(3))
    assert runner.reserve(first, 3)
    assert runner.reserve(second, 3)
    assert not runner.reserve(third, 3)
    assert third.tables[0] == []
    runner.forward([RowInput(first, [5, 6, 7], 0)])
    fork = runner.fork(first)
    assert (fork.tokens, fork.tables[0]) == ([], [])
    runner.free(second)
    assert runner.fork(first).tokens == [5, 6, 7]
    assert runner.states is not None
    assert (runner.states.num_in_use, runner.states.num_free) == (2, 0)
    with pytest.raises(ValueError, match="no room is reserved"):
        runner.forward([RowInput(third, [5], 1)])


def test_a_slot_is_empty_when_it_is_taken() -> None:
    loaded, stock = pair("bamba")
    game = Rounds(make_runner(loaded, num_state_slots=1), stock, seed=3)
    for _ in range(3):
        game.prefill([24], max_chunk=9)
        game.drop_all()
    assert game.difference <= TOLERANCE


def test_a_step_that_fails_spoils_the_states_it_touched() -> None:
    model = make_recurrent("lfm2")
    runner = make_runner(prepare_model(model, "lfm2"))
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 40)
    runner.forward([RowInput(sequence, list(range(3, 23)), 0)])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward([RowInput(sequence, [5, 6], 1)])
    handle.remove()
    with pytest.raises(ValueError, match="spoilt"):
        runner.forward([RowInput(sequence, [5, 6], 1)])
    runner.truncate(sequence, 19)
    assert len(sequence) == 0


def test_our_functions_are_in_place_during_a_step_only() -> None:
    loaded, stock = pair("qwen3_5")
    other = prepare_model(make_recurrent("qwen3_5", seed=9), "other")
    runners = [make_runner(model) for model in (loaded, other)]
    row = list(range(3, 30))
    before = whole_forwards(stock, [row])[0]
    for runner in runners:
        sequence = runner.new_sequence()
        assert runner.reserve(sequence, len(row))
        for start in range(0, len(row), 10):
            chunk = row[start : start + 10]
            logits = runner.forward([RowInput(sequence, chunk, len(chunk))])
        if runner.loaded is loaded:
            assert (logits - before[20:]).abs().max() <= TOLERANCE
        assert not any("forward" in module.__dict__ for module in runner.loaded.model.modules())
    assert torch.equal(whole_forwards(stock, [row])[0], before)


def test_bfloat16_states_stay_close_to_float32() -> None:
    loaded = prepare_model(make_recurrent("qwen3_5").to(torch.bfloat16), "qwen3_5")
    runner = ModelRunner(loaded, num_blocks=40)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 40)
    row = list(range(3, 33))
    logits = torch.cat([runner.forward([RowInput(sequence, [token], 1)]) for token in row])
    expected = whole_forwards(pair("qwen3_5")[1], [row])[0]
    assert (logits - expected).square().mean().sqrt() < 0.1
