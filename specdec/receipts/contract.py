"""What a token's logits depend on beside the model and the tokens before it: the numeric contract."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import torch

Contract = dict[str, str]


def numeric_contract(dtype: str, device: str, quantization: str = "none") -> Contract:
    """The contract of a model as this process, or one like it, runs it.

    Args:
        dtype: Of the weights as they are multiplied, such as ``bfloat16``.
        device: ``cpu`` or ``cuda``, as torch calls it.
        quantization: As the configuration names it.

    Returns:
        ``exactness`` is ``fast``: the order of sums depends on what else is in the batch.
    """
    isa = torch.backends.cpu.get_cpu_capability() if device == "cpu" else device
    return {
        "exactness": "fast",
        "dtype": dtype,
        "isa": isa,
        "quantization": quantization,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def contract_difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first term in which two contracts differ, as a short text; empty where they are equal."""
    for name in sorted(own.keys() | other.keys()):
        mine, its = own.get(name, "nothing"), other.get(name, "nothing")
        if mine != its:
            return f"{name} is {its} there and {mine} here"
    return ""
