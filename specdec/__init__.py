"""The engine library: models, caches, sampling and the protocol's state machines. No Ray in it.

The names below are its public face; they are imported when they are first used, as torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.checkpoint.fingerprint import adapter_reference
    from specdec.core.grammar import Grammar
    from specdec.core.params import SamplingParams
    from specdec.core.types import Adapter, TokenLogprobs
    from specdec.drafting.ngram import NgramOptions, TokenDrafter
    from specdec.engine.build import BackendOptions
    from specdec.engine.engine import SpeculativeEngine
    from specdec.engine.results import CancellationToken, GenerationResult, SpecStats, TokenEvent
    from specdec.engine.stepper import Stepper
    from specdec.models.loading import ModelSource
    from specdec.models.lora.slots import LoRAConfig
    from specdec.sampling.pipeline import LogitsProcessor
    from specdec.sampling.rows import RowGroup

__version__ = "0.1.0rc1"

__all__ = [
    "Adapter",
    "BackendOptions",
    "CancellationToken",
    "GenerationResult",
    "Grammar",
    "LoRAConfig",
    "LogitsProcessor",
    "ModelSource",
    "NgramOptions",
    "RowGroup",
    "SamplingParams",
    "SpecStats",
    "SpeculativeEngine",
    "Stepper",
    "TokenDrafter",
    "TokenEvent",
    "TokenLogprobs",
    "adapter_reference",
]

_MODULES = {
    "Adapter": "specdec.core.types",
    "LoRAConfig": "specdec.models.lora.slots",
    "BackendOptions": "specdec.engine.build",
    "CancellationToken": "specdec.engine.results",
    "GenerationResult": "specdec.engine.results",
    "Grammar": "specdec.core.grammar",
    "LogitsProcessor": "specdec.sampling.pipeline",
    "ModelSource": "specdec.models.loading",
    "NgramOptions": "specdec.drafting.ngram",
    "RowGroup": "specdec.sampling.rows",
    "SamplingParams": "specdec.core.params",
    "SpecStats": "specdec.engine.results",
    "SpeculativeEngine": "specdec.engine.engine",
    "Stepper": "specdec.engine.stepper",
    "TokenDrafter": "specdec.drafting.ngram",
    "TokenEvent": "specdec.engine.results",
    "TokenLogprobs": "specdec.core.types",
    "adapter_reference": "specdec.checkpoint.fingerprint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
