"""Triton kernels compiled for GPUs that are not there, from the very launches that a GPU would get."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_PRODUCTS = {
    "tcgen05": r"tcgen05\.mma",
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
}


@dataclass
class Compiled:
    """What became of a kernel for one launch or several.

    Attributes:
        products: The kinds of matrix instructions in it.
        waits: How many groups of loads may still be under way where it waits for some.
        contracted: Products and sums in one instruction, outside of matrix instructions.
    """

    name: str
    ptx: str = field(repr=False)
    registers: int
    spilled_bytes: int
    shared_bytes: int
    products: list[str]
    waits: set[int]
    contracted: int


@contextmanager
def compiled_for(capability: int) -> Iterator[list[CompiledKernel]]:
    """Kernels are compiled where they would be launched, for meta tensors; each version is listed once."""
    versions: dict[str, CompiledKernel] = {}
    run = JITFunction.run

    def compile_alone(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in versions:
            versions[kernel.hash] = kernel
            found.append(kernel)

    found: list[CompiledKernel] = []
    with _gpu(capability, capability) as patch:
        patch.setattr(JITFunction, "run", compile_alone)
        yield found


@contextmanager
def versions_for(capability: int) -> Iterator[set[tuple[str, str]]]:
    """The versions of kernels that would be compiled where they are launched: their names and keys."""
    found: set[tuple[str, str]] = set()
    run = JITFunction.run

    def take(self: JITFunction, key: str, *_: object) -> None:
        found.add((self.fn.__name__, key))

    def bind(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    with _gpu(capability, object()) as patch:  # of a device that has none yet
        patch.setattr(JITFunction, "_do_compile", take)
        patch.setattr(JITFunction, "run", bind)
        yield found


@contextmanager
def _gpu(capability: int, device: object) -> Iterator[pytest.MonkeyPatch]:
    fake = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", fake)
        yield patch


def examined(kernel: CompiledKernel, capability: int) -> Compiled:
    """What ptxas says of a kernel."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arguments = ["-v", f"-arch={sm_arch_from_capability(capability)}", file.name, "-o", "/dev/null"]
        said = subprocess.run(
            [get_ptxas(capability).path, *arguments], capture_output=True, text=True, check=True, timeout=300
        ).stderr
    (registers,), spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    return Compiled(
        kernel.name,
        ptx,
        int(registers),
        sum(map(int, spilled)),
        kernel.metadata.shared,
        [name for name, pattern in _PRODUCTS.items() if re.search(pattern, ptx)],
        {int(count, 0) for count in re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx)},
        len(re.findall(r"\bfma\.rn\.f32", ptx)),
    )
