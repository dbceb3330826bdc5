"""Tests of Triton kernels without a GPU: in a process of their own, in which Triton interprets kernels.

Triton reads the environment when it is imported, and other tests of this process may have imported it.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

_NAME = "TRITON_INTERPRET"


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


@functools.cache
def _prepare() -> None:
    """numpy 2.4 makes no number of an array with one entry, which triton 3.6's interpreter counts on in ``range``."""
    importlib.import_module("torch").set_num_threads(1)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _run(module: str, function: str, arguments: dict) -> None:
    _prepare()
    getattr(importlib.import_module(module), function).__wrapped__(**arguments)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test, whose arguments can be sent, in the interpreter's process."""
    pytest.importorskip("triton")

    @functools.wraps(test)
    def wrapper(**arguments: object) -> None:
        if os.environ.get(_NAME):
            return test(**arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(_NAME, "1")  # the process starts with the first call
            running = _process().submit(_run, test.__module__, test.__name__, arguments)
        return running.result()

    return wrapper
