"""How much of a model's weights is loaded: told while transformers loads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specdec.checkpoint.weight_files import local_folder, tensor_bytes

EVERY_S = 2.0
BAR = "Loading weights"
"""What transformers calls its bar over the weights."""


def weights_bytes(path: str, revision: str | None = None) -> dict[str, int]:
    """Bytes of each tensor in a model's safetensors files, by its name there; only their headers are read.

    Args:
        path: Local folder, or hub id whose files are in the hub's cache; nothing is downloaded.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelLoadError: A file is damaged.
    """
    folder = local_folder(path, revision)
    files = [] if folder is None else folder.glob("*.safetensors")
    return {name: size for file in files for name, size in tensor_bytes(file).items()}


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
