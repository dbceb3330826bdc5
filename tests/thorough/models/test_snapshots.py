"""Models whose state can only be copied as a whole: snapshot, restore and replay."""

import pytest
import torch
import transformers

from specdec.cache.recurrent.opaque import SnapshotPool
from specdec.cache.recurrent.slots import SequenceState
from specdec.core.errors import ModelLoadError
from specdec.executor.rows import RowInput
from specdec.executor.snapshot_runner import SnapshotRunner
from specdec.models.loading import prepare_model
from specdec.models.memory import plan_memory
from specdec.models.parity_check import check_admission
from tests.specdec.models.recurrent_families import OPAQUE, make_recurrent
from tests.specdec.models.rounds import Rounds

TOLERANCE = 2e-4
READS_MANY = {"rwkv": True, "xlstm": True, "minimax": False, "recurrent_gemma": False, "zaya": True}


def make_runner(family: str, reads_many: bool, window_tokens: int = 8) -> SnapshotRunner:
    loaded = prepare_model(make_recurrent(family), family)
    return SnapshotRunner(loaded, num_blocks=120, block_size=4, reads_many=reads_many, window_tokens=window_tokens)


@pytest.mark.parametrize("family", OPAQUE)
def test_the_check_finds_out_whether_several_tokens_are_read_right(family: str) -> None:
    runner = make_runner(family, reads_many=True)
    if READS_MANY[family]:
        assert check_admission(runner).relative_error < 1e-4
    else:
        with pytest.raises(ModelLoadError, match="cannot be served exactly"):
            check_admission(runner)
    assert runner.states is not None
    assert (runner.pool.num_in_use, runner.states.num_in_use) == (0, 0)
    assert check_admission(make_runner(family, reads_many=False)).relative_error < 1e-4


def test_branches_leave_no_copies_to_be_carried_out() -> None:
    runner = make_runner("rwkv", READS_MANY["rwkv"])
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 3)
    runner.forward([RowInput(sequence, [5, 6, 7], 1)])
    for _ in range(3):
        branch = runner.fork(sequence)
        assert runner.reserve(branch, 4)
        runner.forward([RowInput(branch, [8], 1)])
        runner.free(branch)
    copies: list[object] = []
    runner.pool.groups[0].prepare(copies.append, copies.append)
    assert copies == []


@pytest.mark.parametrize("family", OPAQUE)
def test_rows_equal_whole_forwards(family: str) -> None:
    game = Rounds(make_runner(family, READS_MANY[family]), make_recurrent(family), seed=4)
    if game.stock._can_set_attn_implementation():
        game.stock.set_attn_implementation("eager")
    game.prefill([9, 4, 1, 30], max_chunk=12)
    for num_draft_tokens in (1, 2, 5, 2):
        game.verify(num_draft_tokens)
    game.draft(2)
    sequence, have = game.rows[0]
    fork = game.runner.fork(sequence)
    game.runner.truncate(fork, len(have) - 3)
    everyone = [one for one, _ in game.rows] + [fork]
    game.forward([(one, list(one.tokens), game.tokens(3)) for one in everyone])
    assert game.difference <= TOLERANCE
    game.runner.free(fork)
    game.drop_all()
    assert game.runner.states is not None
    assert (game.runner.pool.num_in_use, game.runner.states.num_in_use) == (0, 0)


def test_the_comparison_sees_a_state_that_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SnapshotPool.read

    def stale(self: SnapshotPool, state: SequenceState, past: list[int], *rest: object) -> torch.Tensor:
        self._held[state.slot].length = len(past)
        return read(self, state, past, *rest)

    monkeypatch.setattr(SnapshotPool, "read", stale)
    with pytest.raises(ModelLoadError, match="cannot be served exactly"):
        check_admission(make_runner("rwkv", reads_many=True))


def test_what_reaches_further_back_than_the_copies_is_read_again() -> None:
    runner = make_runner("rwkv", reads_many=True)
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 60)
    for start in range(0, 60, 10):
        runner.forward([RowInput(sequence, list(range(start, start + 10)), 0)])
    assert sequence.state is not None
    oldest = sequence.state.oldest
    assert 0 < oldest <= 60 - 8
    runner.truncate(sequence, oldest - 1)
    assert (len(sequence), sequence.state) == (0, None)


@pytest.mark.parametrize("family", OPAQUE)
def test_memory_is_planned_by_what_was_measured(family: str) -> None:
    loaded = prepare_model(make_recurrent(family), family)
    assert loaded.opaque_state is not None
    plan = plan_memory(loaded, budget_bytes=1 << 27, max_model_len=128)
    assert plan.state_bytes == loaded.opaque_state.bytes_per_sequence > 0
    assert plan.checkpoint_bytes == 2 * plan.state_bytes
    assert (plan.bytes_per_token > 0) == (family in ("minimax", "recurrent_gemma", "zaya"))
    assert plan.num_full_sequences > 0


def test_a_state_on_the_modules_is_there_only_while_the_model_runs() -> None:
    runner = make_runner("recurrent_gemma", reads_many=False)
    opaque = runner.loaded.opaque_state
    assert opaque is not None
    assert {attribute for _, attribute in opaque.places} == {"conv1d_state", "recurrent_states"}
    first, second = runner.new_sequence(), runner.new_sequence()
    for sequence in (first, second):
        assert runner.reserve(sequence, 9)
        runner.forward([RowInput(sequence, [5, 6, 7], 0)])
        for name, attribute in opaque.places:
            assert getattr(runner.loaded.model.get_submodule(name), attribute) is None


def test_a_model_that_keeps_its_state_to_itself_is_refused() -> None:
    class Secretive(transformers.RwkvForCausalLM):
        def forward(self, input_ids: torch.Tensor, state: object = None, **options: object) -> object:
            output = super().forward(input_ids, state=state, **options)
            output.state = None
            return output

    model = Secretive(make_recurrent("rwkv").config)
    with pytest.raises(ModelLoadError, match="Secretive has recurrent layers and does not give their state away"):
        prepare_model(model, "own")
