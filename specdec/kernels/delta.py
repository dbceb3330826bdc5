"""The gated delta rule, with one decay per head or one per key channel (Kimi's).

S_t = d_t S_{t-1} + beta_t k_t (v_t - (d_t S_{t-1})^T k_t)^T, o_t = S_t^T q_t, with the decay d_t in (0, 1]:
Yang et al. 2024, "Gated Delta Networks", section 3; per channel: Kimi Team 2025, "Kimi Linear", section 3.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.functional import threshold

from specdec.kernels.scan import Scan, Stock, Tensors, without


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

    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As one chunk: the state is read once and written once, however many tokens there are.

        What each token changes depends on the changes before it, a triangular system (Yang et al. 2024, section 3.3).
        Decays per channel go through transformers' own function, which splits them so that nothing overflows.
        """
        key, value, decay, beta = inputs
        if decay.ndim == 4:
            return self._few_by_channel(inputs, reads[0], state)
        keys, queries = (x.transpose(1, 2) for x in (self._prepare(key, value), self._queries(reads[0], value)))
        values, betas = value.float().transpose(1, 2), beta.float().transpose(1, 2).unsqueeze(-1)
        since = decay.float().transpose(1, 2).cumsum(dim=-1)
        # From token j to token i >= j; above the diagonal differences are positive and may overflow.
        decays = _decay((since.unsqueeze(-1) - since.unsqueeze(-2)).tril()).tril()
        so_far = _decay(since).unsqueeze(-1)
        readers = torch.cat([keys, queries], dim=2)
        recalled, outputs = torch.matmul(readers, state).chunk(2, dim=2)
        among_keys, with_queries = torch.matmul(readers, keys.transpose(-1, -2)).chunk(2, dim=2)
        changes = torch.linalg.solve_triangular(
            (among_keys * decays * betas).tril(-1),
            (values - recalled * so_far) * betas,
            upper=False,
            unitriangular=True,
        )
        outputs = outputs * so_far + torch.matmul(with_queries * decays, changes)
        written = (keys * decays[..., -1, :].unsqueeze(-1)).flatten(0, 1).transpose(1, 2)
        kept = (state * so_far[..., -1:, :]).flatten(0, 1)
        state = kept.baddbmm_(written, changes.flatten(0, 1)).view(state.shape)
        return outputs.transpose(1, 2).to(value.dtype), state

    def _few_by_channel(
        self, inputs: Tensors, query: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value, decay, beta = inputs
        scan = inspect.unwrap(self._stock)
        options = {"chunk_size": key.shape[1], "use_qk_l2norm_in_kernel": self._is_normalized}
        outputs, state = scan(query, key, value, decay, beta, initial_state=state, output_final_state=True, **options)
        return outputs, state

    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """No decay and no learning."""
        key, value, decay, beta = inputs
        return key, value, without(decay, is_padding), without(beta, is_padding)

    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [1, N, H_v, D_v]."""
        return outputs, outputs.new_empty(0)

    def _queries(self, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scale: float = query.shape[-1] ** -0.5
        return self._prepare(query, value) * scale

    def _prepare(self, vectors: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keys or queries as float32, normalized if the model wants that, one per value head."""
        vectors = vectors.float()
        if self._is_normalized:
            vectors = vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)
        num_sharing = value.shape[2] // vectors.shape[2]
        return vectors if num_sharing == 1 else vectors.repeat_interleave(num_sharing, dim=2)


def _decay(exponents: torch.Tensor) -> torch.Tensor:
    """exp, with what is next to nothing made nothing: numbers below float32's normal ones slow a CPU a hundredfold."""
    return threshold(exponents.exp(), 1e-25, 0.0)
