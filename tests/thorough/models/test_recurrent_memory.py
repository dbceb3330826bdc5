"""What recurrent states take, what is refused for want of memory, and the check at load."""

import random

import pytest
import torch

import specdec.executor.recurrence as recurrence_module
from specdec.cache.recurrent.pool import StatePool, bytes_per_slot, checked_window, state_bytes
from specdec.cache.recurrent.slots import SequenceState, StateSlots, Window
from specdec.core.errors import InvalidParameterError, MemoryPlanError, ModelLoadError
from specdec.executor.recurrence import state_row
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.models.memory import plan_memory
from specdec.models.parity_check import check_admission
from tests.specdec.models.recurrent_families import make_recurrent
from tests.specdec.models.rounds import WINDOW, make_runner, pair
from tests.thorough.models.test_recurrent import EVERY_ONE, ONE_OF_A_KIND, keep_refused


@pytest.mark.parametrize("family", EVERY_ONE)
def test_families_are_admitted(family: str) -> None:
    runner = make_runner(pair(family)[0])
    report = check_admission(runner)
    assert report.relative_error < 2e-4
    assert report.num_tokens == 73 + 4 * (WINDOW + 9)
    assert runner.pool.num_in_use == 0
    assert runner.states is not None
    assert runner.states.num_in_use == 0


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_a_model_whose_states_are_not_rolled_back_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence_module, "state_row", keep_refused)
    with pytest.raises(ModelLoadError, match="cannot be served exactly"):
        check_admission(make_runner(pair(family)[0]))


def test_one_slot_is_enough_to_check_a_model() -> None:
    assert check_admission(make_runner(pair("bamba")[0], num_state_slots=1)).relative_error < 1e-4


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_the_plan_is_what_the_states_take(family: str) -> None:
    loaded, _ = pair(family)
    window = checked_window(12)
    plan = plan_memory(loaded, budget_bytes=20_000_000, block_size=8, window=window)
    runner = ModelRunner(
        loaded,
        num_blocks=plan.num_blocks,
        block_size=8,
        num_state_slots=plan.num_state_slots,
        window=plan.window,
    )
    assert runner.states is not None
    assert runner._cache.num_bytes + runner.states.num_bytes == plan.cache_bytes <= 20_000_000
    slot_bytes = plan.state_bytes + plan.checkpoint_bytes
    assert runner.states.num_bytes == plan.num_state_slots * slot_bytes
    assert plan.sequence_bytes == 1024 * plan.bytes_per_token + slot_bytes
    assert runner.max_rollback == plan.rollback_tokens == 12
    assert plan.state_bytes == state_bytes(loaded.recurrent_layers)


def test_one_sequence_must_fit() -> None:
    loaded, _ = pair("bamba")
    window = checked_window(18)
    slot_bytes = bytes_per_slot(loaded.recurrent_layers, window)
    needed = slot_bytes + 65 * 16 * 128
    plan = plan_memory(loaded, budget_bytes=needed, window=window)
    assert (plan.num_full_sequences, plan.num_state_slots, plan.num_blocks) == (1, 1, 64)
    message = r"1024 tokens of bamba takes .* MiB of recurrent state and .* MiB to roll it back by 18 tokens"
    with pytest.raises(MemoryPlanError, match=message) as caught:
        plan_memory(loaded, budget_bytes=needed - 1, window=window)
    assert "lower max_model_len to 1008 or give more memory" in str(caught.value)
    assert plan_memory(loaded, budget_bytes=needed - 1, window=window, max_model_len=1008).num_state_slots == 1
    with pytest.raises(MemoryPlanError, match="; give more memory"):
        plan_memory(loaded, budget_bytes=slot_bytes - 1, window=window, max_model_len=16)


def test_no_more_slots_than_sequences_and_their_branches() -> None:
    loaded, _ = pair("mamba2")
    plan = plan_memory(loaded, budget_bytes=1 << 32, max_model_len=64, max_num_seqs=3)
    assert plan.num_state_slots == 3 + 64
    assert plan.num_blocks == plan.num_state_slots * 4
    assert plan.bytes_per_token == 0


def test_a_window_is_not_too_short() -> None:
    assert checked_window(4) == Window(4)
    with pytest.raises(InvalidParameterError, match="rollback_tokens must be at least 4"):
        checked_window(3)


def test_windows_never_reach_less_far_than_they_say() -> None:
    rng = random.Random(0)
    window = Window(5)
    for _ in range(200):
        oldest = length = furthest = 0
        for _ in range(20):
            num_new = rng.choice((1, 2, 7, 30))
            oldest = window.oldest_after(oldest, length, num_new, is_scanned_again=rng.random() < 0.5)
            length += num_new
            furthest = max(furthest, length)
            assert length - window.num_kept_tokens <= oldest <= max(0, furthest - window.num_tokens)
            length = rng.randint(oldest, length)


def test_kernels_scan_no_more_again_than_a_window() -> None:
    """Of a target whose drafts are refused, by steps of a token and four drafts; else up to twice as much."""
    window, most = Window(10), {True: 0, False: 0}
    for has_kernels in most:
        state = SequenceState(0)
        for length in range(50):
            row = state_row(0, 5, length, state, window, has_kernels)
            if state.newest != length and length > window.num_tokens:
                most[has_kernels] = max(most[has_kernels], length - state.oldest)
            state.oldest, state.newest = row.oldest_after, length + 5
    assert most == {True: 6, False: 16}


def test_a_slot_is_given_back_once() -> None:
    slots = StateSlots(2)
    state = slots.take()
    assert state is not None
    assert slots.num_in_use == 1
    slots.give_back(state)
    with pytest.raises(AssertionError, match="is free already"):
        slots.give_back(state)
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        StateSlots(0)


def test_a_pool_of_states_in_another_dtype_keeps_them_in_float32() -> None:
    loaded = prepare_model(make_recurrent("bamba").to(torch.bfloat16), "bamba")
    pool = StatePool(loaded.recurrent_layers, 2, checked_window(8))
    assert pool.num_bytes == 2 * bytes_per_slot(loaded.recurrent_layers, pool.window)
    assert check_admission(ModelRunner(loaded, num_blocks=80, block_size=4)).relative_error < 3e-2
