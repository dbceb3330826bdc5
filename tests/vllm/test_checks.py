"""What is refused before an engine is built, by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import vllm
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from specdec.core.errors import InvalidParameterError, ModelLoadError
from specdec.engine.vllm.build import engine_config
from specdec.engine.vllm.checks import VllmOptions, check_version, require
from specdec.models.loading import ModelSource
from tests.vllm.engines import OPTIONS
from tests.vllm.models import HYBRID, TARGET


def config_of(source: ModelSource = TARGET, **engine_args: Any) -> Any:
    return engine_config(source, OPTIONS, VllmOptions(4, engine_args))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dtype", "float16", "dtype is said by target.dtype"),
        ("max_num_seqs", 4, "max_num_seqs"),
        ("speculative_config", {}, "num_speculative_tokens"),
        ("async_scheduling", True, "set by specdec"),
        ("trust_remote_code", True, "set by specdec"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size is not tested"),
        ("data_parallel_size", 2, "data_parallel_size is not tested"),
        ("enable_lora", True, "enable_lora is not tested"),
        ("quantisation", "fp8", "no engine argument 'quantisation'; the nearest is 'quantization'"),
        ("tensor_parallel_size", "two", "vLLM refuses"),
        ("attention_backend", "NONE_SUCH", "vLLM refuses"),
    ],
)
def test_an_engine_argument(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message) as caught:
        config_of(**{name: value})
    assert caught.value.parameter == "target.engine_args"


def test_recurrent_states() -> None:
    with pytest.raises(ModelLoadError, match="keeps recurrent states"):
        config_of(HYBRID)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_version() == ()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(ModelLoadError, match=r"vLLM is 0\.33\.0.*allow_untested"):
        check_version()
    assert "0.33.0" in check_version(allow_untested=True)[0]


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModelLoadError, match="make setup-vllm"):
        check_version(allow_untested=True)


def test_a_name_that_is_gone() -> None:
    with pytest.raises(ModelLoadError, match="has no decided_at, gone"):
        require(CPUModelRunner, "execute_model", "decided_at", "gone")


def test_what_is_set() -> None:
    config = config_of(block_size=64)
    assert config.cache_config.block_size == 64
    assert config.scheduler_config.async_scheduling is False
    assert config.scheduler_config.policy == "priority"
    assert config.use_v2_model_runner is False
    assert config.speculative_config.num_speculative_tokens == 4
