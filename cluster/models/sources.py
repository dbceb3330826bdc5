"""From the configuration to what the engine library takes. Imports torch; for the processes that hold models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar

from cluster.config.app import AppArgs
from cluster.config.models import ModelConfig
from cluster.models.demos import demo_folder
from cluster.models.identity import draft_path, model_dtype, target_path
from specdec.cache.recurrent.pool import MIN_WINDOW_TOKENS
from specdec.cache.recurrent.slots import DEFAULT_WINDOW_TOKENS
from specdec.checkpoint.compat import PairReport
from specdec.core.errors import InvalidParameterError
from specdec.core.validation import import_callable
from specdec.drafting.heads import HeadsOptions
from specdec.drafting.ngram import NgramOptions
from specdec.drafting.registry import HEADS, TOKEN_DRAFTERS
from specdec.engine.build import BackendOptions
from specdec.models.describe import describe_pair
from specdec.models.loading import ModelSource
from specdec.models.lora.slots import LoRAConfig
from specdec.sampling.pipeline import LogitsProcessor

BackendRole = Literal["target", "draft"]
B = TypeVar("B")


def target_source(args: AppArgs) -> ModelSource:
    """Where the target model comes from."""
    return _source(args, args.target, target_path(args), args.lora.is_enabled)


def draft_source(args: AppArgs) -> ModelSource | None:
    """Where the draft model comes from; None where there is none of one's own."""
    return _source(args, args.draft, draft_path(args), args.lora.has_draft_adapters) if args.has_draft_model else None


def read_template(file: str | None) -> str | None:
    """The chat template in place of the tokenizer's own; None for none.

    Raises:
        InvalidParameterError: The file cannot be read.
    """
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("chat_template", f"chat_template: {file}: {error}") from None


def check_one_process(args: AppArgs) -> None:
    """Refuse to run both models in one process where vLLM is to run one: it changes the process it is in.

    Raises:
        InvalidParameterError: So it is.
    """
    if args.target.engine == "vllm":
        raise InvalidParameterError("target.engine", "target.engine: vllm is for the service: it needs its own process")


def backend_options(args: AppArgs, model: ModelConfig, vocab_size: int | None = None) -> BackendOptions:
    """How a model is run.

    Raises:
        InvalidParameterError: A logits processor cannot be had.
    """
    return BackendOptions(
        max_model_len=args.max_model_len,
        vocab_size=vocab_size,
        block_size=args.block_size,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory=model.kv_cache_memory,
        max_num_seqs=args.max_num_seqs,
        skip_parity_check=args.skip_parity_check,
        num_step_tokens=_num_step_tokens(args) if model is args.draft else 1,
        other_vocabulary=model is args.draft and args.draft.other_vocabulary,
        rollback_tokens=_rollback_tokens(args, model),
        logits_processors=load_processors(args.logits_processors),
        gpu_memory_utilization=args.gpu_memory_utilization,
        executor=args.executor,
        max_draft_tokens=args.most_draft_tokens,
        heads=_heads(args) if model is args.target else None,
        logprobs_mode=args.logprobs_mode if model is args.target else "raw_logprobs",
        strict_tile_tokens=args.strict_tile_tokens if args.exactness == "strict" and model is args.target else None,
    )


def _rollback_tokens(args: AppArgs, model: ModelConfig) -> int:
    """How far back recurrent states reach.

    That is a draft and a token, which is all that is taken back in turn; twice as many of a draft that runs ahead. And
    a block: the copy of a state that a prompt leaves behind serves the next one from where its last whole block ended.
    """
    num_tokens = args.most_draft_tokens + 1
    runs_ahead = model is not args.target and not args.is_paired
    taken_back = max(DEFAULT_WINDOW_TOKENS, 2 * num_tokens) if runs_ahead else max(MIN_WINDOW_TOKENS, num_tokens)
    return max(args.block_size, taken_back)


def configured_pair(args: AppArgs, target: ModelSource, draft: ModelSource) -> PairReport:
    """What holds for the target and the draft as they are configured; raises like ``describe_pair``."""
    return describe_pair(
        target, draft, other_vocabulary=args.draft.other_vocabulary, num_step_tokens=_num_step_tokens(args)
    )


def _num_step_tokens(args: AppArgs) -> int:
    """Tokens of a pass of the draft model: a whole draft, and one where all of it is kept."""
    return 1 + args.most_draft_tokens if args.draft.parallel_drafting else 1


def _heads(args: AppArgs) -> HeadsOptions | None:
    method, path = args.draft.head_method, args.draft.heads
    if method is None:
        return None
    if method not in HEADS:
        import_callable("draft.method", method)
    return HeadsOptions(path or str(demo_folder("heads")), args.most_draft_tokens, args.draft.tree_tokens, method)


def load_processors(names: Iterable[str]) -> tuple[LogitsProcessor, ...]:
    """Import logits processors: functions or other callables of modules that this process can import.

    Args:
        names: Import strings, such as ``my_package.masks:only_digits``.

    Raises:
        InvalidParameterError: One cannot be imported, or called as a processor.
    """
    return tuple(import_callable("logits_processors", name) for name in names)


def ngram_options(args: AppArgs) -> NgramOptions | None:
    """What drafts from tokens; None where nothing drafts at all.

    Raises:
        InvalidParameterError: ``draft.method`` names a drafter that cannot be imported.
    """
    if not args.speculates:
        return None
    name = args.draft.token_drafter
    new = None if name is None else import_callable("draft.method", TOKEN_DRAFTERS.get(name, name))(args)
    return NgramOptions(args.most_draft_tokens, name is not None, new)


def backend_arguments(text: str) -> tuple[str, dict[str, str]]:
    """The import string of a value of the key ``backend``, and the arguments after it."""
    module, name, *arguments = text.split(":")
    return f"{module}:{name}", dict(part.split("=", 1) for one in arguments for part in one.split(","))


def backend_of(args: AppArgs, role: BackendRole, build: Callable[[], B]) -> B:
    """What a worker runs its model by: ``build``'s, or what the key ``backend`` puts around it or in its place.

    Args:
        args: The service's configuration.
        role: What the backend is for.
        build: Makes the worker's own backend. The function that ``backend`` names is called with ``role``, ``build``
            and ``args``, and the arguments that the key gives as texts; it need not build.

    Raises:
        InvalidParameterError: The function cannot be imported, or does not take such arguments.
    """
    if args.backend is None:
        return build()
    name, options = backend_arguments(args.backend)
    function = import_callable("backend", name)
    try:
        inspect.signature(function).bind(role, build, args, **options)
    except TypeError as error:
        raise InvalidParameterError("backend", f"backend: {args.backend}: {error}") from None
    backend: B = function(role, build, args, **options)
    return backend


def _source(args: AppArgs, config: ModelConfig, path: str, takes_adapters: bool) -> ModelSource:
    return ModelSource(
        path=path,
        revision=config.revision,
        token=config.token.get_secret_value() if config.token else None,
        dtype=model_dtype(args, config),
        device=config.device,
        device_map=config.device_map,
        quantization=config.quantization,
        engine="openvino" if config.engine == "openvino" else "transformers",
        adapters=LoRAConfig(args.lora.max_loras, args.lora.max_rank) if takes_adapters else None,
    )
