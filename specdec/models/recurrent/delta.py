"""The gated delta rule, with one decay per head or one per key channel (Kimi's).

S_t = d_t S_{t-1} + beta_t k_t (v_t - (d_t S_{t-1})^T k_t)^T, o_t = S_t^T q_t, with the decay d_t in (0, 1]:
Yang et al. 2024, "Gated Delta Networks", section 3; per channel: Kimi Team 2025, "Kimi Linear", section 3.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from specdec.models.recurrent.scan import Scan, Steps, Stock, Tensors, without


class DeltaRule(Scan):
    """Inputs: keys [B, T, H_k, D_k], values [B, T, H_v, D_v], log decays [B, T, H_v (, D_k)], betas [B, T, H_v].

    Reads: queries, shaped like keys. State: [H_v, D_k, D_v].
    """

    def __init__(
        self,
        stock: Stock,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> None:
        self._stock = stock
        self._is_normalized = use_qk_l2norm_in_kernel
        self.inputs = (key, value, g, beta)
        self.reads = (query,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[H_v, D_k, D_v]."""
        key, value, *_ = self.inputs
        return value.shape[2], key.shape[3], value.shape[3]

    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the modelling module's own function, in chunks."""
        key, value, decay, beta = inputs
        outputs, state = self._stock(
            reads[0],
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self._is_normalized,
        )
        return outputs, state

    def steps(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> Steps:
        """In float32, as the stock function for single tokens does it."""
        key, value, decay, beta = inputs
        query, dtype = reads[0], value.dtype
        keys, queries = self._prepare(key, value), self._prepare(query, value) * query.shape[-1] ** -0.5
        values, betas = value.float(), beta.float().unsqueeze(-1)
        kept = decay.float().exp()
        kept = kept.unsqueeze(-1) if decay.ndim == 4 else kept[..., None, None]
        for t in range(key.shape[1]):
            k = keys[:, t].unsqueeze(-1)
            state = state * kept[:, t]
            change = (values[:, t] - (state * k).sum(dim=-2)) * betas[:, t]
            state = state + k * change.unsqueeze(-2)
            yield (state * queries[:, t].unsqueeze(-1)).sum(dim=-2).to(dtype), state

    def advance(self, inputs: Tensors, state: torch.Tensor) -> torch.Tensor:
        """In one chunk, by transformers' own function: few tokens gain nothing from a kernel."""
        key, value, decay, beta = inputs
        reference = inspect.unwrap(self._stock)
        options = {"chunk_size": key.shape[1], "use_qk_l2norm_in_kernel": self._is_normalized}
        _, state = reference(key, key, value, decay, beta, initial_state=state, output_final_state=True, **options)
        return state

    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """No decay and no learning."""
        key, value, decay, beta = inputs
        return key, value, without(decay, is_padding), without(beta, is_padding)

    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [1, N, H_v, D_v]."""
        return outputs, outputs.new_empty(0)

    def _prepare(self, vectors: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keys or queries as float32, normalized if the model wants that, one per value head."""
        vectors = vectors.float()
        if self._is_normalized:
            vectors = vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)
        num_sharing = value.shape[2] // vectors.shape[2]
        return vectors if num_sharing == 1 else vectors.repeat_interleave(num_sharing, dim=2)
