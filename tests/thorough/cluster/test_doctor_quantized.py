"""``specdec doctor`` on quantized models."""

import json

import pytest

from cluster.cli import main

MEMORY = ("--target-kv-cache-memory", "16MiB", "--draft-kv-cache-memory", "8MiB", "--max-model-len", "256")


@pytest.fixture(autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install -e '.[quantization]'")


def test_doctor_examines_a_quantized_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--target-quantization", "int8", *MEMORY)
    assert main(["doctor", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    target, draft = found["target"], found["draft"]
    assert (target["quantization"], draft["quantization"]) == ("int8", "none")
    assert target["memory"]["weights_bytes"] < 0.4 * 43.0 * (1 << 20)
    assert target["admission"]["relative_error"] < target["admission"]["tolerance"] == 1e-3
    assert main(["doctor", *flags]) == 0
    assert "quantized: int8" in capsys.readouterr().out


def test_doctor_says_what_is_wrong_with_a_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--draft-quantization", "int4", *MEMORY]) == 2
    assert "problem    int4 needs dtype bfloat16" in capsys.readouterr().out
