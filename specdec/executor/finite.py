"""Which rows of a step have numbers that are not finite: what such a row has decided, or cached, means nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.executor.steps import StepRows


class FiniteRows:
    """What a runner notes of its newest step.

    Attributes:
        is_finite: Of the newest step, bool [tokens + rows of logits] on a device: whether each token's hidden state,
            and each row's largest logit, are finite numbers. See :meth:`spoilt_rows`.
    """

    def __init__(self) -> None:
        self.is_finite = torch.ones(0, dtype=torch.bool)
        self._counts: tuple[NDArray[np.int64], ...] = ()  # tokens, and rows of logits, of each row of the newest step
        self._finite_tokens: torch.Tensor | None = None

    @property
    def flag_rows(self) -> NDArray[np.int64]:
        """The row of the newest step that each of :attr:`is_finite` is of."""
        number = np.arange(len(self._counts[0]))
        return np.concatenate([number.repeat(counts) for counts in self._counts])

    def spoilt_rows(self, is_finite: NDArray[np.bool_] | None = None) -> tuple[int, ...]:
        """Rows of the newest step of which something is not finite, by index, in order.

        Their logits mean nothing, and nothing of what they cached may be reused.

        Args:
            is_finite: That attribute on the host; by default it is downloaded.
        """
        flags = self.is_finite.cpu().numpy() if is_finite is None else is_finite
        return () if flags.all() else tuple(np.unique(self.flag_rows[~flags]).tolist())

    def finite(self, logits: torch.Tensor) -> torch.Tensor:
        """The newest step's logits with 0 in rows of which the largest is not finite."""
        flags = self.is_finite[len(self.is_finite) - len(logits) :]
        return (
            logits
            if flags.device.type == "cpu" and flags.all()
            else logits.masked_fill(~flags.to(logits.device).unsqueeze(1), 0.0)
        )

    def _note_finite(self, own: StepRows, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep which tokens, and which rows of logits, are finite."""
        self.is_finite = torch.cat((tokens, logits.to(tokens.device)))
        self._counts = own.num_tokens, own.num_logits

    def _note_finite_tokens(self, _module: object, _inputs: object, output: Any) -> None:
        """After the last layer: which of the step's tokens have a finite hidden state, bool [N]."""
        self._finite_tokens = output[0][0].isfinite().all(-1)
