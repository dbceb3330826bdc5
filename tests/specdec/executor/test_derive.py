from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.core.drafts import depths, path_to
from specdec.executor.derive import LAST_TOKEN, DerivedLogits, DerivedStep, Deriver, StepShape, lay_out
from specdec.executor.slots import SlotShape, SlotState, SlotUpdates
from specdec.executor.staging import Field, Layout, Record, Staging
from specdec.kernels.segmented import NO_TREE
from tests.specdec.operators import DeviceOnly, Operators

SLOTS = SlotShape(num_slots=6, block_size=4, max_blocks=16, null_blocks=(100, 50))
STEP = StepShape(max_rows=5, max_tokens=48, max_logits=48, max_updates=128, has_last_tokens=True)
RESULT = Layout((Field("num_accepted", (6,)), Field("last_token", (6,))))


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

    def run(self, num_tokens: int = 48, num_logits: int = 48) -> tuple[DerivedStep, DerivedLogits]:
        self.deriver.apply_updates(self.staging.tensors)
        step = self.deriver.derive(self.staging.tensors, num_tokens)
        return step, self.deriver.derive_logits(self.staging.tensors, step, num_logits)


def random_rows(rng: random.Random, trees: bool) -> list[Row]:
    rows = []
    for slot in rng.sample(range(SLOTS.num_slots), rng.randrange(1, STEP.max_rows + 1)):
        tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        kind = rng.randrange(4)
        if kind == 0:  # a part of a prompt, perhaps with logits of all its tokens
            rows.append(Row(slot, tokens, num_logits=rng.choice([0, len(tokens)])))
            continue
        tokens[0] = rng.choice([tokens[0], LAST_TOKEN])
        num_drafts = rng.randrange(len(tokens))
        parents = [rng.randrange(-1, i) for i in range(num_drafts)] if trees and kind == 1 else None
        rows.append(Row(slot, tokens, num_drafts, num_drafts + 1, parents))
    return rows


def expected(rows: list[Row], length: list[int], last: list[int], tables: np.ndarray, t: int, n: int) -> dict:
    """The same by loops. ``tables``: [groups, slots, max blocks]."""
    size, out = SLOTS.block_size, {field.name: [] for kind in (DerivedStep, DerivedLogits) for field in fields(kind)}
    out |= {name: [] for name in ("slot", "span_start")}
    place, first_of_tree, word, cache = [], [], [], [[] for _ in SLOTS.null_blocks]
    start = 0
    for r, row in enumerate(rows):
        past, plain = length[row.slot], len(row.tokens) - row.num_drafts
        depth = depths(row.parents or range(-1, row.num_drafts - 1))
        positions = [past + i for i in range(plain)] + [past + plain + d - 1 for d in depth]
        ids = [last[row.slot] if token == LAST_TOKEN else token for token in row.tokens]
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
        sampled = row.num_drafts + 1 if row.num_logits else 0
        before = row.num_logits - sampled
        first = len(out["sequence"]) + before
        out["first"].append(first)
        out["count"].append(sampled)
        for i in range(row.num_logits):
            at, order = len(ids) - row.num_logits + i, i - before
            out["token"].append(start + at)
            out["sequence"].append(r if order >= 0 else -1)
            out["chosen_position"].append(positions[at] + 1)
            out["draft"].append(ids[at] if order > 0 else -1)
            parents = row.parents or range(-1, row.num_drafts - 1)
            out["parent"].append(first + 1 + parents[order - 1] if order > 0 else -1)
        start += len(ids)
        out["token_end"].append(start)
    token_end = start
    missing = STEP.max_rows + 1 - len(rows)  # with the one that takes padding
    total = len(out["sequence"])
    out["token_end"] += [token_end] * missing
    out["span_start"] += [token_end] * missing
    out["first"] += [total] * missing
    out["count"] += [0] * missing
    for name, fill in {"tokens": 0, "position": 0, "slot": -1}.items():
        out[name] += [fill] * (t - token_end)
    for name, fill in {"token": 0, "sequence": -1, "chosen_position": 0, "draft": -1, "parent": -1}.items():
        out[name] += [fill] * (n - total)
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
    length, last = [0] * 6, [0] * 6
    tables = np.full((2, 6, SLOTS.max_blocks), -1)
    for _ in range(40):
        rows = random_rows(rng, has_trees)
        for row in rows:
            # The host says anew how long some are; the others go on from where the device has them.
            if length[row.slot] > 40 or rng.random() < 0.3:
                length[row.slot], last[row.slot] = rng.randrange(40), rng.randrange(1000)
                device.updates.set("num_computed_tokens", row.slot, length[row.slot])
                device.updates.set("last_token", row.slot, last[row.slot])
            need = -(-(length[row.slot] + len(row.tokens)) // SLOTS.block_size)
            for group, table in enumerate(tables[:, row.slot]):
                known = int((table[:need] >= 0).sum())
                first = rng.randrange(known + 1)  # blocks that were known may change too
                table[first:need] = [rng.randrange(50) for _ in range(first, need)]
                device.updates.set_blocks(group, row.slot, first, table[first:need].tolist())
        device.lay_out(rows)
        device.staging.upload()
        total = sum(len(row.tokens) for row in rows)
        t, n = rng.randrange(total, 49), rng.randrange(max(1, sum(row.num_logits for row in rows)), 49)
        step, logits = device.run(t, n)
        want = expected(rows, length, last, tables, t, n)
        for name in ("tokens", "position", "token_end"):
            assert getattr(step, name).tolist() == want[name], name
        assert [slots.tolist() for slots in step.cache_slots] == want["cache_slots"]
        for name in ("token", "sequence", "chosen_position", "draft", "parent", "first", "count"):
            assert getattr(logits, name).tolist() == want[name], name
        for group, attention in enumerate(step.attention):
            assert attention.row.tolist() == want["slot"]
            for name in ("place", "position", "tree_first", "tree_word", "span_row", "span_start", "span_count"):
                assert getattr(attention, name).tolist() == want[name], name
            for row in rows:
                used = -(-(length[row.slot] + len(row.tokens)) // 4)
                assert attention.block_table[row.slot, :used].tolist() == tables[group, row.slot, :used].tolist()
        assert logits.by_row["slot"].tolist()[: len(rows)] == [row.slot for row in rows]
        accepted = [rng.randrange(row.num_drafts + 1) for row in rows] + [0] * (6 - len(rows))
        chosen = [rng.randrange(1000) for _ in range(6)]
        device.deriver.advance(device.staging.tensors, int32(accepted), int32(chosen))
        for row, more, token in zip(rows, accepted, chosen, strict=False):
            length[row.slot] += len(row.tokens) - row.num_drafts + more
            last[row.slot] = token if row.num_logits else last[row.slot]
        assert device.state.tensors["num_computed_tokens"].tolist() == [*length, 0]
        assert device.state.tensors["last_token"].tolist() == [*last, 0]


def test_a_tree_may_be_64_tokens_deep() -> None:
    shape = replace(STEP, max_tokens=80, max_logits=80, has_trees=True)
    device = Device(shape)
    device.updates.set_blocks(0, 2, 0, [*range(16)])
    device.lay_out([Row(3, [5, 6]), Row(2, [1] * 65, 64, 65, [*range(-1, 63)])])
    device.staging.upload()
    step, _ = device.run(80, 80)
    assert step.position.tolist() == [0, 1, *range(65), *[0] * 13]
    words = step.attention[0].tree_word.tolist()
    assert words[3:67] == [(1 << i + 1) - 1 for i in range(63)] + [-1]


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_row_takes_its_slot_s_parameters() -> None:
    device = Device(STEP)
    device.updates.set("temperature", [4, 1], [0.25, 0.5])
    device.updates.set("seed", 4, -3)
    device.updates.set("penalties", 1, [1.5, 0.5, 0.25])
    device.lay_out([Row(4, [1], 0, 1), Row(1, [2], 0, 1)])
    device.staging.upload()
    by_row = device.run()[1].by_row
    assert by_row["temperature"].tolist() == [0.25, 0.5, 0, 0, 0, 0]
    assert by_row["seed"].tolist() == [-3, 0, 0, 0, 0, 0]
    assert by_row["penalties"].tolist() == [[1, 0, 0], [1.5, 0.5, 0.25], *[[1, 0, 0]] * 4]


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_step_waits_for_nothing_between_one_upload_and_one_download(where: str, has_trees: bool) -> None:
    device = Device(replace(STEP, has_trees=has_trees), where)
    device.lay_out([Row(0, [1, 2, 3], 2, 3, [-1, -1] if has_trees else None), Row(3, [4, 5])])
    result = device.record.tensors
    with Operators() as operators:
        device.staging.upload()
        with DeviceOnly():
            device.run(16, 16)
            device.deriver.advance(device.staging.tensors, result["num_accepted"], result["last_token"])
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
