"""A device that has no more memory, told as an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.core.errors import SpecdecError

_ADVICE = " Of the allocated memory"
"""Where torch's message turns from what was asked for and what there is to the settings of its allocator."""
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for CPUs says, in a plain RuntimeError."""


@contextmanager
def allocation(failure: type[SpecdecError], what: str) -> Iterator[None]:
    """Raise ``failure`` where memory is asked for that a device does not have.

    Args:
        failure: Class of the error.
        what: Does not fit, and where: the message begins with it, and goes on with what was asked for.

    Raises:
        SpecdecError: Of the class ``failure``.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _NO_MEMORY not in str(error):
            raise
        asked_for = " ".join(str(error).split()).partition(_ADVICE)[0]
        raise failure(f"{what}: {asked_for}") from error
