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

import pytest

from benchmarks.gpu.interpreted import VARIABLE, prepare_interpreter

_prepare = functools.cache(prepare_interpreter)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _run(module: str, function: str, arguments: dict) -> None:
    _prepare()
    getattr(importlib.import_module(module), function).__wrapped__(**arguments)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test, whose arguments can be sent, in the interpreter's process."""
    pytest.importorskip("triton")

    @functools.wraps(test)
    def wrapper(**arguments: object) -> None:
        if os.environ.get(VARIABLE):
            return test(**arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, "1")  # the process starts with the first call
            running = _process().submit(_run, test.__module__, test.__name__, arguments)
        return running.result()

    return wrapper
