"""The functions that modelling modules call to mix tokens, by name: transformers' names are the same in all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from specdec.kernels.delta import DeltaRule
from specdec.kernels.mamba1 import Mamba1
from specdec.kernels.mamba2 import Mamba2
from specdec.kernels.scan import Scan

CONVOLUTION = "causal_conv1d_fn"
"""A causal convolution over the inputs that ``Cache.update_conv_state`` returned."""

SCANS: MappingProxyType[str, Callable[..., Scan]] = MappingProxyType(
    {
        "torch_chunk_gated_delta_rule": DeltaRule,
        "chunk_kimi_delta_attention": DeltaRule,
        "mamba2_chunk_scan": Mamba2,
        "mamba_selective_scan": Mamba1,
    }
)
"""Scans over many tokens. Those for single tokens, which change a state in place, are never reached: a layer takes
them only where its cache gives it a state."""


def known_functions(namespace: dict[str, Any]) -> set[str]:
    """Which of these names a modelling module has."""
    return {CONVOLUTION, *SCANS} & namespace.keys()
