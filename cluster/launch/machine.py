"""What this machine is: versions, devices, memory. Plain data."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import psutil

import specdec
from specdec.models.host_memory import host_memory

PACKAGES = ("torch", "transformers", "accelerate", "ray", "pydantic")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As its driver calls it.
        total_bytes: Its memory.
        free_bytes: What of it nobody holds now.
    """

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What specdec finds here.

    Attributes:
        versions: By package, Python included.
        num_cpus: Cores this process may use.
        total_bytes: The machine's memory, or this process's limit where that is lower.
        free_bytes: What of it can still be had.
        has_limit: Whether ``total_bytes`` is a limit on this process, as a container has one.
        gpus: In the order of CUDA's device numbers.
    """

    versions: dict[str, str]
    num_cpus: int
    total_bytes: int
    free_bytes: int
    gpus: tuple[Gpu, ...]
    has_limit: bool = False


def this_machine() -> Hardware:
    """Look at this machine; imports torch."""
    import torch

    memory = host_memory()
    versions = {"python": platform.python_version(), "specdec": specdec.__version__}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    gpus = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    process = psutil.Process()
    num_cpus = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count()
    return Hardware(
        versions, num_cpus, memory.total_bytes, memory.free_bytes, tuple(gpus), memory.limit_bytes is not None
    )
