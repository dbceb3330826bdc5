"""Compiled layers give what layers give operator by operator; traced for real, but not made into machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch.nn import functional

from specdec.executor.compiled import _with_dependent_launches
from specdec.executor.graphs import ExecutorLimits
from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
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
    model, generator = make_model(family), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=generator)
    return ModelRunner(prepare_model(model, "tiny"), num_blocks=100, block_size=4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_one_compilation_serves_all_layers_and_sizes(family: str) -> None:
    widths: list[int] = []

    def backend(graph: fx.GraphModule, _: object) -> Any:
        for node in graph.graph.find_nodes(op="call_function", target=functional.linear):
            widths.append(node.meta["example_value"].shape[-1])
        return graph.forward

    torch.compiler.reset()
    runner, plain = make(family), make(family)
    runner.record_graphs(LIMITS, backend=backend)
    assert (runner.graphs_failure, runner.compile_failure) == ("", "")
    num_compiled = counters["stats"]["unique_graphs"]
    assert num_compiled > 0
    # Queries, keys and values; the output; gate and up; down.
    assert widths == [64 + 32 + 32, 64, 96 + 96, 64]
    for num_tokens in (1, 16, 17, 33, 64, 100):
        torch.testing.assert_close(forward(runner, num_tokens), forward(plain, num_tokens), atol=2e-5, rtol=2e-5)
    check_admission(runner)
    make(family).record_graphs(LIMITS, backend=backend)
    assert counters["stats"]["unique_graphs"] == num_compiled
    runner.forget_graphs()
    torch.testing.assert_close(forward(runner, 5), forward(plain, 5), atol=0, rtol=0)
    assert not runner.is_recorded


def test_a_compiler_that_fails_is_a_failure_and_layers_are_as_they_were() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    torch.compiler.reset()
    runner, plain = make("llama"), make("llama")
    runner.record_graphs(LIMITS, backend=broken)
    assert "its layers cannot be compiled: " in runner.graphs_failure
    assert "no compiler here" in runner.graphs_failure
    assert runner.is_recordable
    assert not runner.is_recorded
    torch.testing.assert_close(forward(runner, 5), forward(plain, 5), atol=2e-5, rtol=2e-5)


def test_dependent_launches_are_of_the_layers_that_are_compiled_alone() -> None:
    from torch._inductor import config

    seen: list[bool] = []

    def compiler(graph: str, *, name: str) -> str:
        seen.append(config.triton.enable_pdl)
        return graph + name

    assert _with_dependent_launches(compiler)("a", name="b") == "ab"
    assert seen == [True]
    assert not config.triton.enable_pdl
