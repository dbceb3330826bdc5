"""Mamba-1: a state per channel with a decay per channel and state dimension.

S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: Gu and Dao 2023, "Mamba", section 3. The stock scan
begins with a state of zeros whatever came before, so it is not used.

Mamba-2: a state per head with a scalar decay.

S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: Dao and Gu 2024, "Transformers are SSMs", section 2.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional

from specdec.core.errors import ModelLoadError
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
