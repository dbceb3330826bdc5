"""Where CUDA graphs were proven: a file for each GPU and pair of versions on which ``benchmarks.gpu`` has passed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import torch


def record_name(device: torch.device) -> str:
    """The name of a GPU's record: its compute capability, and the versions of what makes its graphs.

    Raises:
        PackageNotFoundError: there is no Triton.
    """
    major, minor = torch.cuda.get_device_capability(device)
    versions = (f"{name}-{version(name).partition('+')[0]}" for name in ("torch", "triton", "transformers"))
    return f"{major}.{minor}-{'-'.join(versions)}.json"


def has_record(device: torch.device) -> bool:
    """Whether graphs have been proven on such a device."""
    if device.type != "cuda":
        return False
    try:
        return files(__name__).joinpath(record_name(device)).is_file()
    except PackageNotFoundError:
        return False
