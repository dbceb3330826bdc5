"""The tensors behind the block pool, as a transformers cache."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from transformers.cache_utils import Cache

from specdec.models.layers import AttentionLayer
from specdec.models.plan import StepPlan


class PagedCache(Cache):  # type: ignore[misc]
    """Pools of keys and values, one pair per layer that caches; written where the step's plan says.

    Keys are cached as the model hands them over: rotated, at their absolute positions. One more block than the block
    pool knows takes what padding writes.

    Args:
        layers: The model's attention layers; those that only read another's cache need no pool.
        num_blocks: Blocks of the block pool.
        block_size: Positions per block.
    """

    def __init__(self, layers: Iterable[AttentionLayer], num_blocks: int, block_size: int) -> None:
        super().__init__(layers=[])
        self.trash_slot = num_blocks * block_size
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._plan: StepPlan | None = None
        for layer in layers:
            shape = (num_blocks + 1, block_size, layer.num_key_heads)
            keys = _zeros((*shape, layer.key_dim), layer)
            self._pools[layer.index] = (keys, _zeros((*shape, layer.value_dim), layer))

    def begin(self, plan: StepPlan) -> None:
        """The step whose keys and values come next."""
        self._plan = plan

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values.

        Args:
            key_states: [B, H_kv, T, D]; the B x T tokens, flattened, are those of the plan.
            value_states: [B, H_kv, T, D_v].
            layer_idx: The layer.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            The layer's whole pools, [blocks + 1, block size, H_kv, D and D_v]: what :func:`paged_attention` reads.
        """
        assert self._plan is not None, "begin() comes first"
        pools = self._pools[layer_idx]
        slots = self._plan.slots(key_states.device)
        for pool, states in zip(pools, (key_states, value_states), strict=True):
            pool.flatten(0, 1).index_copy_(0, slots, states.transpose(1, 2).flatten(0, 1))
        return pools

    def copy_blocks(self, waves: list[list[tuple[int, int]]]) -> None:
        """Copy whole blocks in all layers, in the order :meth:`BlockPool.take_copies` gives."""
        for wave in waves:
            pairs = torch.tensor(wave)
            for pools in self._pools.values():
                sources, destinations = pairs.to(pools[0].device).unbind(1)
                for pool in pools:
                    pool.index_copy_(0, destinations, pool.index_select(0, sources))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row before the step."""
        return 0 if self._plan is None else max((row.num_past_tokens for row in self._plan.rows), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)


def _zeros(shape: tuple[int, ...], layer: AttentionLayer) -> torch.Tensor:
    """Zeros, since masked keys are still multiplied: what was never written must be finite.

    On a CPU numpy asks the system for memory that is zero already, and becomes real page by page when it is written:
    a pool of gigabytes costs nothing until it is used.
    """
    if layer.device.type != "cpu":
        return torch.zeros(shape, dtype=layer.dtype, device=layer.device)
    num_bytes = math.prod(shape) * layer.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(layer.dtype).view(shape)
