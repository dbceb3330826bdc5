"""Which errors leave a device unusable: a step may be tried again after any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.core.errors import DeviceLostError

_NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
"""What PyTorch, drivers and libraries (cuBLAS for its workspace) say in errors that have no type of their own."""


def is_device_lost(error: BaseException) -> bool:
    """Whether every later call of the device fails too, as after a device assert; not after running out of memory."""
    if is_out_of_memory(error):
        return False
    # Triton raises a plain RuntimeError for what the driver says.
    is_told = any(told in str(error) for told in ("device-side assert", "Triton Error [CUDA]"))
    return is_told or isinstance(error, torch.AcceleratorError | DeviceLostError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that there is none of, on a GPU or a CPU: a smaller step may fit."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(told in text for told in _NO_MEMORY)
    )


@contextmanager
def device_losses() -> Iterator[None]:
    """Around a step of a model.

    Raises:
        DeviceLostError: In place of the error, if that has left the device unusable.
    """
    try:
        yield
    except Exception as error:
        if is_device_lost(error) and not isinstance(error, DeviceLostError):
            raise DeviceLostError(f"the device can no longer be used: {error}") from error
        raise
