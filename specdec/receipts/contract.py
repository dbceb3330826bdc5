"""What a token's logits depend on beside the model and the tokens before it: the numeric contract."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

Contract = dict[str, str]

STRICT_VERSION = 1
"""Counts what changes bits of ``exactness: strict``: shapes of passes and of attention, the order of sums."""


def numeric_contract(
    dtype: str, device: str, quantization: str = "none", strict_tile_tokens: int | None = None
) -> Contract:
    """The contract of a model as this process, or one like it, runs it.

    Args:
        dtype: Of the weights as they are multiplied, such as ``bfloat16``.
        device: ``cpu`` or ``cuda``, as torch calls it.
        quantization: As the configuration names it.
        strict_tile_tokens: With ``exactness: strict``, the tokens of a pass.

    Returns:
        Where ``exactness`` is ``fast`` the order of sums depends on what else is in the batch.
    """
    strict = f"strict {STRICT_VERSION}, {strict_tile_tokens} tokens a pass"
    return {
        "exactness": "fast" if strict_tile_tokens is None else strict,
        "dtype": dtype,
        "isa": _cpu() if device == "cpu" else _gpu(device),
        "quantization": quantization,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _cpu() -> str:
    """The instructions that products are chosen by, and who has made the processor: libraries ask for both."""
    amx = " AMX" if torch.cpu._is_amx_tile_supported() else ""
    vendor = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        vendor = next((f" {line.split(':')[1].strip()}" for line in lines if line.startswith("vendor_id")), "")
    return f"{torch.backends.cpu.get_cpu_capability()}{amx}{vendor}"


def _gpu(device: str) -> str:
    return f"{device} {torch.cuda.get_device_name()}" if torch.cuda.is_available() else device


def contract_difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first term in which two contracts differ, as a short text; empty where they are equal."""
    for name in sorted(own.keys() | other.keys()):
        mine, its = own.get(name, "nothing"), other.get(name, "nothing")
        if mine != its:
            return f"{name} is {its} there and {mine} here"
    return ""
