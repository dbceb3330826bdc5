"""From a model's name to a target over vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from specdec.checkpoint.compat import check_width, tokenizer_width
from specdec.core.backends import Status, VerifyJob
from specdec.core.errors import InvalidParameterError, ModelLoadError, reason_of
from specdec.core.log import TokenLog
from specdec.core.params import SamplingParams, SequenceSpec
from specdec.core.types import Progress
from specdec.engine.build import CHUNK_TOKENS, CPU_KV_FRACTION, BackendOptions, make_sampler
from specdec.engine.vllm.checks import (
    PARAMETER,
    VllmOptions,
    check_arguments,
    check_model,
    check_version,
    recurrent_states,
)
from specdec.engine.vllm.target import NoDrafts, RuleExtension, VllmTarget
from specdec.models.describe import describe_model
from specdec.models.host_memory import host_memory
from specdec.models.loading import ModelSource, is_recurrent, load_config, load_tokenizer


def build_vllm_target(
    source: ModelSource, options: BackendOptions, vllm: VllmOptions, progress: Progress | None = None
) -> VllmTarget:
    """Load a model into a vLLM engine in this process and make a target of it.

    Of the options ``block_size`` and all that concerns recurrent states have no meaning here.

    Raises:
        InvalidParameterError: vLLM does not take the engine arguments.
        ModelLoadError: The model cannot be loaded, or not be served exactly; vLLM is not the one that is tested.
    """
    say = progress or (lambda _: None)
    for remark in check_version(vllm.allow_untested):
        say(remark)
    config = engine_config(source, options, vllm)
    description = describe_model(source)
    vocab_size = options.vocab_size or tokenizer_width(load_tokenizer(source))
    check_width(source.path, description.vocab_size, vocab_size)
    say(f"loading {source.path} into vLLM")
    try:
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
    except (ValueError, RuntimeError, OSError) as error:
        raise ModelLoadError(f"vLLM does not load {source.path}: {reason_of(error)}") from error
    target = VllmTarget(
        core,
        make_sampler(source, vocab_size, description.eos_token_ids, options),
        options.logits_processors,
        max_draft=vllm.max_draft,
        fills_up=_fills_up(vllm),
    )
    say(f"warming {source.path} up")
    _warm_up(target, min(vllm.max_draft, target.max_model_len - 3))
    return target


def _warm_up(target: VllmTarget, num_drafted: int) -> None:
    """A first step compiles kernels, for minutes where none are kept; a second shows that drafts reach the rule.

    Raises:
        ModelLoadError: They do not.
    """
    log = TokenLog([1])
    spec = SequenceSpec(SamplingParams(ignore_eos=True), 0, 1, target.max_model_len - 1)
    results = []
    for draft in ((), (1,) * num_drafted):
        results += target.verify([VerifyJob("warm-up", log, draft, spec)])
        log.extend(results[-1].run)
    target.release("warm-up")
    if [(result.status, result.num_drafted) for result in results] != [
        (Status.DECIDED, 0),
        (Status.DECIDED, num_drafted),
    ]:
        raise ModelLoadError(f"this vLLM cannot be a target: it did not verify a draft of {num_drafted}: {results}")


def engine_config(source: ModelSource, options: BackendOptions, vllm: VllmOptions) -> VllmConfig:
    """The configuration of vLLM, checked by vLLM and by what we can serve with it; loads nothing.

    Raises:
        InvalidParameterError: vLLM does not take the engine arguments.
        ModelLoadError: The model is of a kind that is not served here.
    """
    check_arguments(vllm.engine_args)
    if is_recurrent(load_config(source)):  # vLLM does not know them all
        raise recurrent_states(source.path)
    max_model_len = describe_model(source).max_model_len
    given = dict(vllm.engine_args)
    given.setdefault("tensor_parallel_size", 1)
    try:
        config = EngineArgs(
            **given,
            **_memory(options),
            model=source.path,
            revision=source.revision,
            hf_token=source.token,
            dtype="float32" if source.dtype == "auto" and not torch.cuda.is_available() else source.dtype,
            max_model_len=min(options.max_model_len or max_model_len, max_model_len),
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=_max_num_batched_tokens(options, vllm),
            scheduling_policy="priority",  # of equal priority who came last yields first
            speculative_config={
                "method": "custom_class",
                "model": f"{NoDrafts.__module__}.{NoDrafts.__qualname__}",
                "num_speculative_tokens": vllm.max_draft,
            },
            worker_extension_cls=f"{RuleExtension.__module__}.{RuleExtension.__qualname__}",
            distributed_executor_backend="uni" if given["tensor_parallel_size"] == 1 else "mp",
            async_scheduling=False,
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
        ).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise InvalidParameterError(PARAMETER, f"{PARAMETER}: vLLM refuses them: {reason_of(error)}") from error
    check_model(config)
    return config


def _fills_up(vllm: VllmOptions) -> bool:
    return torch.cuda.is_available() if vllm.fills_up is None else vllm.fills_up


def _max_num_batched_tokens(options: BackendOptions, vllm: VllmOptions) -> int:
    """Room for a row of each sequence, for those that are filled up, and for a draft of one alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 1 + vllm.max_draft if _fills_up(vllm) else 1
    wanted = options.max_num_batched_tokens or CHUNK_TOKENS[device]
    return max(wanted, options.max_num_seqs * rows, 2 * (1 + vllm.max_draft))


def _memory(options: BackendOptions) -> dict[str, Any]:
    """A number of bytes for each worker, or a fraction: of a GPU, or of the memory that is free now."""
    wanted = options.kv_cache_memory
    if isinstance(wanted, int):
        return {"kv_cache_memory_bytes": wanted}
    if torch.cuda.is_available():
        share = options.gpu_memory_utilization * (options.device_share or 1.0) if wanted == "auto" else wanted
        return {"gpu_memory_utilization": share}
    fraction = CPU_KV_FRACTION if wanted == "auto" else wanted
    return {"kv_cache_memory_bytes": int(fraction * host_memory().free_bytes)}
