"""Kernels of recurrent layers against the scans in torch: rows that come, go on, are drafted on and are cut back."""

from __future__ import annotations

import inspect
import random
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from specdec.cache.recurrent.rescan import Rescan
from specdec.cache.recurrent.slots import SequenceState, Window
from specdec.executor.recurrence import state_row
from specdec.kernels.conv import Convolution, ConvShape, ConvWindows
from specdec.kernels.recurrent import RecurrentKernels, StateTensors, recurrent_kernels
from specdec.kernels.recurrent_metadata import StateRow, StateStep
from specdec.kernels.scan import DeltaRule, Mamba1, Mamba2, Scan, is_fast
from tests.specdec.kernels.interpreter import interpreted

WINDOW = Window(5)
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
generator = torch.Generator().manual_seed(0)


def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=generator).to(dtype)


def delta_rule(num_tokens: int, dtype: torch.dtype, by_channel: bool = False) -> Scan:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    heads = 4 if by_channel else 2
    query, key = (randn(1, num_tokens, heads, 10, dtype=dtype) for _ in range(2))
    # As layers have them: parts of a product, and not contiguous by token.
    value = randn(1, 4, num_tokens, 12, dtype=dtype).transpose(1, 2)
    decay = -randn(1, num_tokens, 4, *([10] if by_channel else [])).abs()
    beta = randn(1, num_tokens, 4, dtype=dtype).sigmoid()

    def grouped(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        repeated = (x.repeat_interleave(2, 2) for x in (query, key))  # transformers 5.17 leaves that to the layer
        return torch_chunk_gated_delta_rule(*repeated, value, **more)

    stock = chunk_kimi_delta_attention if by_channel else grouped
    return DeltaRule(stock, query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)


def kimi(num_tokens: int, dtype: torch.dtype) -> Scan:
    return delta_rule(num_tokens, dtype, by_channel=True)


def mamba2(num_tokens: int, dtype: torch.dtype) -> Scan:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    x, time = randn(1, num_tokens, 4, 6, dtype=dtype), randn(1, num_tokens, 4, dtype=dtype)
    b, c = (randn(1, num_tokens, 2, 10, dtype=dtype) for _ in range(2))
    rates, skip = -torch.arange(1, 5).float(), torch.linspace(0.5, 1, 4)
    return Mamba2(mamba2_chunk_scan, x, time, rates, b, c, 8, D=skip, dt_bias=skip, dt_softplus=True)


def mamba1(num_tokens: int, dtype: torch.dtype) -> Scan:
    x, time, gate = (randn(1, 20, num_tokens, dtype=dtype) for _ in range(3))
    b, c = (randn(1, 10, num_tokens, dtype=dtype) for _ in range(2))
    rates = -torch.arange(1, 11).float().expand(20, 10).contiguous()
    return Mamba1(lambda: None, x, time, rates, b, c, D=torch.linspace(0.5, 1, 20), z=gate, delta_softplus=True)


KINDS: dict[str, Callable[[int, torch.dtype], Scan]] = {
    "delta_rule": delta_rule,
    "kimi": kimi,
    "mamba2": mamba2,
    "mamba1": mamba1,
}


@dataclass
class Step:
    """Rows on the host and the device, with padding behind their tokens."""

    rows: list[StateRow]
    num_padding: int

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new_tokens for row in self.rows)

    def on_host(self) -> StateStep:
        return StateStep(self.rows, self.num_tokens, WINDOW)

    def on_device(self) -> StateTensors:
        def int32(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        # One row that is not there, and tokens of none.
        rows = [*self.rows, StateRow(0, 0, 0, 0, 0, 0, 0)]
        tokens = [(row, i) for row in self.rows for i in range(row.num_new_tokens)]
        padding = [0] * self.num_padding
        return StateTensors(
            slot=int32([row.slot for row in rows]),
            start=int32([row.start for row in rows]),
            count=int32([row.num_new_tokens for row in rows]),
            length=int32([row.num_computed_tokens for row in rows]),
            oldest=int32([row.oldest for row in rows]),
            newest=int32([row.newest for row in rows]),
            oldest_after=int32([row.oldest_after for row in rows]),
            token_slot=int32([row.slot for row, _ in tokens] + [-1] * self.num_padding),
            token_index=int32([i for _, i in tokens] + padding),
            token_position=int32([row.num_computed_tokens + i for row, i in tokens] + padding),
            token_left=int32([row.num_new_tokens - i for row, i in tokens] + padding),
        )


class Sequences:
    """Slots whose sequences grow and are cut back as they may be."""

    def __init__(self, num_slots: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.states = [SequenceState(slot) for slot in range(num_slots)]
        self.lengths = [0] * num_slots

    def step(self, counts: Sequence[int]) -> Step:
        """So many tokens in each slot; none in those with 0."""
        rows, start = [], 0
        for slot in self.random.sample(range(len(counts)), len(counts)):
            if counts[slot]:
                state, length = self.states[slot], self.lengths[slot]
                has_kernels = self.random.random() < 0.5  # both are right, and only what is scanned again differs
                rows.append(state_row(start, counts[slot], length, state, WINDOW, has_kernels))
                start += counts[slot]
                state.oldest, state.newest = rows[-1].oldest_after, length + counts[slot]
                self.lengths[slot] = state.newest
        return Step(rows, self.random.choice((0, 3)))

    def cut_back(self) -> None:
        """Half of them."""
        for slot, state in self.random.sample([*enumerate(self.states)], len(self.states) // 2):
            self.lengths[slot] = self.random.randint(max(state.oldest, state.newest - WINDOW.num_tokens), state.newest)

    def steps(self, number: int) -> list[Step]:
        found = [self.step([9, 1, 4])]
        for _ in range(number):
            self.cut_back()
            found.append(self.step(self.random.choices((0, 1, 2, 4, 5, 5, 13), k=len(self.states))))
        return [step for step in found if step.rows]


def kernels() -> RecurrentKernels:
    found = recurrent_kernels("triton")
    assert found is not None
    return found


def padded(scan: Scan, number: int) -> Scan:
    """With tokens behind its own that are not to be read."""
    for name in ("inputs", "reads"):
        values = getattr(scan, name)
        behind = [value.new_full((1, number, *value.shape[2:]), float("nan")) for value in values]
        setattr(scan, name, tuple(torch.cat(pair, dim=1) for pair in zip(values, behind, strict=True)))
    return scan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_scans_give_what_torch_gives(kind: str, dtype: torch.dtype) -> None:
    make = KINDS[kind]
    shapes = [(value.shape[2:], value.dtype) for value in make(1, dtype).inputs]
    wanted, found = (Rescan(make(1, dtype).state_shape, shapes, 3, WINDOW.num_tokens, CPU) for _ in range(2))
    for pool in (found.kept.first, found.kept.last, *found.kept.inputs):
        pool.fill_(float("nan"))  # what no sequence has written is not read
    num_again = num_moved = 0
    for step in Sequences(3, seed=7).steps(7):
        num_again += sum(row.is_cut_back for row in step.rows)
        num_moved += sum(row.oldest < row.oldest_after < row.num_computed_tokens for row in step.rows)
        scan = make(step.num_tokens, dtype)
        outputs = wanted.run(scan, step.on_host())
        given = kernels().scan(padded(scan, step.num_padding), found.kept, step.on_device())
        assert not given[:, step.num_tokens :].any()
        difference = (given[:, : step.num_tokens] - outputs).abs().max().item()
        assert difference <= TOLERANCE[dtype] * max(1, outputs.abs().max().item()), (kind, dtype, difference)
    assert min(num_again, num_moved) > 1
    for name in ("first", "last"):
        states = getattr(found.kept, name), getattr(wanted.kept, name)
        torch.testing.assert_close(*states, rtol=1e-4, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_states_are_the_same_bits_however_tokens_came(kind: str) -> None:
    """A sequence of 16 tokens read one by one, and drafted five at a time of which some are taken back."""
    scan = KINDS[kind](24, torch.float32)
    shapes = [(value.shape[2:], value.dtype) for value in scan.inputs]
    plain, drafted = (Rescan(scan.state_shape, shapes, 1, WINDOW.num_tokens, CPU) for _ in range(2))

    def part(first: int, last: int) -> Scan:
        some = KINDS[kind](1, torch.float32)
        some.inputs, some.reads = (tuple(v[:, first:last] for v in values) for values in (scan.inputs, scan.reads))
        return some

    sequences, one_by_one = Sequences(1, seed=0), []
    for i in range(16):
        one_by_one.append(kernels().scan(part(i, i + 1), plain.kept, sequences.step([1]).on_device()))
    sequences, length = Sequences(1, seed=0), 0
    while length < 16:
        outputs = kernels().scan(part(length, length + 5), drafted.kept, sequences.step([5]).on_device())
        kept = min(16 - length, sequences.random.randint(1, 5))
        assert torch.equal(outputs[:, :kept], torch.cat(one_by_one[length : length + kept], dim=1))
        length += kept
        sequences.lengths[0] = length


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", True), (None, False)])
@interpreted
def test_convolutions_give_what_torch_gives(activation: str | None, has_bias: bool, dtype: torch.dtype) -> None:
    channels, taps = 20, 4

    def stock(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        outputs = functional.conv1d(inputs, weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)
        outputs = outputs[:, :, : inputs.shape[2]]
        return functional.silu(outputs) if activation else outputs

    shape = ConvShape(channels, taps, dtype, CPU)
    wanted, found = (ConvWindows(shape, 3, WINDOW.num_kept_tokens) for _ in range(2))
    found.ring.fill_(float("nan"))
    weight, bias = randn(channels, taps, dtype=dtype), randn(channels, dtype=dtype) if has_bias else None
    for step in Sequences(3, seed=2).steps(6):
        new = randn(step.num_tokens, channels, dtype=dtype).t().unsqueeze(0)
        on_host = step.on_host()
        laid_out = Convolution(stock, wanted.extend(new, on_host), weight, bias, activation, {})
        outputs = wanted.outputs(laid_out.run(), on_host)
        new = torch.cat([new, torch.full((1, channels, step.num_padding), float("nan"), dtype=dtype)], dim=2)
        given = kernels().convolve(new, found.ring, weight, bias, activation, step.on_device())
        assert not given[:, :, step.num_tokens :].any()
        torch.testing.assert_close(
            given[:, :, : step.num_tokens], outputs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


def test_a_packages_kernel_is_told_from_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = types.ModuleType("packaged")
    package.scan = lambda query: query
    monkeypatch.setitem(sys.modules, "packaged", package)

    def own(query: Tensor) -> Tensor:
        return query

    decorated = [use_kernel_func_from_hub_with_fallback("scan", name)(own) for name in ("packaged", "not_there")]
    assert list(map(is_fast, (*decorated, own, torch_chunk_gated_delta_rule))) == [True, False, False, False]
    assert "is_new_implementation" in inspect.getclosurevars(torch_chunk_gated_delta_rule).nonlocals
