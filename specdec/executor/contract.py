"""What a token's logits depend on beside the model and the tokens before it: the numeric contract."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

from specdec.models.loading import LoadedModel

Contract = dict[str, str]

STRICT_VERSION = 2
"""Counts what changes bits of ``exactness: strict``: shapes of passes and of attention, the order of sums."""


def numeric_contract(
    dtype: str, device: str, quantization: str = "none", strict_tile_tokens: int | None = None
) -> Contract:
    """The contract of a model as this process, or one like it, runs it.

    Args:
        dtype: Of the weights as they are multiplied, such as ``bfloat16``.
        device: As torch calls it, such as ``cuda:0``.
        quantization: As the configuration names it.
        strict_tile_tokens: With ``exactness: strict``, the tokens of a pass; 0 for whole steps.

    Returns:
        Where ``exactness`` is ``fast`` the order of sums depends on what else is in the batch.
    """
    passes = f"{strict_tile_tokens} tokens a pass" if strict_tile_tokens else "whole steps"
    strict = f"strict {STRICT_VERSION}, {passes}"
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
    kind = device.partition(":")[0]
    return f"{kind} {torch.cuda.get_device_name(device)}" if torch.cuda.is_available() else kind


def loaded_contract(loaded: LoadedModel, quantization: str = "none", strict_tile_tokens: int | None = None) -> Contract:
    """The contract of a model as it was loaded; see :func:`numeric_contract`."""
    dtype = str(loaded.dtype).removeprefix("torch.")
    return numeric_contract(dtype, str(loaded.device), quantization, strict_tile_tokens)


def contract_text(contract: Contract) -> str:
    """A contract as targets name it: equal for equal ones alone."""
    return json.dumps(contract, sort_keys=True)
