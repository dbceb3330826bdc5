"""Free memory on Linux, told by files that say what a container's files say."""

from pathlib import Path

import pytest

from specdec.models.host_memory import HostMemory, host_memory

MIB = 1 << 20
UNLIMITED = "9223372036854771712"
MEMINFO = {"proc/meminfo": f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\nHugePages_Total: 0\n"}
"""A machine of 8 GiB, 6 GiB of them free."""
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = (
    "33 31 0:30 {root} /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)


def v2(folder: str, limit: int | str, used: int, high: int | str = "max", stat: str = "") -> dict[str, str]:
    files = {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}/{name}": f"{text}\n" for name, text in files.items()}


def v1(folder: str, limit: int | str, used: int, stat: str = "") -> dict[str, str]:
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}/{name}": f"{text}\n" for name, text in files.items()}


def memory_of(root: Path, files: dict[str, str]) -> HostMemory:
    for name, text in (MEMINFO | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return host_memory(root)


def v2_process(path: str, mount_root: str = "/") -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT.format(root=mount_root)}


def v1_process(path: str, mount_root: str = "/") -> dict[str, str]:
    cgroup = f"9:name=systemd:/\n4:memory:{path}\n1:cpu,cpuacct:/\n0::/\n"
    return {"proc/self/cgroup": cgroup, "proc/self/mountinfo": V1_MOUNT.format(root=mount_root)}


CASES = {
    "no control group": ({}, (8192, 6144, None)),
    "v2 without a limit": (v2_process("/a") | v2("a", "max", 5 * MIB), (8192, 6144, None)),
    "v2, a container's own": (v2_process("/") | v2("", 1024 * MIB, 100 * MIB), (1024, 924, 1024)),
    "v2, more used than is allowed": (v2_process("/") | v2("", 100 * MIB, 101 * MIB), (100, 0, 100)),
    "v2, the machine has less left": (v2_process("/") | v2("", 7000 * MIB, 0), (7000, 6144, 7000)),
    "v2, a limit above the machine's": (v2_process("/") | v2("", 9000 * MIB, 0), (8192, 6144, None)),
    "v2, the high mark is the lower": (v2_process("/") | v2("", 1024 * MIB, 0, 512 * MIB), (512, 512, 512)),
    "v2, the parent is the tightest": (
        v2_process("/pod/one") | v2("pod", 1024 * MIB, 900 * MIB) | v2("pod/one", 2048 * MIB, 100 * MIB),
        (1024, 124, 1024),
    ),
    "v2, file cache gives way but what is mapped": (
        v2_process("/")
        | v2(
            "",
            1024 * MIB,
            900 * MIB,
            stat=f"inactive_file {500 * MIB}\nactive_file {100 * MIB}\nfile_mapped {50 * MIB}",
        ),
        (1024, 674, 1024),
    ),
    "v2, the mount begins at the container": (
        v2_process("/docker/abc/below", "/docker/abc") | v2("below", 1024 * MIB, 0),
        (1024, 1024, 1024),
    ),
    "v2, the group is outside the mount": (
        v2_process("/../../elsewhere") | v2("", 1024 * MIB, 0),
        (1024, 1024, 1024),
    ),
    "v1 without a limit": (v1_process("/a") | v1("a", UNLIMITED, 5 * MIB), (8192, 6144, None)),
    "v1, the parent is the tightest": (
        v1_process("/pod/one") | v1("pod", 1024 * MIB, 900 * MIB) | v1("pod/one", UNLIMITED, 100 * MIB),
        (1024, 124, 1024),
    ),
    "v1, file cache gives way": (
        v1_process("/docker/abc", "/docker/abc")
        | v1("", 1024 * MIB, 900 * MIB, f"inactive_file 0\ntotal_inactive_file {300 * MIB}\ntotal_mapped_file {MIB}"),
        (1024, 423, 1024),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_process_may_take(case: str, tmp_path: Path) -> None:
    files, (total, free, limit) = CASES[case]
    assert memory_of(tmp_path, files) == HostMemory(total * MIB, free * MIB, None if limit is None else limit * MIB)


def test_this_machine_has_some() -> None:
    memory = host_memory()
    assert MIB < memory.free_bytes <= memory.total_bytes
