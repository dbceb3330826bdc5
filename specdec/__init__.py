"""The engine library: models, caches, sampling and the protocol's state machines. No Ray in it.

The names below are its public face; they are imported when they are first used, as torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.engine.build import BackendOptions
    from specdec.engine.engine import SpeculativeEngine
    from specdec.engine.results import CancellationToken, GenerationResult, TokenEvent
    from specdec.engine.stats import SpecStats
    from specdec.engine.stepping import Stepper
    from specdec.models.fingerprint import adapter_reference
    from specdec.models.loading import ModelSource
    from specdec.models.lora.slots import AdapterRoom
    from specdec.sampling.grammar import Grammar
    from specdec.sampling.params import SamplingParams
    from specdec.sampling.pipeline import LogitsProcessor
    from specdec.sampling.rows import RowGroup
    from specdec.types import Adapter, TokenLogprobs

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterRoom",
    "BackendOptions",
    "CancellationToken",
    "GenerationResult",
    "Grammar",
    "LogitsProcessor",
    "ModelSource",
    "RowGroup",
    "SamplingParams",
    "SpecStats",
    "SpeculativeEngine",
    "Stepper",
    "TokenEvent",
    "TokenLogprobs",
    "adapter_reference",
]

_MODULES = {
    "Adapter": "specdec.types",
    "AdapterRoom": "specdec.models.lora.slots",
    "BackendOptions": "specdec.engine.build",
    "CancellationToken": "specdec.engine.results",
    "GenerationResult": "specdec.engine.results",
    "Grammar": "specdec.sampling.grammar",
    "LogitsProcessor": "specdec.sampling.pipeline",
    "ModelSource": "specdec.models.loading",
    "RowGroup": "specdec.sampling.rows",
    "SamplingParams": "specdec.sampling.params",
    "SpecStats": "specdec.engine.stats",
    "SpeculativeEngine": "specdec.engine.engine",
    "Stepper": "specdec.engine.stepping",
    "TokenEvent": "specdec.engine.results",
    "TokenLogprobs": "specdec.types",
    "adapter_reference": "specdec.models.fingerprint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
