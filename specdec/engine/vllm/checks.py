"""What is asked of vLLM before it serves a target: its version, the names that we rest on, and its arguments.

Nothing is imported here before it is needed: the configuration asks for names of arguments where there is no vLLM.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.core.errors import InvalidParameterError, ModelLoadError

VERSION = "0.32.0"
"""The one that is tested."""
PARAMETER = "target.engine_args"

OURS = {
    "model": "target",
    "tokenizer": "target",
    "revision": "target.revision",
    "hf_token": "target.token",
    "dtype": "target.dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "target.kv_cache_memory",
    "kv_cache_memory_bytes": "target.kv_cache_memory",
    "num_gpu_blocks_override": "target.kv_cache_memory",
    "speculative_config": "draft and num_speculative_tokens",
    "served_model_name": "served_model_name",
    "logits_processors": "logits_processors",
}
"""Arguments of vLLM's that are keys of ours."""
_SET = {
    *(
        "scheduling_policy",
        "async_scheduling",
        "worker_extension_cls",
        "generation_config",
        "disable_log_stats",
        "seed",
    ),
    *("distributed_executor_backend", "trust_remote_code", "max_logprobs", "logprobs_mode"),
}
_UNTESTED = (
    *("pipeline_parallel", "data_parallel", "prefill_context_parallel", "decode_context_parallel", "nnodes"),
    *("node_rank", "enable_lora", "lora_", "max_lora", "spec_", "worker_cls", "scheduler_cls", "runner", "convert"),
    *("hf_overrides", "model_class_overrides", "structured_outputs_config", "reasoning_", "diffusion_", "pooler_"),
    *("kv_transfer", "kv_events", "kv_offloading", "kv_sharing", "ec_", "enable_elastic_ep", "enable_dbo"),
    *("enable_sleep_mode", "override_generation_config", "watermark", "aux_output_config", "mamba_"),
)


def refused_argument(names: Iterable[str]) -> str:
    """Why one of these arguments of vLLM's cannot be given, by its name; empty where all can, or are unknown."""
    for name in names:
        if name in OURS:
            return f"{name} is said by {OURS[name]}"
        if name in _SET:
            return f"{name} is set by specdec"
        if name.startswith(_UNTESTED):
            return f"{name} is not tested with drafts of ours"
    return ""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM runs a target.

    Attributes:
        max_draft: Most draft tokens of a job; longer drafts are cut.
        engine_args: Further ``EngineArgs`` of vLLM's, by name.
        fills_up: Whether every job is forwarded as if it had ``max_draft`` draft tokens: vLLM's full CUDA graphs take
            no other steps. None: on GPUs.
        allow_untested: Whether to take another version than the tested one.
    """

    max_draft: int = 8
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    fills_up: bool | None = None
    allow_untested: bool = False


def check_version(allow_untested: bool = False) -> tuple[str, ...]:
    """Whether this process has the vLLM that is tested; gives remarks, a sentence each.

    Raises:
        ModelLoadError: It has none, or another, which nobody allowed.
    """
    try:
        import vllm
    except ImportError as error:
        raise ModelLoadError(
            f"target.engine: vllm needs vLLM {VERSION} in the Python of the target's replica (make setup-vllm): {error}"
        ) from error
    if vllm.__version__.partition("+")[0] == VERSION:
        return ()
    what = f"vLLM is {vllm.__version__}; its internals are known of {VERSION} alone"
    if not allow_untested:
        raise ModelLoadError(f"{what} (target.allow_untested takes it all the same)")
    return (f"{what}: nobody knows that tokens are right",)


def require(owner: Any, *names: str) -> None:
    """Check that something of vLLM's has attributes that we rest on.

    Raises:
        ModelLoadError: One is not there.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ModelLoadError(
            f"this vLLM cannot be a target: {type(owner).__name__} has no {', '.join(missing)}, as {VERSION} has"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the names of a user's engine arguments.

    Raises:
        InvalidParameterError: vLLM has no such argument, or it cannot be given here.
    """
    from vllm.engine.arg_utils import EngineArgs

    refused = refused_argument(arguments)
    if refused:
        raise InvalidParameterError(PARAMETER, f"{PARAMETER}: {refused}")
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise InvalidParameterError(PARAMETER, f"{PARAMETER}: vLLM has no engine argument {name!r}{hint}")


def check_model(config: Any) -> None:
    """Check that a model is of a kind that is served here.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        ModelLoadError: It keeps recurrent states, or is no decoder.
    """
    model = config.model_config
    if model.is_hybrid or model.is_attention_free:
        raise recurrent_states(model.model)
    if model.is_encoder_decoder or model.runner_type != "generate":
        raise ModelLoadError(f"{model.model} is no decoder")


def recurrent_states(name: str) -> ModelLoadError:
    """Why models that keep recurrent states are refused.

    A request that is held back leaves vLLM's batch, and comes back as if no draft token of it had been accepted: the
    state after another token would be read (``vllm/v1/worker/gpu_input_batch.py``, ``add_request``).
    """
    return ModelLoadError(
        f"{name} keeps recurrent states, whose drafts are not taken back under vLLM: use target.engine: transformers"
    )
