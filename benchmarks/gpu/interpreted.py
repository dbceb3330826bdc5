"""Triton's interpreter, in which kernels run on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"
"""Set before Triton is imported."""


def prepare_interpreter() -> None:
    """Have Triton 3.6's interpreter run with numpy 2.4, and multiply as a GPU does.

    numpy 2.4 makes no number of an array with one entry, which the interpreter counts on in ``range``. A library's
    product may sum a row in another order when the row lies elsewhere in a tile.
    """
    importlib.import_module("torch").set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(_: Any, a: Any, b: Any, added: Any, *_options: object) -> Any:
        product = np.einsum("ik,kj->ij", a.data, b.data, dtype=np.float64)
        return interpreter.TensorHandle(product.astype(added.data.dtype) + added.data, added.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
