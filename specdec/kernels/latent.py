"""Layers that cache a latent per position and attend over keys and values which they make of it (MLA).

What such a layer gets back from the cache it expands as a whole; so it gets the blocks of the step's own rows, and
its attention reads a plan over these blocks alone. DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec.kernels.attention_metadata import StepPlan


class CompactPlan:
    """A step's plan over the blocks of its own rows alone; a block that rows share comes once.

    Attributes:
        plan: With block tables that count these blocks.
    """

    def __init__(self, plan: StepPlan) -> None:
        places: dict[int, int] = {}
        rows = []
        for row in plan.rows:
            block_ids = row.block_ids[: -(-row.length // plan.block_size)]
            rows.append(replace(row, block_ids=[places.setdefault(block, len(places)) for block in block_ids]))
        self._block_ids = list(places)
        self.plan = StepPlan(rows, plan.num_tokens, plan.block_size, len(places) * plan.block_size)
        self._blocks: dict[torch.device, torch.Tensor] = {}

    def blocks(self, device: torch.device) -> torch.Tensor:
        """Their numbers in the pool, int64 [blocks]."""
        if device not in self._blocks:
            self._blocks[device] = torch.tensor(self._block_ids, device=device)
        return self._blocks[device]


def compact(plan: StepPlan) -> CompactPlan:
    """The plan for layers that expand what they cache; made once per step."""
    return plan.memo(("compact",), lambda: CompactPlan(plan))


def as_blocks(expanded: torch.Tensor, block_size: int) -> torch.Tensor:
    """Expanded keys or values [1, H, positions, D] as a pool [blocks, block size, H, D]."""
    positions = expanded[0].transpose(0, 1)
    return positions.reshape(-1, block_size, *positions.shape[1:])
