"""SHA-256 of whole files; that of a large file is kept, so that a restart does not read it again."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

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
