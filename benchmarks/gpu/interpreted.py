"""Triton's interpreter, in which kernels run on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

VARIABLE = "TRITON_INTERPRET"
"""Set before Triton is imported."""


def prepare_interpreter() -> None:
    """numpy 2.4 makes no number of an array with one entry, which triton 3.6's interpreter counts on in ``range``."""
    importlib.import_module("torch").set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
