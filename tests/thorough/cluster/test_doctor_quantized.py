"""``specdec doctor`` on quantized models."""

import json

import pytest

from cluster.cli import main

MEMORY = ("--target-kv-cache-memory", "16MiB", "--draft-kv-cache-memory", "8MiB", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")


def test_doctor_compares_a_quantized_model_with_its_original(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--target-quantization", "int8", *MEMORY)
    assert main(["doctor", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    target, draft = found["target"], found["draft"]
    assert (target["quantization"], draft["quantization"], draft["comparison"]) == ("int8", "none", None)
    comparison = target["comparison"]
    assert target["memory"]["weights_bytes"] < 0.4 * comparison["original_bytes"]
    assert 0 < comparison["mean_kl"] < 2e-3
    assert comparison["step_s"] > 0 < comparison["original_step_s"]
    assert target["admission"]["relative_error"] < target["admission"]["tolerance"] == 1e-3
    assert main(["doctor", *flags]) == 0
    text = capsys.readouterr().out
    for words in ("quantized: int8", "MiB for 43.0 MiB, a step ", "nats in the mean", "of 256 positions"):
        assert words in text


def test_doctor_says_what_is_wrong_with_a_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--draft-quantization", "int4", *MEMORY]) == 2
    assert "problem    int4 needs dtype bfloat16" in capsys.readouterr().out
