"""Logits processors that tests name by their import strings."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sampling.rows import RowGroup

NEWLINE = 201
"""The demo pair's token."""
TABLE = {"newline": NEWLINE}


class Forbid:
    """Never chooses one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, groups: Sequence[RowGroup], logits: Tensor) -> None:
        logits[:, self._token] = -torch.inf


no_newline = Forbid(NEWLINE)
no_a = Forbid(1)
