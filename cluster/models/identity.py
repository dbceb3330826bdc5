"""Which models a configuration names, without loading them: for every process of the service. Imports no torch."""

from __future__ import annotations

import json
from importlib.metadata import version

from cluster.config.app import AppArgs, Demo
from cluster.config.models import Dtype, ModelConfig, TargetConfig
from cluster.models.demos import demo_folder
from specdec.checkpoint.fingerprint import digest, model_fingerprint, optional_version, vocabulary_fingerprint
from specdec.core.errors import InvalidParameterError
from specdec.core.types import Fingerprints
from specdec.engine.vllm.checks import VERSION

DEMO_TARGETS: dict[Demo, str] = {"plain": "target", "hybrid": "hybrid"}
"""Folder of each demo target."""


def target_path(args: AppArgs) -> str:
    """Hub id or folder of the target.

    Raises:
        InvalidParameterError: It is the chat demo, which ``specdec serve`` makes a target like others.
    """
    if args.demo == "chat":
        raise InvalidParameterError("demo", "demo: chat is for specdec serve; elsewhere use plain or hybrid")
    return args.target.model or str(demo_folder(DEMO_TARGETS[args.demo]))


def draft_path(args: AppArgs) -> str:
    """Hub id or folder of the draft, where there is one."""
    return args.draft.model or str(demo_folder("draft"))


def model_dtype(args: AppArgs, model: ModelConfig) -> Dtype:
    """The demo pair runs in float32 unless told otherwise: then a seed's tokens are the same for every schedule."""
    return "float32" if args.is_demo and model.dtype == "auto" else model.dtype


def fingerprints(args: AppArgs) -> Fingerprints:
    """What the target and its vocabulary are (rule 14); the same in every process of one configuration.

    Placement, limits, plans and all else that decides no token are not in it.

    Raises:
        ModelLoadError: A model cannot be found or read, or is to be quantized without torchao.
    """
    # The draft's vocabulary is checked against the target's before it serves, so that one text stands for both.
    vocabulary = vocabulary_fingerprint(target_path(args), *_where(args.target))
    return Fingerprints(
        decision=_deciding(args, args.target, target_path(args), vocabulary),
        vocabulary=vocabulary,
    )


def token_of(model: ModelConfig) -> str | None:
    """The access token for the hub, if there is one."""
    return model.token.get_secret_value() if model.token else None


def _where(model: ModelConfig) -> tuple[str | None, str | None]:
    return model.revision, token_of(model)


def _deciding(args: AppArgs, model: ModelConfig, path: str, vocabulary: str) -> str:
    """Fingerprint of all that decides the tokens of one model."""
    return digest(
        {
            "model": model_fingerprint(path, *_where(model)),
            "vocabulary": vocabulary,
            "dtype": model_dtype(args, model),
            "engine": _engine(args, model),
            "logits_processors": args.logits_processors,
            "backend": args.backend,
        }
        | ({"strict": args.strict_tile_tokens} if args.exactness == "strict" and model is args.target else {})
    )


def _engine(args: AppArgs, model: ModelConfig) -> list[str]:
    """What quantizes, and what rounds otherwise in another version; in float32 the tokens are the same for all."""
    dtype = model_dtype(args, model)
    if isinstance(model, TargetConfig) and model.engine == "vllm":
        # The other processes have no vLLM, and other versions of torch and transformers.
        of_engine = [f"vllm {VERSION}", json.dumps(model.engine_args, sort_keys=True, default=str)]
        return [] if dtype == "float32" and not model.engine_args else of_engine
    engine = f"openvino {optional_version('openvino')}" if model.engine == "openvino" else ""
    quantized = []
    if model.quantization != "none":
        quantized = [model.quantization, engine or f"torchao {optional_version('torchao')}"]
    if dtype == "float32" or (dtype == "auto" and model.is_on_cpu):
        return quantized
    device = "cpu" if model.is_on_cpu else "any"
    versions = [f"torch {version('torch')}", f"transformers {version('transformers')}"]
    return [*versions, *filter(None, [engine]), device, *quantized]
