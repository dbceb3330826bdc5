"""The examples of ``docs/extending`` do what their pages say, as modules outside the tree."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cluster.config.app import AppArgs
from cluster.models.sources import ngram_options
from deployments.metrics import families
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.drafting.registry import TOKEN_DRAFTERS
from specdec.kernels.segmented import AttentionLayer, attention_kernel
from specdec.protocol.target import TargetMachine
from specdec.sampling.rows import RowGroup
from specdec.structured.parsing.calls import ContentDelta, ToolCallDelta
from tests.specdec.kernels.steps import SHAPE, make_case
from tests.specdec.protocol.test_target import TIMES, TRUE, Oracle, open_message, verdicts

PAGES = Path(__file__).resolve().parents[2] / "docs/extending"


def example(page: str) -> str:
    """The one example of a page."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return str(code)


def module_of(page: str) -> Any:
    module = ModuleType("example")
    exec(compile(example(page), page, "exec"), module.__dict__)
    return module


def test_a_kernel_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kernels.py").write_text(example("attention-kernel.md"))
    monkeypatch.syspath_prepend(tmp_path)
    case, outputs = make_case(SHAPE, [(3, 1), (20, 4)]), []
    for name in ("my_kernels:MyAttention", "reference"):
        kernel = attention_kernel(name)(SHAPE, torch.device("cpu"))
        kernel.prepare(case.step)
        outputs.append(kernel.attend(case.queries, case.keys, case.values, AttentionLayer(0.25)))
    assert outputs[0].any()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("method", ["my_drafter:drafter", "counting"])
def test_a_drafter_drafts_by_its_name(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by its import string, or by the name that one line of the registry gives it."""
    monkeypatch.setitem(TOKEN_DRAFTERS, "counting", "my_drafter:drafter")
    (tmp_path / "my_drafter.py").write_text(example("drafting-method.md"))
    monkeypatch.syspath_prepend(tmp_path)
    args = AppArgs.model_validate({"draft": {"method": method}, "num_speculative_tokens": 3})
    machine = TargetMachine("T", Oracle(), TIMES, ngram=ngram_options(args))
    machine.receive(open_message(max_tokens=5), 0.0)
    for _ in range(2):
        machine.step(0.0)
    assert verdicts(machine)[-1].tokens == TRUE[:5]
    assert machine.metrics()["num_accepted_tokens_by_source/counting"] > 0


def test_a_drafters_tokens_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_drafter.py").write_text(example("drafting-method.md"))
    monkeypatch.syspath_prepend(tmp_path)
    args = AppArgs.model_validate({"draft": {"method": "my_drafter:drafter"}, "num_speculative_tokens": 3})
    oracle = Oracle()
    machine = TargetMachine("T", oracle, TIMES, ngram=ngram_options(args))
    machine.receive(open_message(output=TRUE[:2]), 0.0)
    machine.step(0.0)
    assert oracle.batches == [[("s", TRUE[2:5])]]


def test_a_hook_forbids_the_token_that_came_last() -> None:
    hook = module_of("sampling-parameter.md").NoRepeat()
    spec = SequenceSpec(SamplingParams(), seed=0, output_start=1, max_tokens=9, eos_token_ids=(), arrival_s=0.0)
    groups = [RowGroup(spec, [1, 5], (2, 3)), RowGroup(spec, [4])]
    logits = torch.zeros(4, 6)
    assert hook(groups, logits) is None
    assert logits.isneginf().nonzero().tolist() == [[0, 5], [1, 2], [2, 3], [3, 4]]


def test_a_family_of_metrics_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "REPORTED", [*families.REPORTED])
    module_of("metric.md")
    assert families.REPORTED[-1].series == "specdec_fan_speed"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_tool_parser_reads_a_call_however_it_is_cut(size: int) -> None:
    parser = module_of("tool-parser.md").make(None, "", [])
    text = 'Let me see.\nCALL weather {"city": "Rome"}\nCALL time {}'
    ends = accumulate([size] * (len(text) // size + 1))
    events = [event for end in ends for event in parser.push(text[end - size : end])] + parser.finish()
    assert events == [
        ContentDelta("Let me see.\n"),
        ToolCallDelta(0, "weather", '{"city": "Rome"}'),
        ToolCallDelta(1, "time", "{}"),
    ]
