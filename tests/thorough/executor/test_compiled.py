"""Compiled layers give what layers give operator by operator; traced for real, but not made into machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner, RowInput
from specdec.models.loading import prepare_model
from specdec.models.parity_check import check_admission
from tests.specdec.models.families import make_model

LIMITS = ExecutorLimits(max_rows=4, max_tokens=128, max_length=200, max_draft_tokens=5)


def forward(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, num_tokens)
    logits = runner.forward([RowInput(sequence, list(range(1, num_tokens + 1)), num_tokens)])
    runner.free(sequence)
    return logits


def make(family: str) -> ModelRunner:
    return ModelRunner(prepare_model(make_model(family), "tiny"), num_blocks=100, block_size=4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_compilation_serves_all_layers_and_sizes(family: str) -> None:
    torch.compiler.reset()
    runner, plain = make(family), make(family)
    runner.record_graphs(LIMITS, backend="eager")
    assert (runner.graphs_failure, runner.compile_failure) == ("", "")
    num_compiled = counters["stats"]["unique_graphs"]
    assert num_compiled > 0
    for num_tokens in (1, 16, 17, 33, 64, 100):
        torch.testing.assert_close(forward(runner, num_tokens), forward(plain, num_tokens), atol=2e-5, rtol=2e-5)
    check_admission(runner)
    assert counters["stats"]["unique_graphs"] == num_compiled
    runner.forget_graphs()
    torch.testing.assert_close(forward(runner, 5), forward(plain, 5), atol=0, rtol=0)
    assert not runner.is_recorded


def test_layers_that_cannot_be_compiled_run_as_they_are() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    torch.compiler.reset()
    runner, plain = make("llama"), make("llama")
    runner.record_graphs(LIMITS, backend=broken)
    assert "no compiler here" in runner.compile_failure
    assert runner.is_recorded
    torch.testing.assert_close(forward(runner, 5), forward(plain, 5), atol=2e-5, rtol=2e-5)
