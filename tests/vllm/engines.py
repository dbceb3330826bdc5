"""Targets over vLLM; only one engine is open at a time in a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.engine.build import BackendOptions
from specdec.engine.vllm.build import build_vllm_target
from specdec.engine.vllm.checks import VllmOptions
from specdec.engine.vllm.target import VllmTarget
from specdec.models.loading import ModelSource
from tests.vllm.models import TARGET

OPTIONS = BackendOptions(max_model_len=512, max_num_batched_tokens=64, kv_cache_memory=64 << 20, max_num_seqs=6)


def make(source: ModelSource = TARGET, *, max_draft: int = 4, engine_args: Any = None, **options: Any) -> VllmTarget:
    """A target that is not compiled; ``options`` are of ``BackendOptions``."""
    arguments = {"enforce_eager": True, "block_size": 32, **(engine_args or {})}
    return build_vllm_target(source, replace(OPTIONS, **options), VllmOptions(max_draft, arguments))
