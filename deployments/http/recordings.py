"""A folder of recordings: answers of a service, kept to replay them, and to try and train drafts on them."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import BoundedSemaphore

from cluster.config.limits import Recordings
from specdec.audition.recording import Sample, line_of

_logger = logging.getLogger("ray.serve")

ALL = "*"
_PREFIX = "recording-"
_NUM_PARTS = 8
"""A file is closed at this share of the bound, so that the bound is kept by deleting whole files."""
_MOST_WAITING = 256
_WARN_EVERY_S = 60.0


class RecordingFolder:
    """Appends samples to files of its own, one a day at least, in a folder that several replicas may share.

    A thread writes. A sample that cannot be written is lost and reported in the log: no answer waits or fails for it.

    Args:
        name: Of this replica, unique in the folder.
    """

    def __init__(self, name: str) -> None:
        self._name = "".join(letter if letter.isalnum() else "-" for letter in name)
        self._settings = Recordings()
        self._path: Path | None = None
        self._day = ""
        self._room = BoundedSemaphore(_MOST_WAITING)
        self._writer = ThreadPoolExecutor(1, "recordings")
        self._warned_s = float("-inf")

    def set(self, settings: Recordings) -> None:
        """Write by these settings from now on; without a folder, nothing."""
        self._settings = settings

    def keeps(self, owner: str) -> bool:
        """Whether answers to the API key of that name are recorded."""
        owners = self._settings.owners
        return ALL in owners or (bool(owner) and owner in owners)

    def add(self, sample: Sample) -> None:
        """Have a sample written; returns at once."""
        if not self._room.acquire(blocking=False):
            self._warn("recordings are lost: the disk of recordings.folder is too slow")
            return
        self._writer.submit(self._write, sample, self._settings)

    def close(self) -> None:
        """Return when everything is written."""
        self._writer.shutdown(wait=True)

    def _write(self, sample: Sample, settings: Recordings) -> None:
        try:
            if settings.folder is not None:
                self._append(line_of(sample) + b"\n", Path(settings.folder).expanduser(), settings.max_bytes)
        except OSError as error:
            self._path = None  # it may end in half a line
            self._warn(f"recordings are lost: {error}")
        finally:
            self._room.release()

    def _append(self, line: bytes, folder: Path, max_bytes: int) -> None:
        path, day = self._path, _today()
        is_new = path is None or path.parent != folder or not path.exists() or day != self._day
        if path is None or is_new or path.stat().st_size + len(line) > max_bytes // _NUM_PARTS:
            folder.mkdir(parents=True, exist_ok=True)
            path = self._path = folder / f"{_PREFIX}{self._name}-{time.time_ns()}.jsonl"
            self._day = day
            _drop_oldest(folder, max_bytes - max_bytes // _NUM_PARTS)
        with open(path, "ab", opener=_private) as file:
            file.write(line)

    def _warn(self, text: str) -> None:
        if time.monotonic() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _logger.warning(text)


def _today() -> str:
    return time.strftime("%F", time.gmtime())


def _private(path: str, flags: int) -> int:
    """Open a file that its owner alone may read: it holds users' texts."""
    return os.open(path, flags, 0o600)


def _drop_oldest(folder: Path, max_bytes: int) -> None:
    """Delete the recordings written least recently until the others have at most so many bytes."""
    found = []
    for path in folder.glob(f"{_PREFIX}*.jsonl"):
        with suppress(FileNotFoundError):  # another replica has just deleted it
            found.append((path.stat(), path))
    found.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
    num_bytes = 0
    for status, path in found:
        num_bytes += status.st_size
        if num_bytes > max_bytes:
            path.unlink(missing_ok=True)
