"""How much memory this process may take: of its machine, and of the control groups that it runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a machine, or of the tightest limit on the process.

    Attributes:
        total_bytes: The machine's memory, or the limit where that is lower.
        free_bytes: What can be taken now without pushing anything out and without passing a limit.
        limit_bytes: The lowest limit of the process's control groups; None where there is none.
    """

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None = None


class _Files(NamedTuple):
    """How one version of control groups names what it tells.

    Attributes:
        limits: Files with a limit each; past ``memory.high`` a process is slowed to a crawl, so that it is one, too.
        usage: File with the bytes in use, the file cache among them.
        prefix: Of the keys in ``memory.stat`` that count the groups below, too.
        mapped: Key of the file pages that processes have mapped.
    """

    limits: tuple[str, ...]
    usage: str
    prefix: str
    mapped: str


_VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", "mapped_file")
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", "", "file_mapped")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory of this machine that the process may take. On Linux the limits of its control groups count.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    total, free = _machine(root)
    lowest: int | None = None
    for limit, room in _limits(root):
        free = min(free, room)
        if limit < total:
            lowest = limit if lowest is None else min(lowest, limit)
    return HostMemory(total if lowest is None else lowest, max(0, free), lowest)


def _machine(root: Path) -> tuple[int, int]:
    """Total and available bytes. Linux counts caches that it can drop as available, which ``SC_AVPHYS_PAGES`` lacks."""
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        if "MemAvailable" in values:
            return values["MemTotal"], values["MemAvailable"]
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and room of each control group with a limit, from the process's own up to the root's."""
    for folder, top, files in _groups(root):
        for group in (folder, *folder.parents):
            limit = min((value for name in files.limits if (value := _number(group / name)) is not None), default=None)
            used = _number(group / files.usage)
            if limit is not None and used is not None:
                yield limit, limit - max(0, used - _reclaimable(group, files))
            if group == top:
                break


def _groups(root: Path) -> Iterator[tuple[Path, Path, _Files]]:
    """Folders of the process's memory control groups, the top one of each hierarchy, and how their files are named."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths = {controllers: path for _, controllers, path in (entry.split(":", 2) for entry in entries)}
    for mount in mounts:
        # "31 23 0:28 ROOT MOUNT_POINT OPTIONS [TAGS] - TYPE SOURCE SUPER_OPTIONS"; see proc_pid_mountinfo(5).
        left, _, right = mount.partition(" - ")
        mounted, (kind, _, options) = left.split()[3:5], right.split(maxsplit=2)
        if kind == "cgroup2":
            path, files = paths.get(""), _VERSION_2
        elif kind == "cgroup" and "memory" in options.split(","):
            path, files = next((p for names, p in paths.items() if "memory" in names.split(",")), None), _VERSION_1
        else:
            continue
        if path is not None:
            top = root / mounted[1].lstrip("/")
            yield top / _below(path, mounted[0]), top, files


def _below(path: str, mount_root: str) -> PurePosixPath:
    """A group's path below its mount. In a container the mount may begin at the container's own group."""
    try:
        below = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in below.parts else below


def _reclaimable(group: Path, files: _Files) -> int:
    """Bytes of the file cache that nobody has mapped: they give way before anything is refused."""
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(files.prefix + key, 0)) for key in ("inactive_file", "active_file"))
        return max(0, cached - int(stat.get(files.prefix + files.mapped, 0)))
    return 0


def _number(file: Path) -> int | None:
    """A file's number; None where there is no such file, or it says ``max``."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
