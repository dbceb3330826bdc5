"""What is said of a target under vLLM where there is no vLLM: keys, environments, placement, fingerprints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.config.app import AppArgs
from cluster.config.base import validated
from cluster.config.environment import VLLM_SETTINGS, prepare_for_vllm
from cluster.models.identity import fingerprints
from cluster.models.vllm import check_engine, runtime_env, versions, vllm_options
from specdec.core.errors import InvalidParameterError


def args_of(**target: Any) -> AppArgs:
    return validated(AppArgs, {"target": {"engine": "vllm", **target}})


def test_what_the_replica_is_started_with() -> None:
    """Another Python where one is named, and nothing else: an image has vLLM in its own."""
    assert runtime_env(validated(AppArgs, {})) == runtime_env(args_of()) == {}
    assert runtime_env(args_of(python="some/python")) == {"py_executable": str(Path("some/python").absolute())}


def test_what_a_process_sets_for_vllm() -> None:
    environment = {"OMP_NUM_THREADS": "8", "VLLM_USE_V2_MODEL_RUNNER": "1", "HOME": "/"}
    prepare_for_vllm(2, environment)
    assert environment == {**VLLM_SETTINGS, "OMP_NUM_THREADS": "2", "HOME": "/"}


def python_that_says(path: Path, answer: dict[str, Any]) -> str:
    """A Python of another environment: a program in its place."""
    path.write_text(f"#!{sys.executable}\nprint('a log line')\nprint({json.dumps(answer)!r})\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("name", ["python", "ray", "llguidance"])
def test_another_version_there_is_refused(tmp_path: Path, name: str) -> None:
    answer = {"versions": versions() | {name: "0.1"}, "parameter": "target", "problem": ""}
    python = python_that_says(tmp_path / "python", answer)
    with pytest.raises(InvalidParameterError, match=f"has {name} 0.1, this one .*must be the same") as caught:
        check_engine(args_of(python=python))
    assert caught.value.parameter == "target.python"


def test_what_is_wrong_there_is_told(tmp_path: Path) -> None:
    answer = {"versions": versions(), "parameter": "target.engine_args", "problem": "no such argument"}
    with pytest.raises(InvalidParameterError, match="no such argument") as caught:
        check_engine(args_of(python=python_that_says(tmp_path / "python", answer)))
    assert caught.value.parameter == "target.engine_args"


def test_what_is_there_is_told(tmp_path: Path) -> None:
    answer = {"versions": versions() | {"torch": "9", "vllm": "0.32.0"}, "parameter": "target", "problem": ""}
    line = check_engine(args_of(python=python_that_says(tmp_path / "python", answer)))
    assert line is not None
    assert "torch 9" in line
    assert "vllm 0.32.0" in line
    assert check_engine(validated(AppArgs, {})) is None


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false", "/bin/true"])
def test_no_python_there(python: str) -> None:
    with pytest.raises(InvalidParameterError, match="make setup-vllm"):
        check_engine(args_of(python=python))


def test_a_python_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr("cluster.models.vllm._TIMEOUT_S", 0.5)
    with pytest.raises(InvalidParameterError, match="timed out") as caught:
        check_engine(args_of(python=str(python)))
    assert caught.value.parameter == "target.python"


def test_this_python_has_no_vllm() -> None:
    message = "target.engine: vllm needs vLLM .* in the Python of the target's replica .*: No module named 'vllm'"
    with pytest.raises(InvalidParameterError, match=message):
        check_engine(args_of(python=sys.executable))


def test_the_engine_decides_tokens_but_in_float32() -> None:
    own, plain = fingerprints(validated(AppArgs, {})), fingerprints(args_of())
    assert plain.decision == own.decision
    found = {
        fingerprints(args_of(dtype="bfloat16")).decision,
        fingerprints(args_of(engine_args={"quantization": "fp8"})).decision,
        fingerprints(args_of(dtype="bfloat16", engine_args={"kv_cache_dtype": "fp8"})).decision,
    }
    assert len(found - {own.decision}) == 3


def test_a_draft_of_one_token_has_room_where_nobody_drafts() -> None:
    assert vllm_options(validated(AppArgs, {"num_speculative_tokens": 0})).max_draft == 1
    assert vllm_options(validated(AppArgs, {"num_speculative_tokens": 6})).max_draft == 6
