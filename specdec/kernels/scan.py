"""Recurrent scans: what one must be able to do so that its state can be kept, split and rolled back per sequence.

The gated delta rule, with one decay per head or one per key channel (Kimi's):
S_t = d_t S_{t-1} + beta_t k_t (v_t - (d_t S_{t-1})^T k_t)^T, o_t = S_t^T q_t, with the decay d_t in (0, 1]:
Yang et al. 2024, "Gated Delta Networks", section 3; per channel: Kimi Team 2025, "Kimi Linear", section 3.

Mamba-1, a state per channel with a decay per channel and state dimension, and Mamba-2, a state per head with a scalar
decay: S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: Gu and Dao 2023, "Mamba", section 3; Dao and
Gu 2024, "Transformers are SSMs", section 2. Mamba's stock scan begins with a state of zeros whatever came before, so
it is not used.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import threshold

from specdec.core.errors import ModelLoadError

Tensors = tuple[torch.Tensor, ...]
Stock = Callable[..., Any]
"""A scan function of a modelling module: a kernel's, where one is installed, or transformers' own."""


class Scan(ABC):
    """One call of a layer's scan, over tokens of many sequences behind one another.

    The same object then runs it over any rows cut out of them: ``inputs`` and ``reads`` stand for [B, T, ...] tensors
    with as many entries and the same trailing dimensions as the attributes, states for float32 [B, *state_shape].

    Attributes:
        inputs: What moves the state: [1, N, ...] each.
        reads: What else the outputs depend on: [1, N, ...] each.
    """

    inputs: Tensors
    reads: Tensors

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one sequence's state."""

    @abstractmethod
    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [B, T, ...] and the state after the last token; meant for many tokens."""

    @abstractmethod
    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`whole`, meant for a window's tokens: at least one."""

    @abstractmethod
    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """``inputs`` that leave the state exactly as it is where ``is_padding``, bool [B, T]."""

    @abstractmethod
    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the stock function returns for all N tokens, from outputs [1, N, ...].

        The second is what the layer hands to the cache as its state, which has it already: a placeholder.
        """


def is_fast(stock: Stock) -> bool:
    """Whether a scan function is a kernel of a package, as flash-linear-attention's or mamba_ssm's, not torch's."""
    variables = inspect.getclosurevars(stock).nonlocals if inspect.isfunction(stock) else {}
    return bool(variables.get("is_new_implementation"))


class TokenByToken(Scan):
    """A scan of one token of one sequence at a time, so that all its products have one shape.

    Args:
        scan: Over many.
    """

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self.inputs, self.reads = scan.inputs, scan.reads

    @property
    def state_shape(self) -> tuple[int, ...]:
        """As the scan's."""
        return self._scan.state_shape

    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Scan.whole`."""
        rows = []
        for row in range(len(state)):
            own, outputs = state[row : row + 1], []
            for t in range(inputs[0].shape[1]):
                some, read = (tuple(v[row : row + 1, t : t + 1] for v in values) for values in (inputs, reads))
                output, own = self._scan.few(some, read, own)
                own = own.float()
                outputs.append(output)
            rows.append((torch.cat(outputs, dim=1), own))
        outputs_of, states = zip(*rows, strict=True)
        return torch.cat(outputs_of), torch.cat(states)

    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Scan.few`."""
        return self.whole(inputs, reads, state)

    def neutral(self, inputs: Tensors, is_padding: torch.Tensor) -> Tensors:
        """See :meth:`Scan.neutral`."""
        return self._scan.neutral(inputs, is_padding)

    def result(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Scan.result`."""
        return self._scan.result(outputs)


def spread(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask [B, T] as [B, T, 1, ...], for a tensor with more dimensions."""
    return mask.view(*mask.shape, *([1] * (like.ndim - 2)))


def without(values: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
    """``values`` [B, T, ...] with zeros where ``is_padding``."""
    return values.masked_fill(spread(is_padding, values), 0)


class DeltaRule(Scan):
    """Inputs: keys [B, T, H_k, D_k], values [B, T, H_v, D_v], log decays [B, T, H_v (, D_k)], betas [B, T, H_v].

    Reads: queries, shaped like keys. State: [H_v, D_k, D_v].

    Attributes:
        is_normalized: Whether keys and queries are to be brought to length 1.
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
        self.is_normalized = use_qk_l2norm_in_kernel
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
            use_qk_l2norm_in_kernel=self.is_normalized,
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
        options = {"chunk_size": key.shape[1], "use_qk_l2norm_in_kernel": self.is_normalized}
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
        if self.is_normalized:
            vectors = vectors * torch.rsqrt(vectors.square().sum(dim=-1, keepdim=True) + 1e-6)
        num_sharing = value.shape[2] // vectors.shape[2]
        return vectors if num_sharing == 1 else vectors.repeat_interleave(num_sharing, dim=2)


def _decay(exponents: torch.Tensor) -> torch.Tensor:
    """exp, with what is next to nothing made nothing: numbers below float32's normal ones slow a CPU a hundredfold."""
    return threshold(exponents.exp(), 1e-25, 0.0)


class Mamba1(Scan):
    """Inputs: x [B, T, D], final time steps [B, T, D], B [B, T, S]. Reads: C like B, gates like x. State: [D, S].

    Attributes:
        rates: float32 [D, S], A.
        skip: [D], how much of x each output has; None for none.
    """

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
        self.rates, self.skip = A, D
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
            kept = torch.exp(self.rates * times[:, t].unsqueeze(-1))
            state = (state * kept).addcmul_(written[:, t].unsqueeze(-1), b[:, t].unsqueeze(1))
            output = torch.matmul(state.to(x.dtype), c[:, t].to(x.dtype).unsqueeze(-1)).squeeze(-1)
            if self.skip is not None:
                output = output + x[:, t] * self.skip
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
    """Inputs: x [B, T, H, P], final time steps [B, T, H], B [B, T, G, S]. Reads: C, shaped like B. State: [H, P, S].

    Attributes:
        rates: float32 [H], A.
        skip: [H], how much of x each output has; None for none.
    """

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
        self._stock, self.rates, self.skip, self._chunk_size = stock, A, D, chunk_size
        self.inputs = (hidden_states, dt.clamp(*dt_limit), B)
        self.reads = (C,)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[H, P, S]."""
        x, _, b = self.inputs
        return x.shape[2], x.shape[3], b.shape[3]

    def whole(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By the modelling module's own function, in chunks."""
        outputs, state = self._chunked(self._stock, inputs, reads[0], state, self._chunk_size, self.skip)
        return outputs, state

    def few(self, inputs: Tensors, reads: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In one chunk, by transformers' own function: few tokens gain nothing from a kernel."""
        scan = inspect.unwrap(self._stock)
        return self._chunked(scan, inputs, reads[0], state, inputs[0].shape[1], self.skip)

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
            x, dt, self.rates, b, c, chunk_size=chunk_size, D=skip, initial_states=state, return_final_states=True
        )
        return outputs, state
