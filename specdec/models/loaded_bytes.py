"""How much of a model's weights is loaded: told while transformers loads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

EVERY_S = 2.0
BAR = "Loading weights"
"""What transformers calls its bar over the weights."""


def weights_bytes(path: str, revision: str | None = None) -> dict[str, int]:
    """Bytes of each tensor in a model's safetensors files, by its name there; only their headers are read.

    Args:
        path: Local folder, or hub id whose files are in the hub's cache; nothing is downloaded.
        revision: Branch, tag or commit on the hub.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(cached, str):
            return {}
        folder = Path(cached).parent
    sizes: dict[str, int] = {}
    for name in folder.glob("*.safetensors"):
        with name.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        sizes |= {tensor: entry["data_offsets"][1] - entry["data_offsets"][0] for tensor, entry in header.items()}
    return sizes


def watched(
    weights: Iterable[tuple[str, Any]],
    sizes: dict[str, int],
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, Any]]:
    """The weights as they are loaded; every two seconds a report says how far that is, as in ``3.1 of 7.5 GB``.

    Args:
        weights: Each with its name in the model; the next is asked for when the one before is loaded.
        sizes: Bytes by name. What has another name in the model, or is put together of several tensors, counts an equal
            share of the rest.
        report: Is given a line.
        clock: Monotonic time in seconds.
    """
    items = list(weights)
    unknown = sum(name not in sizes for name, _ in items)
    known_bytes = sum(sizes.get(name, 0) for name, _ in items)
    total = sum(sizes.values()) if unknown else known_bytes
    share = (total - known_bytes) / unknown if unknown else 0.0
    done, told_s = 0.0, clock()
    for item in items:
        yield item
        done += sizes.get(item[0], share)
        if clock() >= told_s + EVERY_S:
            told_s = clock()
            report(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB")
