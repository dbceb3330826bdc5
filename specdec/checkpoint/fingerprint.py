"""What decides a model's tokens, as short texts: processes of other fingerprints serve other models.

Nothing here imports torch, so that a process without a model can tell which model it speaks of.

SHA-256 of whole files; that of a large file is kept, so that a restart does not read it again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

from specdec.checkpoint.weight_files import check_weight_files
from specdec.core.errors import ModelLoadError, ServiceUnavailableError
from specdec.core.types import Adapter

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/specdec/hashes")
"""Where hashes are kept, one small file each."""
MIN_KEPT_BYTES = 64 << 20
"""A smaller file is hashed every time: that takes some 40 ms at most."""
_NUM_THREADS = 4
_NUM_DIGITS = 64


def file_hashes(files: Iterable[Path], cache: Path = CACHE) -> dict[str, str]:
    """SHA-256 of each file's content, by the file's name.

    Hashes are kept by device, inode, size, and times of the last change. Of several processes that want one file's
    hash at once, one reads it and the others wait.

    Args:
        files: No two of the same name.
        cache: Folder for the hashes; where it cannot be written nothing is kept.

    Raises:
        OSError: A file cannot be read.
    """
    listed = list(files)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        hashes = list(threads.map(lambda file: _file_hash(file, cache.expanduser()), listed))
    return {file.name: found for file, found in zip(listed, hashes, strict=True)}


def _file_hash(file: Path, cache: Path) -> str:
    status = file.stat()
    if status.st_size < MIN_KEPT_BYTES:
        return _read(file)
    entry = cache / hashlib.sha256(repr(_identity(status)).encode()).hexdigest()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(entry, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        logger.info("The hash of %s is not kept: %s", file, error)
        return _read(file)
    with open(descriptor, "r+b", buffering=0) as kept:
        with suppress(OSError):  # some network file systems have no locks: then two processes may read one file
            fcntl.flock(kept, fcntl.LOCK_EX)
        known = kept.read().decode("ascii", "replace")
        if len(known) == _NUM_DIGITS:
            return known
        found = _read(file)
        if _identity(file.stat()) == _identity(status):  # else it was written to meanwhile
            try:
                os.ftruncate(kept.fileno(), 0)
                os.pwrite(kept.fileno(), found.encode(), 0)
            except OSError as error:
                logger.info("The hash of %s is not kept: %s", file, error)
        return found


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file's content does. A restored mtime does not hide a change: ctime cannot be set."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a LoRA checkpoint."""
_CONFIGURATION = ("config.json", "generation_config.json", ADAPTER_CONFIG, "*quant*_config.json")
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_DIGITS = 16


def digest(parts: Mapping[str, Any]) -> str:
    """A short text that differs where any part differs; the parts are what JSON can hold."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def model_fingerprint(path: str, revision: str | None = None, token: str | None = None) -> str:
    """What a model is: of a local folder its content, never its name or age; of a hub id the commit.

    Every byte of the weights counts. The hashes of large files are kept: see :mod:`specdec.checkpoint.fingerprint`.

    Args:
        path: Hub id or local folder.
        revision: Branch, tag or commit on the hub; None is the default branch.
        token: Hub token for gated models.

    Raises:
        ModelLoadError: It cannot be found or read, or a file of weights is missing or damaged.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return digest({"hub": path, "commit": _cached_folder(path, revision, token).name})
    try:
        check_weight_files(folder)
        files = file_hashes(_found(folder, _CONFIGURATION + _TOKENIZER + _WEIGHTS))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the fingerprint of {path} cannot be taken: {error}") from error
    return digest(files)


def weights_hash(path: str, revision: str | None = None, token: str | None = None) -> str:
    """Hash a model's weights and their configuration.

    Of a local folder ``sha256:`` and the SHA-256 of all names and files' hashes; of a hub id ``hub:ID@COMMIT``. Takes
    and raises what :func:`model_fingerprint` does.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return f"hub:{path}@{_cached_folder(path, revision, token).name}"
    try:
        check_weight_files(folder)
        weights = file_hashes(_found(folder, ("config.json", "*quant*_config.json", *_WEIGHTS)))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"the hashes of {path} cannot be taken: {error}") from error
    return f"sha256:{hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()}"


def adapter_folder(path: str) -> Path:
    """The folder of a LoRA checkpoint, downloaded if need be; takes and raises what :func:`adapter_reference` does."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelLoadError(f"there is no folder {path}")
    name, _, revision = path.partition("@")
    _get(name, ADAPTER_WEIGHTS, revision or None, None)
    return _cached_folder(name, revision or None, None, ADAPTER_CONFIG)


def adapter_reference(name: str, path: str) -> Adapter:
    """An adapter as sequences name it, by all that its checkpoint holds now.

    Args:
        name: By which requests ask for it.
        path: Local folder, or hub id, with ``@`` and a branch, tag or commit where that counts. The reference has the
            commit: a later one is another adapter, and a worker whose cache has this one does not ask the hub.

    Raises:
        ModelLoadError: It cannot be found or read.
    """
    folder = adapter_folder(path)
    try:
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (folder / file).is_file():
                raise ModelLoadError(f"the adapter {path} has no {file}")
        with (folder / ADAPTER_CONFIG).open("rb") as config, (folder / ADAPTER_WEIGHTS).open("rb") as weights:
            fingerprint = adapter_fingerprint(config, weights)
    except OSError as error:
        raise ModelLoadError(f"the adapter {path} cannot be read: {error}") from error
    is_local = Path(path).expanduser().is_dir()
    found = str(folder.resolve()) if is_local else f"{path.partition('@')[0]}@{folder.name}"
    return Adapter(name, found, fingerprint)


def adapter_fingerprint(config: BufferedIOBase, weights: BufferedIOBase) -> str:
    """Of the bytes of an adapter's two files."""
    files = {ADAPTER_CONFIG: config, ADAPTER_WEIGHTS: weights}
    return digest({name: hashlib.file_digest(file, "sha256").hexdigest() for name, file in files.items()})


def vocabulary_fingerprint(path: str, revision: str | None = None, token: str | None = None) -> str:
    """What a model's token ids mean: the same for all models that share a vocabulary.

    Where there is no ``tokenizer.json``, all files of the tokenizer count. Takes and raises what
    :func:`model_fingerprint` does.
    """
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            folder = _cached_folder(path, revision, token, "tokenizer_config.json")
            _get(path, "tokenizer.json", revision, token)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return digest(file_hashes(_found(folder, _TOKENIZER)))
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        added = sorted((entry["id"], entry["content"]) for entry in tokenizer.get("added_tokens") or ())
        return digest({"vocabulary": tokenizer["model"]["vocab"], "added": added})
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"the vocabulary of {path} cannot be read: {error}") from error


_OPTIONAL = {
    "torchao": ("quantization needs torchao", "quantization"),
    "openvino": ("engine: openvino needs OpenVINO", "openvino"),
}
"""Packages that not everybody has: what needs each, and the extra that brings it."""


def optional_version(package: Literal["torchao", "openvino"]) -> str:
    """The version of a package that an extra brings.

    Raises:
        ModelLoadError: It is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        needs, extra = _OPTIONAL[package]
        raise ModelLoadError(f"{needs}: pip install 'specdec-serve[{extra}]'") from None


def _found(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _cached_folder(name: str, revision: str | None, token: str | None, file: str = "config.json") -> Path:
    """The folder of the hub's cache that holds a model's files; its name is the commit."""
    found = _get(name, file, revision, token)
    if found is None:
        raise ModelLoadError(f"{name} has no {file}")
    return found.parent


def _get(name: str, file: str, revision: str | None, token: str | None) -> Path | None:
    """A file of a model on the hub, from its cache where that is current; None where the model has none.

    Raises:
        ModelLoadError: The hub cannot be reached, or has no such model.
        ServiceUnavailableError: The cache cannot be written: its disk is full, say.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, revision=revision, token=token))
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(f"{file} of {name} is not in the hub's cache, and the hub does not answer") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # a lost connection is the HTTP client's own kind of error
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise ServiceUnavailableError(f"{name} cannot be kept in the hub's cache here: {reason}") from error
        raise ModelLoadError(f"{name} cannot be found on the hub: {reason}") from error
