from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from specdec.executor.slots import SlotShape, SlotState, SlotTable, SlotUpdates

SHAPE = SlotShape(num_slots=4, block_size=4, max_blocks=6, null_blocks=(9, 7))
UPDATES = 16


def send(updates: SlotUpdates, state: SlotState, most: int = UPDATES) -> int:
    arrays = {name: np.empty(most, np.int32) for name in ("update_word", "update_value")}
    left = updates.stage(arrays)
    state.apply(*(torch.from_numpy(arrays[name].copy()) for name in ("update_word", "update_value")))
    return left


def test_differences_make_the_state_what_the_host_has_set() -> None:
    rng = random.Random(1)
    updates, state = SlotUpdates(SHAPE), SlotState(SHAPE, torch.device("cpu"))
    expected = {name: tensor.clone().numpy() for name, tensor in state.tensors.items()}
    del expected["no_word"]
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            slot = rng.randrange(4)
            if rng.random() < 0.5:
                first = rng.randrange(6)
                blocks = [rng.randrange(50) for _ in range(rng.randrange(7 - first))]
                group = rng.randrange(2)
                updates.set_blocks(group, slot, first, blocks)
                expected[f"block_table_{group}"][slot, first : first + len(blocks)] = blocks
            else:
                slots, lengths = np.array(rng.sample(range(4), 2)), np.array([rng.randrange(99), 1])
                updates.set_lengths(slots, lengths)
                expected["num_computed_tokens"][slots] = lengths
        while send(updates, state):
            pass
        for name, values in expected.items():
            np.testing.assert_array_equal(state.tensors[name].numpy(), values, err_msg=name)


def test_the_last_value_counts_and_what_does_not_fit_stays_pending() -> None:
    updates, state = SlotUpdates(SHAPE), SlotState(SHAPE, torch.device("cpu"))
    for length in (5, 6):
        updates.set_lengths(np.array([1]), np.array([length]))
    assert send(updates, state, most=1) == 0
    assert state.tensors["num_computed_tokens"].tolist() == [0, 6, 0, 0, 0]
    updates.set_blocks(0, 2, 1, [1, 2, 3])
    assert send(updates, state, most=2) == 1
    updates.set_blocks(0, 2, 4, [4])
    assert send(updates, state, most=2) == 0
    assert state.tensors["block_table_0"][2].tolist() == [9, 1, 2, 3, 4, 9]


def test_what_the_device_has_advanced_is_not_sent_back() -> None:
    updates, state = SlotUpdates(SHAPE), SlotState(SHAPE, torch.device("cpu"))
    updates.set_lengths(np.array([0, 1]), np.array([3, 4]))
    send(updates, state)
    state.tensors["num_computed_tokens"].add_(2)
    updates.set_blocks(0, 0, 0, [3])
    send(updates, state)
    assert state.tensors["num_computed_tokens"].tolist() == [5, 6, 2, 2, 2]


def test_a_slot_that_was_never_set_changes_nothing() -> None:
    tensors = SlotState(SHAPE, torch.device("cpu")).tensors
    assert tensors["num_computed_tokens"].tolist() == [0] * 5
    assert tensors["block_table_1"].unique().tolist() == [7]


@pytest.mark.parametrize(
    "call",
    [
        lambda updates: updates.set_lengths(np.array([4]), np.array([1])),
        lambda updates: updates.set_lengths(np.array([-1]), np.array([1])),
        lambda updates: updates.set_blocks(0, 0, 5, [1, 2]),
    ],
)
def test_nothing_is_set_outside_the_state(call) -> None:
    with pytest.raises(IndexError, match=r"must be in \[0, "):
        call(SlotUpdates(SHAPE))


def test_each_sequence_keeps_one_slot_until_it_is_given_back() -> None:
    table: SlotTable[str] = SlotTable(2)
    a, b = table.take("a"), table.take("b")
    assert {a, b} == {0, 1}
    assert table["a"] == a
    assert len(table) == 2
    assert table.num_free == 0
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        table.take("c")
    with pytest.raises(ValueError, match="'a' has slot"):
        table.take("a")
    assert table.give_back("a") == a
    assert "a" not in table
    assert table.take("c") == a
