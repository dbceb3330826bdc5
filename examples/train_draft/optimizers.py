"""Muon for the matrices inside the layers, AdamW for embeddings and norms; warmup, stable and decay phases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

State = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and their schedule (warmup, stable, decay: Hu et al. 2024, "MiniCPM", section 4)."""

    matrices: float = 0.01
    others: float = 6e-3
    weight_decay: float = 0.01
    momentum: float = 0.95
    num_warmup_steps: int = 40
    max_gradient_norm: float = 1.0

    def scale(self, step: int, decay_start: int | None, num_decay_steps: int) -> float:
        """What the rates are multiplied by at ``step``; ``decay_start`` None: no decay has begun."""
        warm = min(1.0, (step + 1) / max(1, self.num_warmup_steps))
        if decay_start is None or step < decay_start:
            return warm
        return warm * max(0.0, 1.0 - (step - decay_start + 1) / (num_decay_steps + 1))


class Optimizers:
    """Both optimizers as one. Their state is read and written by parameter name, so that it survives growing."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.rates = rates
        self._named = dict(model.named_parameters())
        matrices = [p for n, p in self._named.items() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self._named.items() if not (p.ndim == 2 and "embed" not in n)]
        # Keller Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
        muon = torch.optim.Muon(matrices, rates.matrices, weight_decay=rates.weight_decay, momentum=rates.momentum)
        adam = torch.optim.AdamW(others, rates.others, betas=(0.9, 0.95), weight_decay=0.0)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [(muon, rates.matrices), (adam, rates.others)]

    def step(self, scale: float) -> None:
        """One update from the gradients, which are clipped and then dropped."""
        nn.utils.clip_grad_norm_(self._named.values(), self.rates.max_gradient_norm)
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> State:
        """Each parameter's state by the parameter's name."""
        return {
            name: dict(optimizer.state[parameter])
            for optimizer, _ in self._parts
            for name, parameter in self._named.items()
            if parameter in optimizer.state
        }

    def load_state_dict(self, state: State) -> None:
        """Takes over the state of the parameters named; others start anew."""
        for optimizer, _ in self._parts:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self._named.items():
                if name in state and id(parameter) in mine:
                    optimizer.state[parameter] = dict(state[name])
