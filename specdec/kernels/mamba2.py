"""Mamba-2: a state per head with a scalar decay.

S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: Dao and Gu 2024, "Transformers are SSMs", section 2.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional

from specdec.core.errors import ModelLoadError
from specdec.kernels.scan import Scan, Stock, Tensors, without


class Mamba2(Scan):
    """Inputs: x [B, T, H, P], final time steps [B, T, H], B [B, T, G, S]. Reads: C, shaped like B. State: [H, P, S]."""

    def __init__(
        self,
        stock: Stock,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        chunk_size: int,
        *,
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> None:
        if z is not None:
            raise ModelLoadError("a Mamba-2 scan with a gate inside is not supported")
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = functional.softplus(dt)
        self._stock, self._rates, self._skip, self._chunk_size = stock, A, D, chunk_size
        self.inputs = (hidden_states, dt.clamp(*dt_limit), B)
        self.reads = (C,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[H, P, S]."""
        x, _, b = self.inputs
        return x.shape[2], x.shape[3], b.shape[3]

    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the modelling module's own function, in chunks."""
        outputs, state = self._chunked(self._stock, inputs, reads[0], state, self._chunk_size, self._skip)
        return outputs, state

    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In one chunk, by transformers' own function: few tokens gain nothing from a kernel."""
        scan = inspect.unwrap(self._stock)
        return self._chunked(scan, inputs, reads[0], state, inputs[0].shape[1], self._skip)

    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """Time does not pass."""
        x, dt, b = inputs
        return x, without(dt, is_padding), b

    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [1, N, H, P]."""
        return outputs, outputs.new_empty(0)

    def _chunked(
        self,
        scan: Stock,
        inputs: Tensors,
        c: torch.Tensor,
        state: torch.Tensor,
        chunk_size: int,
        skip: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b = inputs
        outputs, state = scan(
            x, dt, self._rates, b, c, chunk_size=chunk_size, D=skip, initial_states=state, return_final_states=True
        )
        return outputs, state
