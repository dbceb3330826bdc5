"""Prompts that begin alike: blocks are reused as far as a copy of the recurrent states was kept."""

import pytest
import torch

from specdec.cache.blocks import CachedSequence
from specdec.cache.recurrent.pool import PrefixStates, StatePool
from specdec.cache.recurrent.slots import SequenceState
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from tests.specdec.models.rounds import Rounds, make_runner, pair
from tests.thorough.models.test_recurrent import ONE_OF_A_KIND, TOLERANCE


def read(runner: ModelRunner, prompt: list[int], chunk: int = 100) -> CachedSequence:
    """A sequence that was read and offered to others, in chunks."""
    sequence = runner.new_sequence()
    for start in range(0, len(prompt), chunk):
        tokens = prompt[start : start + chunk]
        assert runner.reserve(sequence, start + len(tokens))
        runner.forward([RowInput(sequence, tokens, 0)])
        runner.keep_prefix(sequence, len(prompt))
    return sequence


def pool_of(runner: ModelRunner) -> StatePool:
    assert isinstance(runner.states, StatePool)
    return runner.states


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_reused_prefixes_hold_the_right_state(family: str) -> None:
    loaded, stock = pair(family)
    game = Rounds(make_runner(loaded), stock, seed=6)
    runner, prompt = game.runner, game.tokens(50)
    first = read(runner, prompt)
    again, other = runner.new_sequence(), runner.new_sequence()
    assert runner.reuse_prefix(again, prompt) == 48
    assert runner.reuse_prefix(other, prompt[:43] + game.tokens(9)) == 40
    runner.free(first)
    game.forward([(again, prompt[:48], prompt[48:] + game.tokens(5)), (other, prompt[:40], game.tokens(12))])
    runner.truncate(again, 40)
    game.forward([(again, prompt[:40], game.tokens(3))])
    assert game.difference <= TOLERANCE
    game.rows = [(again, []), (other, [])]
    game.drop_all()
    assert (pool_of(runner).num_in_use, runner.pool.num_in_use) == (0, 0)
    assert len(pool_of(runner).prefixes) == 1


def test_the_comparison_sees_a_copy_of_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stock = pair("qwen3_5")
    game = Rounds(make_runner(loaded), stock, seed=6)
    prompt = game.tokens(50)
    read(game.runner, prompt)
    find = PrefixStates.find

    def off_by_one(self: PrefixStates, digest: bytes) -> SequenceState:
        state = find(self, digest)
        for states in pool_of(game.runner)._states():
            for tensor in vars(states).values():
                if isinstance(tensor, torch.Tensor):
                    tensor[state.slot] = tensor[state.slot].roll(1, 0)
        return state

    monkeypatch.setattr(PrefixStates, "find", off_by_one)
    again = game.runner.new_sequence()
    assert game.runner.reuse_prefix(again, prompt) == 48
    game.forward([(again, prompt[:48], prompt[48:])])
    assert game.difference > 1e-2


def test_copies_are_made_now_and_then_and_go_when_slots_are_wanted() -> None:
    loaded, _ = pair("lfm2")
    runner = make_runner(loaded, num_state_slots=4, num_blocks=600)
    pool, prompts = pool_of(runner), [[n] * 300 for n in (5, 6, 7)]
    sequence = read(runner, prompts[0], chunk=10)
    assert sequence.state is not None
    assert sequence.state.kept == 268 - 268 % 4
    assert len(pool.prefixes) == 2
    runner.free(sequence)
    for prompt in prompts[1:]:
        runner.free(read(runner, prompt[:20]))
    assert (len(pool.prefixes), pool.num_in_use, pool.num_free) == (2, 0, 4)
    taken = [runner.new_sequence() for _ in range(4)]
    assert all(runner.reserve(one, 4) for one in taken)
    assert (len(pool.prefixes), pool.num_in_use, pool.num_free) == (0, 4, 0)
    assert runner.reuse_prefix(runner.new_sequence(), prompts[1]) == 0
    runner.keep_prefix(taken[0], 0)
    assert len(pool.prefixes) == 0


def test_the_last_copy_is_handed_over_where_no_slot_is_free() -> None:
    loaded, stock = pair("bamba")
    game = Rounds(make_runner(loaded, num_state_slots=2), stock, seed=7)
    runner, prompt = game.runner, game.tokens(40)
    runner.free(read(runner, prompt))
    other = runner.new_sequence()
    assert runner.reserve(other, 4)
    again = runner.new_sequence()
    assert runner.reuse_prefix(again, prompt) == 36
    assert (len(pool_of(runner).prefixes), pool_of(runner).num_in_use) == (0, 2)
    game.forward([(again, prompt[:36], prompt[36:])])
    assert game.difference <= TOLERANCE


def test_one_slot_shares_nothing() -> None:
    runner = make_runner(pair("lfm2")[0], num_state_slots=1)
    assert not runner.shares_prefixes
    runner.free(read(runner, [5] * 20))
    assert runner.reuse_prefix(runner.new_sequence(), [5] * 20) == 0


def test_a_salt_keeps_prefixes_apart() -> None:
    runner = make_runner(pair("lfm2")[0])
    runner.free(read(runner, [5] * 20))
    assert runner.reuse_prefix(runner.new_sequence(b"mine"), [5] * 20) == 0
    assert runner.reuse_prefix(runner.new_sequence(), [5] * 20) == 16


@pytest.mark.parametrize("salt", [b"mine", None])
def test_a_fork_without_a_slot_keeps_its_salt(salt: bytes | None) -> None:
    runner = make_runner(pair("lfm2")[0], num_state_slots=2)
    sequence, other = runner.new_sequence(salt), runner.new_sequence()
    assert runner.reserve(sequence, 4)
    assert runner.reserve(other, 4)
    fork = runner.fork(sequence)
    assert (len(fork), fork.state, fork.salt) == (0, None, salt)


def test_a_fork_leaves_no_copy_where_its_parent_left_one() -> None:
    runner = make_runner(pair("lfm2")[0], num_state_slots=8)
    sequence, prompt = read(runner, [5] * 40), [5] * 48
    assert len(pool_of(runner).prefixes) == 1
    for end in range(41, 49):
        fork = runner.fork(sequence)
        runner.free(sequence)
        sequence = fork
        assert runner.reserve(sequence, end)
        runner.forward([RowInput(sequence, prompt[end - 1 : end], 0)])
        runner.keep_prefix(sequence, end)
    assert len(pool_of(runner).prefixes) == 1
