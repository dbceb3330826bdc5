"""How much of a device a model's cache takes."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import specdec.demo
import specdec.engine.build as build_module
import specdec.engine.engine as engine_module
from specdec.core.errors import MemoryPlanError
from specdec.engine.build import (
    BackendOptions,
    _cache_room,
    _notes,
    build_drafter,
    build_target,
    gpu_budget_bytes,
    pair_gpu_shares,
)
from specdec.engine.engine import SpeculativeEngine
from specdec.engine.shares import on_one_gpu
from specdec.engine.warmup import StepLimits, _measured, peak_resident_bytes, resident_bytes
from specdec.executor.runner import ModelRunner
from specdec.models.loading import ModelSource, prepare_model
from specdec.models.memory import StepMemory
from specdec.models.parity_check import AdmissionReport, check_admission
from specdec.sampling.pipeline import NOISE_CACHE_BYTES
from tests.specdec.models.families import make_model

DEMO = Path(specdec.demo.__path__[0])

GIB = 1 << 30


@pytest.mark.parametrize(
    ("family", "said"),
    [("llama", ()), ("deepseek_v3", ("tiny is slow: in every step each layer expands all that it caches",))],
)
def test_what_is_slow_whichever_way_its_steps_run_is_said(family: str, said: tuple[str, ...]) -> None:
    loaded = prepare_model(make_model(family), "tiny")
    assert _notes(ModelRunner(loaded, num_blocks=8), BackendOptions()) == said
    loaded.model.get_output_embeddings().to("meta")
    (*_, of_devices) = _notes(ModelRunner(loaded, num_blocks=8), BackendOptions())
    assert of_devices == "tiny is slow: its devices compute one after another, at the speed of one"


@pytest.mark.parametrize("target_first", [True, False])
def test_two_models_on_one_gpu_leave_each_other_room(target_first: bool) -> None:
    """Whoever loads first: both get a cache, and all of it fits."""
    weights = [16 * GIB, 2 * GIB] if target_first else [2 * GIB, 16 * GIB]
    free, budgets = 80 * GIB, []
    for weight in weights:
        free -= weight
        budgets.append(gpu_budget_bytes(40 * GIB, free, weight))
        free -= budgets[-1]
    assert free > 0
    assert min(budgets) > 15 * GIB


def test_one_model_takes_most_of_its_gpu_and_no_more_than_is_free() -> None:
    assert gpu_budget_bytes(80 * GIB, 64 * GIB, 16 * GIB) == pytest.approx(56 * GIB, abs=1)
    assert gpu_budget_bytes(80 * GIB, 64 * GIB, 18 * GIB, 2 * GIB) == pytest.approx(54 * GIB, abs=1)
    assert gpu_budget_bytes(80 * GIB, 64 * GIB, 16 * GIB, utilization=0.5) == pytest.approx(24 * GIB, abs=1)
    assert gpu_budget_bytes(80 * GIB, 10 * GIB, 18 * GIB, 2 * GIB) == pytest.approx(7 * GIB, abs=1)
    assert gpu_budget_bytes(40 * GIB, 60 * GIB, 50 * GIB) == 0


@pytest.mark.parametrize(
    ("target", "draft", "do_meet"),
    [
        ({}, {}, True),
        ({"device": "cuda"}, {"device": "cuda:0"}, True),
        ({"device": "cuda:1"}, {"device": "cuda:1"}, True),
        ({"device": "cuda:0"}, {"device": "cuda:1"}, False),
        ({}, {"device": "cpu"}, False),
        ({}, {"engine": "openvino"}, False),
        ({"device_map": "auto"}, {"device": "cuda:1"}, True),
    ],
)
def test_a_pair_shares_the_gpu_it_meets_on(
    target: dict[str, str], draft: dict[str, str], do_meet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [ModelSource("m", **options) for options in (target, draft)]  # type: ignore[arg-type]
    assert on_one_gpu(*sources) == do_meet
    assert pair_gpu_shares(*sources, 0.8) == (0.8, 0.8), "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    assert pair_gpu_shares(*sources, 0.8) == ((0.4, 0.4) if do_meet else (0.8, 0.8)), "the files tell nothing"


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (None, None, [0.7, 0.3]),
        (BackendOptions(device_share=0.8), BackendOptions(device_share=0.2), [0.8, 0.2]),
        (BackendOptions(device_share=0.6), None, [0.6, 0.6]),
        (BackendOptions(), BackendOptions(device_share=0.2), [0.7, 0.2]),
    ],
)
def test_the_engine_gives_each_model_its_share(
    monkeypatch: pytest.MonkeyPatch,
    target: BackendOptions | None,
    draft: BackendOptions | None,
    expected: list[float],
) -> None:
    shares: list[float | None] = []

    def noting(build: Any) -> Any:
        def build_noted(source: ModelSource, options: BackendOptions, *more: Any, **named: Any) -> Any:
            shares.append(options.device_share)
            return build(source, options, *more, **named)

        return build_noted

    monkeypatch.setattr(engine_module, "pair_gpu_shares", lambda *_: (0.7, 0.3))
    monkeypatch.setattr(engine_module, "build_target", noting(build_target))
    monkeypatch.setattr(engine_module, "build_drafter", noting(build_drafter))
    sources = ModelSource(str(DEMO / "draft")), ModelSource(str(DEMO / "draft"))
    SpeculativeEngine.from_pretrained(*sources, options=target, draft_options=draft)
    assert shares == expected


def test_the_memory_of_a_step_is_measured_and_told() -> None:
    lines: list[str] = []
    options = BackendOptions(max_model_len=256, kv_cache_memory=16 << 20, max_num_batched_tokens=512)
    _, built = build_target(ModelSource(str(DEMO / "draft"), device="cpu"), options, lines.append)
    assert built.memory.activation_bytes >= NOISE_CACHE_BYTES  # the rest may fit what other tests freed
    assert built.memory.process_bytes > 100 << 20
    assert lines[-1].startswith(f"memory of {DEMO / 'draft'}: ")
    assert re.search(r"MiB planned of .*: weights .*, a step .* \(measured\), cache 16\.0 MiB, the rest of", lines[-1])
    _, built = build_target(ModelSource(str(DEMO / "draft"), device="cpu"), replace(options, measures_step=False))
    assert built.memory.activation_bytes == 0


def test_recorded_steps_are_checked_and_hold_the_steps_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bool] = []

    def note(runner: ModelRunner) -> AdmissionReport:
        checked.append(runner.is_recorded)
        return check_admission(runner)

    monkeypatch.setattr(build_module, "check_admission", note)
    options = BackendOptions(max_num_seqs=1, max_model_len=128, max_num_batched_tokens=8, executor="graphs")
    _, built = build_target(ModelSource(str(DEMO / "draft"), device="cpu"), replace(options, measures_step=False))
    assert checked == [True]
    assert built.admission is not None


def test_memory_that_is_held_only_for_a_moment_is_measured() -> None:
    held_bytes = resident_bytes()
    assert held_bytes is not None
    more_bytes = (64 << 20) + max(0, peak_resident_bytes() - held_bytes)  # even where no peak can be reset
    with _measured({torch.device("cpu")}) as peaks:
        torch.ones(more_bytes, dtype=torch.uint8)
    assert peaks[torch.device("cpu")] >= 60 << 20


def test_the_measured_step_has_as_many_rows_as_the_scheduler_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter's branches are rows, too."""
    measured: list[StepLimits] = []

    def note(_loaded: object, limits: StepLimits, **_: object) -> StepMemory:
        measured.append(limits)
        return StepMemory()

    monkeypatch.setattr(build_module, "measure_step", note)
    source = ModelSource(str(DEMO / "draft"), device="cpu")
    options = BackendOptions(max_num_batched_tokens=512, max_num_seqs=2, kv_cache_memory=16 << 20)
    target, _ = build_target(source, options)
    drafter, _ = build_drafter(source, options, source)
    allowed = [backend._scheduler.max_num_seqs for backend in (target, drafter)]
    assert [limits.max_num_seqs for limits in measured] == allowed
    assert allowed[0] == 2 < allowed[1]


def test_a_draft_gets_no_cache_for_positions_that_its_target_lacks(tmp_path: Path) -> None:
    target = Path(shutil.copytree(DEMO / "draft", tmp_path / "target"))
    config = json.loads((target / "config.json").read_text()) | {"max_position_embeddings": 300}
    (target / "config.json").write_text(json.dumps(config))
    source, options = ModelSource(str(DEMO / "draft"), device="cpu"), BackendOptions(measures_step=False)
    assert build_drafter(source, options, ModelSource(str(target)))[1].memory.max_model_len == 300


def test_a_cache_that_cannot_be_had_is_told_with_its_sizes() -> None:
    """A petabyte: the system refuses it at once."""
    options = BackendOptions(block_size=1 << 40, kv_cache_memory=1 << 62)
    with pytest.raises(MemoryPlanError, match=r"MiB of weights and .*,.* MiB of cache of .* memory of cpu: .*allocate"):
        build_target(ModelSource(str(DEMO / "draft"), device="cpu"), options)


@pytest.mark.parametrize("measures_step", [True, False])
def test_too_little_memory_for_a_step_is_told_as_such(measures_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB.")

    monkeypatch.setattr(ModelRunner, "forward", no_memory)
    options = BackendOptions(max_model_len=256, kv_cache_memory=16 << 20, measures_step=measures_step)
    with pytest.raises(MemoryPlanError, match=r"do not fit into the memory of cpu: Tried to allocate 1 GiB\."):
        build_target(ModelSource(str(DEMO / "draft"), device="cpu"), options)


def test_a_model_spread_over_devices_takes_of_what_is_free_on_each() -> None:
    spread = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")])
    loaded = SimpleNamespace(device=torch.device("cuda"), model=spread)
    options = BackendOptions(device_share=0.5)
    assert _cache_room(loaded, options) == (None, 0.45)
    assert _cache_room(loaded, replace(options, gpu_memory_utilization=0.6)) == (None, 0.3)
    assert _cache_room(loaded, replace(options, kv_cache_memory=1 << 30)) == (1 << 30, 1.0)
    assert _cache_room(loaded, replace(options, kv_cache_memory=0.3)) == (None, 0.3)
