"""Attention over segments: the kernel against the reference, the reference against a plain softmax, and the bits."""

from __future__ import annotations

import math
import random
import sys
import types
from dataclasses import replace

import pytest
import torch

from specdec.executor.paged_cache import write_by_operators
from specdec.kernels.segmented import (
    AttentionLayer,
    AttentionShape,
    ReferenceAttention,
    attention_kernel,
    num_segments,
    segment_start,
)
from specdec.kernels.tiled import TiledAttention
from tests.specdec.kernels.interpreter import interpreted
from tests.specdec.kernels.steps import SHAPE, Case, make_case

CPU = torch.device("cpu")
PLAIN = AttentionLayer(0.25)
SINKS = torch.linspace(-1, 2, 4)
LAYERS = {
    "plain": PLAIN,
    "window": AttentionLayer(0.25, window=21),
    "softcap": AttentionLayer(0.25, softcap=1.5),
    "sinks": AttentionLayer(0.25, sinks=SINKS),
    "all": AttentionLayer(0.3, window=40, softcap=3.0, sinks=SINKS),
}
TREES = replace(SHAPE, has_trees=True)
# Rows of positions before the step, and tokens of the step.
RAGGED = [(0, 1), (15, 1), (16, 3), (124, 11), (150, 2)]
TREE = {3: [-1, 0, 0, 1, -1, 4, 4, 3, 2]}


def dense(case: Case, layer: AttentionLayer) -> torch.Tensor:
    """A softmax over all keys of each token alone, in float64."""
    step, shape = case.step, case.shape
    out = torch.zeros(len(case.queries), shape.num_heads, shape.value_dim, dtype=torch.float64)
    for t, row in enumerate(step.row.tolist()):
        if row < 0:
            continue
        end, first, word = int(step.place[t]) + 1, int(step.tree_first[t]), int(step.tree_word[t])
        read = [k for k in range(end) if k < first or word >> (k - first) & 1]
        if layer.window is not None:
            read = [k for k in read if k >= first or k > int(step.position[t]) - layer.window]
        places = torch.tensor(read)
        blocks = step.block_table[row][places // shape.block_size].long()
        keys, values = (p[blocks, places % shape.block_size].double() for p in (case.keys, case.values))
        keys, values = (x.repeat_interleave(shape.group, 1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", case.queries[t].double(), keys) * layer.scaling
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double()[:, None]), 1)
        out[t] = torch.einsum("hn,nhd->hd", scores.softmax(1)[:, : len(read)], values)
    return out


def reference(case: Case, layer: AttentionLayer, keys_per_tile: int = 16) -> torch.Tensor:
    kernel = ReferenceAttention(case.shape, CPU, keys_per_tile)
    kernel.prepare(case.step)
    return kernel.attend(case.queries, case.keys, case.values, layer)


def attended(case: Case, layer: AttentionLayer, **options: object) -> torch.Tensor:
    from specdec.kernels.triton.attention import TileConfig, TritonAttention

    config = TileConfig(16, 16, 4, 2)
    kernel = TritonAttention(case.shape, CPU, **{"config": config, "num_processors": 2} | options)
    kernel.prepare(case.step)
    return kernel.attend(case.queries, case.keys, case.values, layer)


def test_segments_follow_one_another() -> None:
    assert [segment_start(s) for s in (0, 1, 8, 9, 20, 21)] == [0, 256, 2048, 2560, 8192, 9216]
    for s in range(40):
        first, stop = segment_start(s, 16), segment_start(s + 1, 16)
        assert [num_segments(n, 16) for n in (first, first + 1, stop)] == [s, s + 1, s + 1]


@pytest.mark.parametrize("name", LAYERS)
def test_reference_is_a_softmax(name: str) -> None:
    case = make_case(TREES, RAGGED, TREE, padding=3)
    torch.testing.assert_close(reference(case, LAYERS[name]).double(), dense(case, LAYERS[name]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("split_below", [0, 1000])
@pytest.mark.parametrize("name", ["plain", "window", "all"])
@interpreted
def test_kernel_is_the_reference(name: str, split_below: int) -> None:
    case = make_case(TREES, RAGGED, TREE, padding=3)
    out = attended(case, LAYERS[name], split_below=split_below)
    torch.testing.assert_close(out, reference(case, LAYERS[name]), atol=2e-6, rtol=0)
    assert not out[-3:].any()


@pytest.mark.parametrize(
    ("shape", "tolerance"),
    [
        (replace(SHAPE, num_heads=6, head_dim=20, value_dim=12), 2e-6),
        (replace(SHAPE, num_heads=2, dtype=torch.float16), 2e-3),
        (replace(SHAPE, num_heads=10, head_dim=24, dtype=torch.bfloat16), 2e-2),
    ],
    ids=["group 3, padded", "group 1, float16", "group 5, bfloat16"],
)
@interpreted
def test_kernel_in_other_shapes(shape: AttentionShape, tolerance: float) -> None:
    case = make_case(shape, RAGGED)
    layer = replace(LAYERS["all"], sinks=torch.linspace(-1, 2, shape.num_heads))
    expected = dense(case, layer).to(shape.dtype)
    for split_below in (0, 1000):
        torch.testing.assert_close(attended(case, layer, split_below=split_below), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ["all"])
@interpreted
def test_a_token_has_the_same_bits_in_any_company(name: str) -> None:
    """Alone or beside others, split or whole, and whichever programs take what."""
    case = make_case(TREES, RAGGED, TREE, padding=3)
    out = attended(case, LAYERS[name], split_below=0)
    assert torch.equal(out, attended(case, LAYERS[name], split_below=1000))
    assert torch.equal(out, attended(case, LAYERS[name], split_below=1000, num_processors=5))
    for numbers in ([17, 4, 14, 9], [15]):
        alone = attended(case.rows(numbers), LAYERS[name], split_below=len(numbers) * 100)
        assert torch.equal(alone, out[numbers])


@pytest.mark.parametrize("name", ["plain", "window", "all"])
@interpreted
def test_a_token_has_the_same_bits_however_segments_are_shared_out(name: str) -> None:
    """A row of 17 segments beside short ones: items of one segment, of some, and of all."""
    from specdec.kernels.triton.attention import TileConfig, TritonAttention

    rows = [(399, 1), (20, 1), (34, 2)]
    case = make_case(SHAPE, rows)
    outs, lists = [], []
    for split_below in (0, 10, 16, 1000):
        kernel = TritonAttention(SHAPE, CPU, TileConfig(16, 16, 4, 2), 2, split_below=split_below)
        kernel.prepare(case.step)
        outs.append(kernel.attend(case.queries, case.keys, case.values, LAYERS[name]))
        work = kernel._lists[LAYERS[name].window]
        num_items = int(work.count)
        columns = (of[:num_items].tolist() for of in (work.item_tile, work.item_low, work.item_high))
        lists.append([*zip(*columns, strict=True)])
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0].double(), dense(case, LAYERS[name]), atol=2e-6, rtol=0)
    if name == "plain":
        segments = [num_segments(before + count, 16) for before, count in rows]
        assert segments == [17, 2, 3]
        assert lists[0] == [(0, 0, 17), (1, 0, 2), (2, 0, 3)]
        assert lists[1] == [(0, 0, 5), (0, 5, 10), (0, 10, 15), (0, 15, 17), (1, 0, 2), (2, 0, 3)]
        assert lists[2] == [*((0, low, min(low + 3, 17)) for low in range(0, 17, 3)), (1, 0, 2), (2, 0, 3)]
        assert len(lists[3]) == sum(segments)


@interpreted
def test_partial_results_of_every_step_have_room() -> None:
    """However tiles differ, and wherever the share lies; ``_most_parts`` is nearly reached."""
    from specdec.kernels.triton.attention import _most_parts

    rng, fullest = random.Random(1), 0.0
    for _ in range(3000):
        longest, heads, split_below = rng.randint(1, 140), rng.choice((1, 2, 8)), rng.choice((1, 7, 80, 264))
        num_tiles = rng.randint(1, 80)
        is_even = rng.random() < 0.5
        segments = [longest if is_even else rng.randint(1, longest) for _ in range(rng.randint(1, num_tiles))]
        share = max(1, -(-sum(segments) * heads // split_below))
        kept = sum(count - share + 1 for count in segments if count > share)
        room = _most_parts(longest, num_tiles, heads, split_below)
        assert kept <= room
        fullest = max(fullest, kept / max(1, room))
    assert fullest > 0.9


@interpreted
def test_what_no_token_may_read_may_be_anything() -> None:
    case = make_case(SHAPE, [(44, 2), (9, 1)])
    layer = LAYERS["window"]
    out = attended(case, layer)
    blocks = case.step.block_table[0, : 24 // 8].long()
    for pool in (case.keys, case.values):
        pool[blocks] = math.nan
        pool[0] = math.nan
        pool[case.step.block_table[1, 1].long(), 2:] = math.nan
    assert torch.equal(attended(case, layer), out)
    assert torch.equal(reference(case, layer), reference(case, layer).nan_to_num())


@pytest.mark.parametrize("name", LAYERS)
def test_tiles_are_a_softmax_of_what_may_be_read_and_a_token_has_the_same_bits_in_any_company(name: str) -> None:
    case = make_case(SHAPE, RAGGED, padding=3)
    expected = dense(case, LAYERS[name])
    is_read = torch.zeros(case.keys.shape[:2], dtype=torch.bool)
    for row, (before, count) in enumerate(RAGGED):
        first = max(0, before + 1 - (LAYERS[name].window or SHAPE.max_length))
        places = torch.arange(first, before + count)
        is_read[case.step.block_table[row][places // SHAPE.block_size].long(), places % SHAPE.block_size] = True
    for pool in (case.keys, case.values):
        pool[~is_read] = math.nan
    kernel = TiledAttention(case.shape, CPU)

    def tiled(part: Case) -> torch.Tensor:
        kernel.prepare(part.step)
        return kernel.attend(part.queries, part.keys, part.values, LAYERS[name])

    out = tiled(case)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    for numbers in ([17, 4, 14, 9], [15]):
        assert torch.equal(tiled(case.rows(numbers)), out[numbers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@interpreted
def test_a_cache_is_written_in_one_launch_as_operators_write_it(dtype: torch.dtype) -> None:
    """Padding goes into the null block, which is the last one; keys come head by head, values in any strides."""
    from specdec.kernels.triton.attention import write_cache

    keys = torch.randn(1, 3, 6, 20).to(dtype).transpose(1, 2).flatten(0, 1)
    values = torch.randn(12, 3, 6).to(dtype).permute(2, 1, 0)
    slots = torch.tensor([9, 24, 23, 0, 24, 10])
    written = []
    for write in (write_cache, write_by_operators):
        pools = [torch.zeros(4, 8, 3, dim, dtype=dtype) for dim in (20, 12)]
        write(keys, values, *pools, slots)
        written.append(pools)
    for by_kernel, by_operators in zip(*written, strict=True):
        assert torch.equal(by_kernel[:3], by_operators[:3])
        assert by_kernel[3, 0].any()
        assert not by_kernel[3, 1:].any()
    before = [pool.clone() for pool in pools]
    write_cache(keys, values, *pools, torch.full((6,), -1, dtype=torch.int32))
    assert all(map(torch.equal, pools, before))


def test_a_kernel_of_somebody_else_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros(ReferenceAttention):
        def attend(self, queries: torch.Tensor, *rest: object) -> torch.Tensor:
            return torch.zeros_like(queries)

    module = types.ModuleType("somebody")
    module.Zeros = Zeros  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebody", module)
    case = make_case(SHAPE, [(3, 1)])
    outs = []
    for name in ("somebody:Zeros", "reference"):
        kernel = attention_kernel(name)(case.shape, CPU)
        kernel.prepare(case.step)
        outs.append(kernel.attend(case.queries, case.keys, case.values, PLAIN))
    assert not outs[0].any()
    assert torch.equal(outs[1], reference(case, PLAIN, 64))
    for name in ("flash", "nowhere:Zeros", "somebody:Ones"):
        with pytest.raises(ValueError, match=name):
            attention_kernel(name)
