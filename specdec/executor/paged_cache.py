"""The tensors behind the block pool, as a transformers cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.cache.blocks import BlockPool
from specdec.cache.recurrent.pool import StatePool
from specdec.executor.staging import Uploads
from specdec.kernels.attention import GroupStep, address
from specdec.models.probe import AttentionLayer, PromptCache


def group_window(layer: AttentionLayer) -> int | None:
    """The window of the group of blocks that a layer's keys and values lie in; None of those that keep all."""
    return None if layer.is_latent else layer.window


def write_by_operators(
    keys: torch.Tensor, values: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """What :func:`specdec.kernels.triton.attention.write_cache` does, on any device; slots are int64."""
    for pool, states in ((key_pool, keys), (value_pool, values)):
        pool.flatten(0, 1).index_copy_(0, slots, states)


class PagedCache(PromptCache):
    """Pools of keys and values, one pair per layer that caches; written where the step says.

    Keys are cached as the model hands them over: rotated, at their absolute positions. One more block than the block
    pool knows takes what padding writes.

    Args:
        layers: The model's attention layers; those that only read another's cache need no pool.
        pool: The blocks, in groups.
        states: What recurrent layers keep; None where there are none.
        kernel: The attention kernel that reads the cache.
        dependent_launches: As for :class:`specdec.kernels.triton.attention.TritonAttention`.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayer],
        pool: BlockPool,
        states: StatePool | None = None,
        kernel: str = "gather",
        dependent_launches: bool = False,
    ) -> None:
        super().__init__()
        self._write: Callable[..., None] = write_by_operators
        # Triton's loads are masked: what the step's rows have not written is never read, and may hold anything.
        self._reads_unwritten = kernel != "triton"
        if kernel == "triton":
            from specdec.kernels.triton.attention import write_cache

            self._write = partial(write_cache, dependent_launches=dependent_launches)
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._latent: set[int] = set()
        self._states = states
        self._uploads: dict[torch.device, Uploads] = {}
        self._steps: Sequence[GroupStep] = ()
        self._group_of: dict[int, int] = {}
        windows = [group.window for group in pool.groups]
        for layer in layers:
            number = self._group_of[layer.index] = windows.index(group_window(layer))
            shape = (pool.groups[number].num_blocks + 1, pool.block_size, layer.num_key_heads)
            # Zeros, since masked keys are still multiplied: what was never written must be finite.
            make = partial(torch.zeros, dtype=layer.dtype, device=layer.device)
            self._pools[layer.index] = (make((*shape, layer.key_dim)), make((*shape, layer.value_dim)))
            if layer.is_latent:
                self._latent.add(layer.index)

    def clear(self, group: int, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in all layers of a group, where attention multiplies what nobody has written."""
        if not self._reads_unwritten:
            return
        index = self._on_devices(np.array(blocks, np.int64))
        for pools in self._pools_of(group):
            for pool in pools:
                pool.index_fill_(0, index(pool.device), 0.0)

    def begin(self, steps: Sequence[GroupStep]) -> None:
        """The step whose keys and values come next, one for each group."""
        self._steps = steps

    @property
    def group_of(self) -> dict[int, int]:
        """By :func:`address` the pools of keys that are not the first group's, and their group."""
        return {address(pools[0]): group for i, pools in self._pools.items() if (group := self._group_of[i])}

    def _pools_of(self, group: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pools for index, pools in self._pools.items() if self._group_of[index] == group]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values.

        Args:
            key_states: [B, H_kv, T, D]; the B x T tokens, flattened, are those of the step.
            value_states: [B, H_kv, T, D_v].
            layer_idx: The layer.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            The layer's whole pools, [blocks + 1, block size, H_kv, D and D_v]: what :func:`paged_attention` reads. Of a
            layer that expands what it caches, only the step's blocks, one after another: [1, H_kv, positions, D and
            D_v].
        """
        assert self._steps, "begin() comes first"
        pools, step = self._pools[layer_idx], self._steps[self._group_of[layer_idx]]
        slots = step.cache_slots(key_states.device)
        keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]  # Triton launches there
            self._write(keys, values, *pools, slots)
        if layer_idx in self._latent:
            blocks = step.compacted(key_states.device).blocks
            keys, values = (pool.index_select(0, blocks).flatten(0, 1).transpose(0, 1) for pool in pools)
            return keys.unsqueeze(0), values.unsqueeze(0)
        return pools

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """A convolution's inputs, [1, C, N], each row's after those that come before it: [1, C, M]."""
        assert self._states is not None, "a model without recurrent layers"
        return self._states.extended(conv_states, layer_idx, state_idx, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Nothing: the scan has kept it."""
        return recurrent_states

    def copy_blocks(self, group: int, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers of a group; all are read before any is written."""
        pairs = self._on_devices(np.array(copies, np.int64).T)
        for pools in self._pools_of(group):
            sources, destinations = pairs(pools[0].device)
            for pool in pools:
                pool.index_copy_(0, destinations, pool.index_select(0, sources))

    def move_slots(self, group: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy single slots (source, destination) in all layers of a group; all are read before any is written."""
        if not moves:
            return
        pairs = self._on_devices(np.array(moves, np.int64).T)
        for pools in self._pools_of(group):
            sources, destinations = pairs(pools[0].device)
            for pool in pools:
                slots = pool.flatten(0, 1)
                slots.index_copy_(0, destinations, slots.index_select(0, sources))

    def _on_devices(self, numbers: NDArray[np.int64]) -> Callable[[torch.device], torch.Tensor]:
        """The numbers on the device asked for, uploaded to each once."""
        return cache(lambda device: self._uploads.setdefault(device, Uploads(device)).send([numbers])[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pools in self._pools.values() for pool in pools)
