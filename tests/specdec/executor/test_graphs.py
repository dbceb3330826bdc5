"""Padded steps of fixed sizes, as graphs hold them, give what steps of their own sizes give."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdec.cache.blocks import CachedSequence
from specdec.executor.graphs import ExecutorLimits, PassOutput, StepGraphs, _no_garbage_collection
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.hidden import AFTER_NORM, HiddenStates
from specdec.models.loading import prepare_model
from specdec.models.parity_check import check_admission
from tests.specdec.executor.test_steps import CPU, on
from tests.specdec.models.families import VOCAB_SIZE, make_model
from tests.specdec.models.recurrent_families import RECURRENT, make_recurrent

LIMITS = ExecutorLimits(max_rows=4, max_tokens=40, max_length=80, max_draft_tokens=5, has_trees=True)


def runners(family: str, limits: ExecutorLimits = LIMITS) -> tuple[ModelRunner, ModelRunner]:
    """One of padded steps, and one of steps of their own sizes."""
    padded, plain = (ModelRunner(on(CPU, family), num_blocks=120, block_size=4) for _ in range(2))
    padded.record_graphs(limits)
    assert not padded.graphs_failure
    return padded, plain


def row(runner: ModelRunner, sequence: CachedSequence, tokens: list[int], num_logits: int, **more: object) -> RowInput:
    assert runner.reserve(sequence, len(sequence) + len(tokens))
    return RowInput(sequence, tokens, num_logits, **more)  # type: ignore[arg-type]


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's logits lie where those of the step before lay, as a GPU's graphs have them."""
    memory: dict[int, torch.Tensor] = {}

    def launch(self: StepGraphs, size: int) -> PassOutput:
        output = self._run(size)
        kept = memory.setdefault(id(self), output.logits.new_empty(self._keys[-1], output.logits.shape[1]))[:size]
        return replace(output, logits=kept.copy_(output.logits))

    monkeypatch.setattr(StepGraphs, "launch", launch)


@pytest.mark.usefixtures("overwritten")
def test_the_check_of_a_model_keeps_no_logits_that_the_next_step_overwrites() -> None:
    padded, _ = runners("llama", replace(LIMITS, max_tokens=64))
    check_admission(padded)


def test_a_capture_that_fails_says_why_and_leaves_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capture(nullcontext[None]):
        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def waits(size: int) -> PassOutput:
        raise RuntimeError("operation not permitted when stream is capturing")

    current = [SimpleNamespace(wait_stream=lambda _: None)]
    fakes = {
        "mem_get_info": lambda _: (1, 1),
        "device": lambda _: nullcontext(),
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "stream": lambda _: suppress(RuntimeError),  # what fails in the capture has run before it
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": object,
        "graph": lambda *_, **__: Capture(),
        "current_stream": lambda: current[0],
        "set_stream": current.append,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    ended: list[tuple[str, int, tuple[int, int]]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *arguments, name=name: ended.append((name, *arguments)))
    failure = StepGraphs(waits, torch.device("cuda")).record((16,))
    assert failure == "its step cannot be recorded: RuntimeError: operation not permitted when stream is capturing"
    assert current == [current[0]] * 2
    assert ended == [("_cuda_endAllocateToPool", 0, (0, 1)), ("_cuda_releasePool", 0, (0, 1))]


@pytest.mark.parametrize(("keys", "expected"), [((16,), 300), ((16, 32, 64), 300 + 2 * 20)])
def test_a_trial_records_two_sizes_and_tells_what_all_would_take(
    keys: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest takes the memory that all share."""
    free, recorded = [1000], list[int]()

    class Graph:
        def replay(self) -> None:
            free[0] -= 300 if len(recorded) == 1 else 20

    def record(self: StepGraphs, keys: Sequence[int], *_: object) -> None:
        recorded.extend(keys)
        self._graphs |= dict.fromkeys(keys, (Graph(), None))  # type: ignore[arg-type]

    fakes = {
        "mem_get_info": lambda _: (free[0], 1000),
        "device": lambda _: nullcontext(),
        "Stream": object,
        "graph_pool_handle": lambda: (0, 1),
        "empty_cache": lambda: None,
        "synchronize": lambda _: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(StepGraphs, "_record", record)
    graphs = StepGraphs(lambda size: pytest.fail("nothing is run"), torch.device("cuda"))
    assert not graphs.record(keys, is_trial=True)
    assert recorded == [*reversed(keys[-2:])]
    assert graphs.num_bytes == expected
    assert not graphs._graphs
    assert graphs.size_for(16, 16) is None


def test_no_garbage_is_collected_in_a_capture() -> None:
    with _no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_chains_are_recorded_by_powers_of_two() -> None:
    limits = ExecutorLimits(64, 2048, 80, 1, num_chained_passes=16)
    assert (limits.chain_lengths, limits.chain_sizes) == ((1, 2, 4, 8), (16, 32, 64, 128))
    assert replace(limits, num_chained_passes=3).chain_lengths == (1, 2)
    assert replace(limits, max_rows=20).chain_sizes == (16, 32, 48)
    assert limits.graph_sizes == (16, 32, 48, 64, 96, 128)


def test_sizes_reach_to_all_rows_with_full_drafts() -> None:
    def sizes(*numbers: int) -> tuple[int, ...]:
        max_rows, max_tokens, max_draft_tokens = numbers
        return ExecutorLimits(max_rows, max_tokens, 80, max_draft_tokens).graph_sizes

    assert sizes(1, 100, 0) == (16,)
    assert sizes(4, 100, 5) == (16, 32)
    up_to_512 = (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
    assert sizes(64, 2048, 7) == up_to_512
    assert sizes(100, 2048, 7) == (*up_to_512, 640, 768, 896)
    assert sizes(100, 50, 7) == (16, 32, 48, 64)


def test_padding_is_at_most_12_percent_over_all_rows_and_draft_lengths() -> None:
    sizes = ExecutorLimits(64, 2048, 80, 8).graph_sizes
    steps = [rows * (1 + length) for rows in range(1, 65) for length in range(9)]
    padded = [min(size for size in sizes if size >= step) for step in steps]
    assert sum(padded) - sum(steps) <= 0.12 * sum(steps)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral", "gpt_oss", "mixtral"])
def test_padded_steps_give_the_same_logits(family: str) -> None:
    """Over rows that come, are cut back, read a part of a prompt, and go; more sequences than there are slots."""
    rng = random.Random(5)
    pair = runners(family)
    kept: list[list[CachedSequence]] = []
    num_padded = 0
    for _ in range(60):
        if len(kept) < 11 and (not kept or rng.random() < 0.5):
            kept.append([runner.new_sequence() for runner in pair])
        chosen = rng.sample(kept, rng.randint(1, min(4, len(kept))))
        counts = [rng.choice((1, 1, 2, 6, 12)) for _ in chosen]
        logits = [rng.choice((count, count, 1, 0)) for count in counts]
        logits[0] = logits[0] or 1
        tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(count)] for count in counts]
        num_padded += sum(counts) <= 32
        got, want = (
            runner.forward([row(runner, one[i], *rest) for one, *rest in zip(chosen, tokens, logits, strict=True)])
            for i, runner in enumerate(pair)
        )
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        for one in chosen:
            length = rng.randint(max(0, len(one[0]) - 5), len(one[0])) if len(one[0]) < 50 else 0
            for sequence, runner in zip(one, pair, strict=True):
                runner.truncate(sequence, length)
    assert num_padded > 30


def test_trees_are_padded_too() -> None:
    pair, parents = runners("llama"), (-1, -1, 0, 1)
    outputs = []
    for runner in pair:
        sequence = runner.new_sequence()
        runner.forward([row(runner, sequence, [3, 4, 5], 1)])
        outputs.append(runner.forward([row(runner, sequence, [6, 7, 8, 9, 10], 5, parents=parents)]))
        runner.keep_paths([(sequence, 4, [1, 3])])
        outputs.append(runner.forward([row(runner, sequence, [11], 1)]))
    for got, want in zip(outputs[:2], outputs[2:], strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_row_that_is_not_finite_is_told_alone() -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    runner = ModelRunner(prepare_model(model, "tiny"), num_blocks=40)
    runner.record_graphs(LIMITS)
    rows = [row(runner, runner.new_sequence(), tokens, n) for tokens, n in (([1, 2], 1), ([7, 3], 0), ([4], 1))]
    logits = runner.forward(rows)
    assert runner.spoilt_rows() == (1,)
    assert logits.isfinite().all()


@torch.inference_mode()
def test_hidden_states_are_noted_of_all_tokens() -> None:
    loaded = on(CPU, "llama")
    count = loaded.config.num_hidden_layers
    loaded = replace(loaded, hidden=HiddenStates(loaded.model, (0, 1, count - 1, AFTER_NORM)))
    padded, plain = (ModelRunner(loaded, num_blocks=120, block_size=4) for _ in range(2))
    padded.record_graphs(LIMITS)
    tokens = [1, 2, 3, 4, 5]
    stock = make_model("llama")
    found = stock(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    wanted = [found[0], found[1], found[count - 1], found[-1]]  # the last is that after the norm
    for runner in (padded, plain):
        for num_logits in (5, 1):
            runner.forward([row(runner, runner.new_sequence(), tokens, num_logits)])
            for got, want in zip(runner.hidden, wanted, strict=True):
                torch.testing.assert_close(got, want[0], atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=f"must be of layers in .0, {count}., got 99"):
        HiddenStates(loaded.model, (99,))


def test_a_step_beyond_the_limits_is_refused() -> None:
    runner = runners("llama", replace(LIMITS, max_tokens=16, has_trees=False))[0]
    sequence = runner.new_sequence()
    with pytest.raises(ValueError, match=r"a step must be within .*max_tokens=16"):
        runner.forward([row(runner, sequence, [1] * 17, 1)])
    assert not runner.takes_trees
    assert runner.forward([row(runner, sequence, [1] * 16, 1)]).shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize(("family", "reason"), [("qwen3_5", "recurrent"), ("deepseek_v3", "expands")])
def test_what_cannot_be_recorded_runs_operator_by_operator(family: str, reason: str) -> None:
    make = make_recurrent if family in RECURRENT else make_model
    runner = ModelRunner(prepare_model(make(family), "tiny"), num_blocks=40, block_size=4)
    runner.record_graphs(LIMITS)
    assert reason in runner.graphs_failure
    assert runner.forward([row(runner, runner.new_sequence(), [1, 2], 2)]).shape == (2, VOCAB_SIZE)
