"""Mamba-1: a state per channel with a decay per channel and state dimension.

S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: Gu and Dao 2023, "Mamba", section 3. The stock scan
begins with a state of zeros whatever came before, so it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from specdec.kernels.scan import Scan, Stock, Tensors, without


class Mamba1(Scan):
    """Inputs: x [B, T, D], final time steps [B, T, D], B [B, T, S]. Reads: C like B, gates like x. State: [D, S]."""

    def __init__(
        self,
        stock: Stock,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        *,
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> None:
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype).unsqueeze(-1)
        if delta_softplus:
            dt = functional.softplus(dt)
        self._rates, self._skip = A, D
        self.inputs = tuple(value.transpose(1, 2) for value in (hidden_states, dt, B))
        self.reads = tuple(value.transpose(1, 2) for value in ((C,) if z is None else (C, z)))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[D, S]."""
        x, _, b = self.inputs
        return x.shape[2], b.shape[2]

    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token in float32, as the stock function does it where there is no kernel.

        Outputs are read in the dtype of x, as the stock function does.
        """
        x, c = inputs[0], reads[0]
        steps, times, b = (value.float() for value in inputs)
        written = steps * times
        outputs = []
        for t in range(x.shape[1]):
            kept = torch.exp(self._rates * times[:, t].unsqueeze(-1))
            state = (state * kept).addcmul_(written[:, t].unsqueeze(-1), b[:, t].unsqueeze(1))
            output = torch.matmul(state.to(x.dtype), c[:, t].to(x.dtype).unsqueeze(-1)).squeeze(-1)
            if self._skip is not None:
                output = output + x[:, t] * self._skip
            if len(reads) > 1:
                output = output * functional.silu(reads[1][:, t])
            outputs.append(output)
        return torch.stack(outputs, dim=1), state

    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Like :meth:`whole`: a scan is a scan, however few tokens it has."""
        return self.whole(inputs, reads, state)

    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """Time does not pass."""
        x, dt, b = inputs
        return x, without(dt, is_padding), b

    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [1, D, N], as this scan has them."""
        return outputs.transpose(1, 2), outputs.new_empty(0)
