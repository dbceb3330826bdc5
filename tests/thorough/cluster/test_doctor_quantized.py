"""``specdec doctor`` on quantized models."""

import re

import pytest

from cluster.cli import main

MEMORY = ("--target-kv-cache-memory", "16MiB", "--draft-kv-cache-memory", "8MiB", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")


def test_doctor_examines_a_quantized_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--target-quantization", "int8", *MEMORY)
    assert main(["doctor", *flags]) == 0
    text = capsys.readouterr().out
    assert text.count("quantized: int8") == 1
    target, draft = text.split("\ndraft ")
    assert "quantized" not in draft
    (weights_mib,) = re.findall(r"weights ([\d.]+) MiB", target)
    assert float(weights_mib) < 0.4 * 43.0
    (error, tolerance) = re.findall(r"relative error (\S+) \(allowed (\S+)\)", target)[0]
    assert float(error) < float(tolerance) == 1e-3


def test_doctor_says_what_is_wrong_with_a_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--draft-quantization", "int4", *MEMORY]) == 2
    assert "problem    int4 needs dtype bfloat16" in capsys.readouterr().out
