"""What transformers tells developers, kept from users."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

Bar = Callable[[Any, Any, Any], Any]
"""What stands in for transformers' progress bars; see its ``set_tqdm_hook``."""

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def quiet(bar: Bar | None = None) -> Iterator[None]:
    """Keep transformers' progress bars and its warnings to developers from the user, for a while.

    The bars of downloads are huggingface_hub's, and stay: ``disable_progress_bar`` would take them too. One thread at a
    time is in here: what is set is the process's, and so is torch's default dtype, which transformers sets while it
    makes a model. A thread that came second and left last would put back what the first had set.

    Args:
        bar: In the place of transformers' bars.
    """
    with _ONE_AT_A_TIME:
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        hook = transformers_logging.set_tqdm_hook(bar or no_bar)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            transformers_logging.set_tqdm_hook(hook)


def no_bar(_: Any, args: Any, kwargs: Any) -> Any:
    """No bar; see :data:`Bar`."""
    return transformers_logging.EmptyTqdm(*args, **kwargs)
