from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.core.drafts import depths, path_to
from specdec.executor.derive import DerivedStep, Deriver, StepShape, lay_out
from specdec.executor.slots import SlotShape, SlotState, SlotUpdates
from specdec.executor.staging import Field, Layout, Record, Staging
from specdec.kernels.segmented import NO_TREE
from tests.specdec.operators import DeviceOnly, Operators

SLOTS = SlotShape(num_slots=6, block_size=4, max_blocks=16, null_blocks=(100, 50))
STEP = StepShape(max_rows=5, max_tokens=48, max_updates=128)
RESULT = Layout((Field("token", (48,)),))


@dataclass
class Row:
    slot: int
    tokens: list[int]
    num_drafts: int = 0
    num_logits: int = 0
    parents: list[int] | None = None


class Device:
    """What the wiring will have, on one device."""

    def __init__(self, step: StepShape, device: str = "cpu") -> None:
        self.shape = step
        self.staging = Staging(step.layout, torch.device(device))
        self.record = Record(RESULT, torch.device(device))
        self.updates = SlotUpdates(SLOTS)
        self.state = SlotState(SLOTS, torch.device(device))
        self.deriver = Deriver(step, self.state)

    def lay_out(self, rows: list[Row]) -> None:
        arrays = self.staging.begin()
        assert self.updates.stage(arrays) == 0
        lay_out(
            self.shape,
            arrays,
            SLOTS.padding_slot,
            slots=[row.slot for row in rows],
            num_tokens=[len(row.tokens) for row in rows],
            num_drafts=[row.num_drafts for row in rows],
            num_logits=[row.num_logits for row in rows],
            tokens=[token for row in rows for token in row.tokens],
            parents={i: row.parents for i, row in enumerate(rows) if row.parents},
        )

    def run(self, num_tokens: int = 48, num_logits: int = 48) -> tuple[DerivedStep, Tensor]:
        self.deriver.apply_updates(self.staging.tensors)
        step = self.deriver.derive(self.staging.tensors, num_tokens)
        return step, self.deriver.logit_tokens(self.staging.tensors, step, num_logits)


def random_rows(rng: random.Random, trees: bool) -> list[Row]:
    rows = []
    for slot in rng.sample(range(SLOTS.num_slots), rng.randrange(1, STEP.max_rows + 1)):
        tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        kind = rng.randrange(4)
        if kind == 0:  # a part of a prompt, perhaps with logits of all its tokens
            rows.append(Row(slot, tokens, num_logits=rng.choice([0, len(tokens)])))
            continue
        num_drafts = rng.randrange(len(tokens))
        parents = [rng.randrange(-1, i) for i in range(num_drafts)] if trees and kind == 1 else None
        rows.append(Row(slot, tokens, num_drafts, num_drafts + 1, parents))
    return rows


def expected(rows: list[Row], length: list[int], tables: np.ndarray, t: int) -> dict:
    """The same by loops. ``tables``: [groups, slots, max blocks]."""
    size, out = SLOTS.block_size, {field.name: [] for field in fields(DerivedStep)}
    out |= {name: [] for name in ("slot", "span_start", "logit_token")}
    place, first_of_tree, word, cache = [], [], [], [[] for _ in SLOTS.null_blocks]
    start = 0
    for row in rows:
        past, plain = length[row.slot], len(row.tokens) - row.num_drafts
        depth = depths(row.parents or range(-1, row.num_drafts - 1))
        positions = [past + i for i in range(plain)] + [past + plain + d - 1 for d in depth]
        ids = row.tokens
        out["tokens"] += ids
        out["position"] += positions
        out["slot"] += [row.slot] * len(ids)
        out["span_start"].append(start)
        for i in range(len(ids)):
            place.append(past + i)
            for group, slots in enumerate(cache):
                slots.append(int(tables[group, row.slot, (past + i) // size]) * size + (past + i) % size)
            is_tree = row.parents is not None and i >= plain
            first_of_tree.append(past + plain if is_tree else NO_TREE)
            word.append(sum(1 << node for node in path_to(row.parents, i - plain)) if is_tree else 0)
        out["logit_token"] += range(start + len(ids) - row.num_logits, start + len(ids))
        start += len(ids)
        out["token_end"].append(start)
    token_end = start
    missing = STEP.max_rows + 1 - len(rows)  # with the one that takes padding
    out["token_end"] += [token_end] * missing
    out["span_start"] += [token_end] * missing
    for name, fill in {"tokens": 0, "position": 0, "slot": -1}.items():
        out[name] += [fill] * (t - token_end)
    for null, slots in zip(SLOTS.null_blocks, cache, strict=True):
        slots += [null * size] * (t - token_end)
    out["cache_slots"] = cache
    out["place"] = place + [0] * (t - token_end)
    out["tree_first"] = first_of_tree + [NO_TREE] * (t - token_end)
    out["tree_word"] = [w - (w >> 63 << 64) for w in word] + [0] * (t - token_end)
    out["span_row"] = [row.slot for row in rows] + [SLOTS.padding_slot] * missing
    out["span_count"] = [len(row.tokens) for row in rows] + [0] * missing
    return out


@pytest.mark.parametrize("has_trees", [False, True])
def test_a_ragged_step_is_what_loops_make_of_it(has_trees: bool) -> None:
    rng = random.Random(int(has_trees))
    device = Device(replace(STEP, has_trees=has_trees))
    length = [0] * 6
    tables = np.full((2, 6, SLOTS.max_blocks), -1)
    for _ in range(40):
        rows = random_rows(rng, has_trees)
        for row in rows:
            # The host says anew how long some are; the others go on from where the device has them.
            if length[row.slot] > 40 or rng.random() < 0.3:
                length[row.slot] = rng.randrange(30)
                device.updates.set_lengths(np.array([row.slot]), np.array([length[row.slot]]))
            need = -(-(length[row.slot] + len(row.tokens)) // SLOTS.block_size)
            for group, table in enumerate(tables[:, row.slot]):
                known = int((table[:need] >= 0).sum())
                first = rng.randrange(known + 1)  # blocks that were known may change too
                table[first:need] = [rng.randrange(50) for _ in range(first, need)]
                device.updates.set_blocks(group, row.slot, first, table[first:need].tolist())
        device.lay_out(rows)
        device.staging.upload()
        total = sum(len(row.tokens) for row in rows)
        t = rng.randrange(total, 49)
        step, logit_tokens = device.run(t, sum(row.num_logits for row in rows))
        want = expected(rows, length, tables, t)
        assert logit_tokens.tolist() == want["logit_token"]
        for name in ("tokens", "position", "token_end"):
            assert getattr(step, name).tolist() == want[name], name
        assert [slots.tolist() for slots in step.cache_slots] == want["cache_slots"]
        for group, attention in enumerate(step.attention):
            assert attention.row.tolist() == want["slot"]
            for name in ("place", "position", "tree_first", "tree_word", "span_row", "span_start", "span_count"):
                assert getattr(attention, name).tolist() == want[name], name
            for row in rows:
                used = -(-(length[row.slot] + len(row.tokens)) // 4)
                assert attention.block_table[row.slot, :used].tolist() == tables[group, row.slot, :used].tolist()
        device.deriver.advance_all(device.staging.tensors)
        for row in rows:
            length[row.slot] += len(row.tokens)
        assert device.state.tensors["num_computed_tokens"].tolist() == [*length, 0]


def test_a_tree_may_be_64_tokens_deep() -> None:
    shape = replace(STEP, max_tokens=80, has_trees=True)
    device = Device(shape)
    device.updates.set_blocks(0, 2, 0, [*range(16)])
    device.lay_out([Row(3, [5, 6]), Row(2, [1] * 65, 64, 65, [*range(-1, 63)])])
    device.staging.upload()
    step, _ = device.run(80, 65)
    assert step.position.tolist() == [0, 1, *range(65), *[0] * 13]
    words = step.attention[0].tree_word.tolist()
    assert words[3:67] == [(1 << i + 1) - 1 for i in range(63)] + [-1]


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_step_waits_for_nothing_between_one_upload_and_one_download(where: str, has_trees: bool) -> None:
    device = Device(replace(STEP, has_trees=has_trees), where)
    device.lay_out([Row(0, [1, 2, 3], 2, 3, [-1, -1] if has_trees else None), Row(3, [4, 5])])
    with Operators() as operators:
        device.staging.upload()
        with DeviceOnly():
            torch.add(device.run(16, 3)[1], 0, out=device.record.tensors["token"][:3])
            device.deriver.advance_all(device.staging.tensors)
        if where == "cpu":  # nothing comes back from meta
            device.record.download()
            device.record.collect()
    assert operators.names.count("aten.copy_.default") == (2 if where == "cpu" else 1)


BREAKS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tensor": lambda x: torch.tensor([1, 2]).to(x.device),
    "to another device": lambda x: x.to("meta" if x.device.type == "cpu" else "cpu"),
    "list as an index": lambda x: x[[0, 1]],
    "mask as an index": lambda x: x[x > 0],
    "condition": lambda x: bool((x > 0).all()),
    "scalar": lambda x: torch.where(x > 0, x, -1),
}


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("name", BREAKS)
def test_what_waits_or_copies_in_a_step_is_seen(name: str, where: str) -> None:
    device = Device(STEP, where)

    class Broken(Deriver):
        def derive(self, given, num_tokens: int, **options: bool) -> DerivedStep:
            BREAKS[name](given["slot"])
            return super().derive(given, num_tokens, **options)

    device.deriver = Broken(STEP, device.state)
    device.lay_out([Row(0, [1])])
    device.staging.upload()
    with DeviceOnly(), pytest.raises(AssertionError, match="waits for the device or copies"):
        device.run()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(0, [1]), Row(0, [2])], "none of them twice"),
        ([Row(6, [1])], r"slots must be in \[0, 6\)"),
        ([Row(i, [1]) for i in range(6)], "5 rows"),
        ([Row(0, [1] * 49)], "48 tokens"),
        ([Row(0, [1], 0, 2)], "in row 0"),
        ([Row(1, [1]), Row(0, [1, 2], 1, 1)], "in row 1"),
        ([Row(1, [1]), Row(0, [])], "in row 1"),
        ([Row(0, [1, 2], 1, 2, [-1])], "has no trees"),
    ],
)
def test_rows_that_are_not_as_they_must_be_are_refused(rows: list[Row], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(STEP).lay_out(rows)


@pytest.mark.parametrize(("parents", "message"), [([-1], "2 drafts"), ([-1, 1], "come before")])
def test_parents_that_are_no_tree_are_refused(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Device(replace(STEP, has_trees=True)).lay_out([Row(0, [1, 2, 3], 2, 3, parents)])
