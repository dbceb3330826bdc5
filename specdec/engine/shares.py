"""Which part of a GPU is a model's, where several models share it; nothing heavy is imported here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.models.loading import ModelSource


def equal_share(available: float, num_workers: int) -> float:
    """What each of ``num_workers`` gets of a number of equal devices: one, or a fraction such that all find a place.

    Several workers share a device, but no worker spans two: with three devices for four workers each gets a half.
    """
    whole = math.floor(available)
    if whole < 1:
        return 0.0
    return 1.0 if whole >= num_workers else 1.0 / math.ceil(num_workers / whole)


def on_one_gpu(target: ModelSource, draft: ModelSource | None) -> bool:
    """Whether a pair that is loaded into one process would meet on a GPU, should the process have any.

    A model spread by a device map may be on every GPU.
    """
    if draft is None or any(one.device == "cpu" or one.engine == "openvino" for one in (target, draft)):
        return False
    return bool(target.device_map or draft.device_map) or _gpu(target.device) == _gpu(draft.device)


def _gpu(device: str) -> str:
    return "cuda:0" if device in ("auto", "cuda") else device
