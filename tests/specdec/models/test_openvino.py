"""Steps by OpenVINO against whole forwards of transformers, and what it does not run."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from specdec.core.errors import ModelLoadError
from specdec.engine.build import BackendOptions, build_target
from specdec.executor.rows import RowInput
from specdec.executor.steps import unread
from specdec.models.loading import ModelSource, load_model
from specdec.models.parity_check import check_admission
from tests.specdec.engine.features import demo
from tests.specdec.models.test_runner import TOLERANCE, Batch, Models, Whole

openvino = pytest.importorskip("openvino")

from specdec.executor.openvino.graph import compiled_graph  # noqa: E402  # both need it
from specdec.executor.openvino.runner import OpenVINORunner, runs_bfloat16  # noqa: E402

SERVED = ("llama", "qwen3", "phi3", "olmo2", "granite", "glm4", "gpt_neox", "gpt2", "gemma")


def make_batch(models: Models, whole: Whole, family: str, seed: int = 0) -> Batch:
    loaded, stock = models(family)
    return Batch(OpenVINORunner(loaded, num_blocks=60), stock, whole, seed)


@pytest.mark.parametrize("family", SERVED)
def test_ragged_rounds_equal_whole_forwards(models: Models, whole_forward: Whole, family: str) -> None:
    """Chunks of prompts, drafts that are cut back, forks and blocks that others had."""
    assert make_batch(models, whole_forward, family).play([9, 1, 23, 47, 64], rounds=9) <= TOLERANCE


def test_a_prompt_of_many_blocks_beside_a_short_one(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "llama")
    sequence, prompt = batch.runner.new_sequence(), batch.tokens(640)
    batch.forward([(sequence, [], prompt[:530], 530)])
    batch.forward([(sequence, prompt[:530], prompt[530:], 110), (batch.runner.new_sequence(), [], batch.tokens(3), 3)])
    assert batch.difference <= TOLERANCE


def test_the_comparison_sees_a_missing_copy(
    models: Models, whole_forward: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(models, whole_forward, "llama")
    monkeypatch.setattr(batch.runner, "_copy_blocks", lambda copies: None)
    assert batch.play([9, 1, 23, 47], rounds=6) > 1e-2


def test_a_row_whose_token_was_drawn_on_the_device(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "llama")
    sequence = batch.runner.new_sequence()
    assert batch.runner.reserve(sequence, 4)
    given = RowInput(sequence, [5, unread(1), 7], 1)
    logits = batch.runner.forward([given], drawn=torch.tensor([9, 6], dtype=torch.int32))
    expected = whole_forward(batch.stock, [5, 6, 7])[-1:]
    assert (logits - expected).abs().max() <= TOLERANCE


def test_numbers_that_are_not_finite_are_told_by_row(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "llama")
    first, second = (batch.runner.new_sequence() for _ in range(2))
    for sequence in (first, second):
        assert batch.runner.reserve(sequence, 8)
    batch.runner.forward([RowInput(first, [5, 6], 1), RowInput(second, [5, 6], 1)])
    assert batch.runner.spoilt_rows() == ()
    for cache in batch.runner._caches:
        cache[second.tables[0][0]] = float("nan")
    batch.runner.forward([RowInput(first, [7], 1), RowInput(second, [7], 0)])
    assert batch.runner.spoilt_rows() == (1,)


def test_what_others_left_in_a_block_is_not_read(models: Models, whole_forward: Whole) -> None:
    batch = make_batch(models, whole_forward, "llama")
    for cache in batch.runner._caches:
        cache.fill_(float("nan"))
    assert batch.play([9, 1, 23, 47], rounds=3) <= TOLERANCE
    assert batch.runner.spoilt_rows() == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_demo_target_is_admitted(dtype: str, quantization: str) -> None:
    loaded = load_model(replace(demo("target", engine="openvino"), dtype=dtype))
    if dtype == "bfloat16" and not runs_bfloat16():
        with pytest.raises(ModelLoadError, match="bfloat16 needs a CPU with AVX512_BF16 or AMX: set dtype: float32"):
            OpenVINORunner(loaded, num_blocks=40, quantization=quantization)
        return
    runner = OpenVINORunner(loaded, num_blocks=40, quantization=quantization)
    report = check_admission(runner)
    assert report.num_tokens == 73
    sequence = runner.new_sequence()
    assert runner.reserve(sequence, 2)
    assert runner.forward([RowInput(sequence, [1, 2], 1)]).isfinite().all()


def test_weights_that_are_no_linear_layers_are_not_held_in_int8(models: Models) -> None:
    runner = OpenVINORunner(models("gpt2")[0], num_blocks=40, quantization="int8")
    assert check_admission(runner).relative_error < 1e-4


def test_the_copy_of_the_weights_is_taken_from_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not there yet when the cache is planned."""
    monkeypatch.setattr("specdec.models.memory.free_memory_bytes", lambda _: 400 << 20)
    options = BackendOptions(max_model_len=512, kv_cache_memory=0.5, skip_parity_check=True)
    plan = build_target(demo("target", engine="openvino"), options)[1].memory
    assert plan.budget_bytes == ((400 << 20) - plan.weights_bytes) // 2
    assert plan.total_bytes == 2 * plan.weights_bytes + plan.cache_bytes + plan.process_bytes
    assert plan.available_bytes == plan.weights_bytes + plan.process_bytes + (400 << 20)
    assert plan.process_bytes > 100 << 20
    assert f"their copy {plan.copy_bytes / (1 << 20):,.1f} MiB, cache" in plan.describe()


def test_int8_weights_are_multiplied_as_they_are() -> None:
    """Without that the graph is as exact, and as slow as in float32."""
    loaded = load_model(demo("target", engine="openvino"))
    held = [
        sum(
            node.get_rt_info()["runtimePrecision"].astype(str) == "i8"
            for node in compiled_graph(loaded, quantization, 1).get_runtime_model().get_ops()
            if node.get_rt_info()["layerType"].astype(str) == "Const"
        )
        for quantization in ("none", "int8")
    ]
    assert held == [0, 85]


REFUSED: list[tuple[str, str]] = [
    ("mistral", "attend to all positions"),
    ("gemma2", "attend to all positions"),
    ("gpt_oss", "attend to all positions"),
    ("deepseek_v3", "attend to all positions"),
    ("mixtral", "No conversion rule"),
]


@pytest.mark.parametrize(("family", "why"), REFUSED)
def test_what_it_does_not_run_is_refused_by_name(models: Models, family: str, why: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{family} does not run with engine: openvino: .*{why}"):
        OpenVINORunner(models(family)[0], num_blocks=10)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float16"}, "float32 or bfloat16, not float16"),
        ({"quantization": "int4"}, "none or int8, not int4"),
        ({"path": str(demo("hybrid").path)}, "recurrent layers"),
    ],
)
def test_sources_that_it_does_not_run_are_refused(change: dict[str, str], why: str) -> None:
    source: ModelSource = replace(demo("target", engine="openvino"), **change)
    with pytest.raises(ModelLoadError, match=why):
        build_target(source, BackendOptions(skip_parity_check=True))


def test_a_package_of_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "specdec.executor.openvino.runner", None)
    with pytest.raises(ModelLoadError, match=f"OpenVINO {version('openvino')}: .*specdec-serve\\[openvino\\]"):
        build_target(demo("target", engine="openvino"), BackendOptions())


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise checks.PackageNotFoundError(name)

    from specdec.checkpoint import fingerprint as checks

    monkeypatch.setattr(checks, "version", gone)
    with pytest.raises(ModelLoadError, match="specdec-serve\\[openvino\\]"):
        build_target(demo("target", engine="openvino"), BackendOptions())
