"""Linear layers that never split a sum: by the library where a check has shown it, else by an own kernel.

Libraries choose a kernel by the number of rows, and where rows are few some add up parts of a sum apart. Those that do
not give the bits of our kernel, whatever their tiles (measured on an H200). So at each number of rows that steps have,
the library's product is compared with ours once for each shape on each type of GPU. Only where all bits are equal is
it used, and at no other number of rows.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.executor.runner import choose_kernel
from specdec.models.loading import LoadedModel


class UnsplitLinear(nn.Linear):
    """A linear layer.

    Attributes:
        library_rows: Numbers of rows at which the library splits nothing.
    """

    library_rows: Collection[int]

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.Linear``: [.., input width] -> [.., output width]."""
        if input.numel() // self.in_features in self.library_rows:
            return super().forward(input)
        return _product(input, self.weight, self.bias)


def no_unsplit_reason(loaded: LoadedModel) -> str:
    """What keeps whole steps of a model from having the same bits; empty if nothing is known."""
    if loaded.device.type != "cuda":
        return f"whole steps (strict_tile_tokens: 0) need a CUDA GPU, not {loaded.device.type}"
    if choose_kernel(loaded) != "triton":
        return "whole steps (strict_tile_tokens: 0) need the Triton kernel for attention, which does not fit"
    return _other_products(loaded)


def _other_products(loaded: LoadedModel) -> str:
    if loaded.recurrent_layers or loaded.adapters is not None:
        what = "recurrent layers" if loaded.recurrent_layers else "adapters"
        return f"whole steps (strict_tile_tokens: 0) are not strict with {what}: name tokens of a pass"
    for module in loaded.model.modules():
        is_known = isinstance(module, nn.Embedding) or type(module) in (nn.Linear, UnsplitLinear)
        if not is_known and any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            return f"whole steps (strict_tile_tokens: 0) are not strict with a {type(module).__name__}"
    return ""


def use_unsplit_products(loaded: LoadedModel, sizes: Sequence[int], folder: Path | None = None) -> dict[str, list[int]]:
    """Have a model's linear layers split nothing.

    Args:
        loaded: The model; see :func:`no_unsplit_reason`.
        sizes: Numbers of rows at which the library may be used; at others our kernel is.
        folder: Where it is kept what was shown; ``specdec`` in the user's cache by default.

    Returns:
        By shape, the sizes at which the library splits nothing.
    """
    shown: dict[str, dict[str, bool]] = {}
    file = (folder or _cache_folder()) / f"products-{_kind(loaded.device)}.json"
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text())
        shown = kept if isinstance(kept, dict) else {}
    found: dict[str, list[int]] = {}
    num_before = sum(map(len, shown.values()))
    for module in loaded.model.modules():
        if type(module) not in (nn.Linear, UnsplitLinear):
            continue
        name = f"{module.out_features}x{module.in_features} {str(module.weight.dtype).removeprefix('torch.')}"
        name += "" if module.bias is None else " with bias"
        of_shape = shown.setdefault(name, {})
        unknown = [size for size in sizes if str(size) not in of_shape]
        if unknown:
            of_shape |= equal_sizes(module, unknown)
        found[name] = [size for size in sizes if of_shape[str(size)]]
        module.__class__ = UnsplitLinear
        module.library_rows = frozenset(found[name])
    if sum(map(len, shown.values())) > num_before:
        _keep(file, json.dumps(shown, indent=1))
    return found


@torch.inference_mode()
def equal_sizes(linear: nn.Linear, sizes: Sequence[int]) -> dict[str, bool]:
    """Whether the library's product of so many rows has the bits of ours, by the number as a text."""
    generator = torch.Generator(linear.weight.device).manual_seed(0)
    shape = max(sizes), linear.in_features
    rows = torch.randn(shape, generator=generator, device=linear.weight.device).to(linear.weight.dtype)
    ours = _product(rows, linear.weight, linear.bias)
    return {
        str(size): torch.equal(functional.linear(rows[:size], linear.weight, linear.bias), ours[:size])
        for size in sizes
    }


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = importlib.import_module("specdec.kernels.triton.product").product(inputs, weight, bias)
    return output


def _cache_folder() -> Path:
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "specdec"


def _kind(device: torch.device) -> str:
    """Of a device, and of what computes on it, our kernel too, as a file name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kernel = hashlib.sha256((Path(__file__).parents[1] / "kernels/triton/product.py").read_bytes()).hexdigest()[:8]
    computed_by = f"torch-{version('torch')}-triton-{version('triton')}-{kernel}"
    return re.sub(r"[^\w.+-]+", "-", f"{name}-{computed_by}")


def _keep(file: Path, text: str) -> None:
    """Write it whole or not at all; without a folder to write to, it is found out again at the next start."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(file)
