"""Safetensors files: what their headers say, and whether a file is whole. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path

from specdec.core.errors import ModelLoadError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's only file of weights, or the list of its shards."""
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format allows no larger header."""
_SIZE_BYTES = 8
_AGAIN = ": download or copy it again"


def local_folder(path: str, revision: str | None = None) -> Path | None:
    """The folder that holds a model's files: a local one, or the hub's cache; None where it is not downloaded yet."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def tensor_bytes(file: Path) -> dict[str, int]:
    """Bytes of each tensor in a safetensors file, by its name. Only the header is read.

    Raises:
        ModelLoadError: The file is empty, cut off, longer than its header says, or not a safetensors file.
    """
    length = file.stat().st_size
    if not length:
        raise ModelLoadError(f"{file} is empty{_AGAIN}")
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(_SIZE_BYTES), "little")
        header = opened.read(min(header_bytes, _MAX_HEADER_BYTES))
    if header_bytes > _MAX_HEADER_BYTES or not header.startswith(b"{"):
        raise ModelLoadError(f"{file} is not a safetensors file")
    data_start = _SIZE_BYTES + header_bytes
    if length < data_start:
        raise ModelLoadError(f"{file} is cut off: it has {length:,} bytes, and its header alone {data_start:,}{_AGAIN}")
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        offsets = {name: tuple(map(int, entry["data_offsets"])) for name, entry in entries.items()}
        sizes = {name: end - start for name, (start, end) in offsets.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is not a safetensors file") from error
    expected = data_start + max((end for _, end in offsets.values()), default=0)
    if length < expected:
        raise ModelLoadError(f"{file} is cut off: it has {length:,} of {expected:,} bytes{_AGAIN}")
    if length > expected:
        raise ModelLoadError(
            f"{file} is damaged: it has {length:,} bytes, but its header describes {expected:,}{_AGAIN}"
        )
    return sizes


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights: the one file, or all shards that the index names.

    Raises:
        ModelLoadError: There is neither, the index cannot be read, or a shard is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        raise ModelLoadError(f"{folder} has neither {WEIGHTS} nor {INDEX}; other formats are not read")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not an index of safetensors files") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(names)} files that {INDEX} names, such as {missing[0]}{_AGAIN}"
        )
    return [folder / name for name in names]


def check_weight_files(folder: Path) -> None:
    """Refuse a model whose files of weights are incomplete. Only headers are read.

    Raises:
        ModelLoadError: A file is missing or damaged; the message names it.
    """
    try:
        for file in weight_files(folder):
            tensor_bytes(file)
    except OSError as error:
        raise ModelLoadError(f"the weights in {folder} cannot be read: {error}") from error
