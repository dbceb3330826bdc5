"""Steps of a model on CPUs by OpenVINO, over the blocks that every runner has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.errors import ModelLoadError
from specdec.executor.openvino.checks import BLOCK_SIZE, refused_reason
from specdec.executor.openvino.graph import compiled_graph
from specdec.executor.rows import RowInput, lay_out_rows
from specdec.executor.runner import ModelRunner
from specdec.executor.steps import put_drawn
from specdec.models.loading import LoadedModel


class OpenVINORunner(ModelRunner):
    """Any rows are one ragged pass; trees are not taken, and steps are not recorded.

    Args:
        loaded: The model, with no :func:`~specdec.executor.openvino.checks.refused_reason`.
        num_blocks: Blocks in the cache, of 32 positions each.
        vocab_size: As for :class:`ModelRunner`.
        quantization: ``none``, or ``int8``, which rounds the model's weights.

    Raises:
        ModelLoadError: OpenVINO cannot run the model.
    """

    def __init__(
        self, loaded: LoadedModel, *, num_blocks: int, vocab_size: int | None = None, quantization: str = "none"
    ) -> None:
        nothing_cached = replace(loaded, attention_layers=())
        super().__init__(nothing_cached, num_blocks=num_blocks, block_size=BLOCK_SIZE, vocab_size=vocab_size)
        self.loaded = loaded  # whose weights the graph reads
        reason = refused_reason(loaded)
        if quantization not in ("none", "int8"):
            reason = f"quantization must be none or int8, not {quantization}"
        elif loaded.dtype == torch.bfloat16 and not runs_bfloat16():
            reason = "dtype bfloat16 needs a CPU with AVX512_BF16 or AMX: set dtype: float32"
        if not reason:
            try:
                graph = compiled_graph(loaded, quantization, torch.get_num_threads())
            except Exception as error:  # of the tracer, the converter or the compiler
                reason = " ".join(str(error).split())
        if reason:
            raise ModelLoadError(f"{loaded.name} does not run with engine: openvino: {reason}")
        self._request = graph.create_infer_request()
        self._caches = [self._make_cache(node, num_blocks + 1) for node in graph.inputs if _is_cache(node)]

    def _make_cache(self, node: Any, num_blocks: int) -> Tensor:
        """Keys or values of a layer in blocks, in the layout that OpenVINO has chosen."""
        shape = [num_blocks, *(dim.get_length() for dim in list(node.get_partial_shape())[1:])]
        cache = torch.zeros(shape, dtype=self.loaded.dtype)
        memory = cache.view(torch.int16 if cache.dtype == torch.bfloat16 else cache.dtype).numpy()  # NumPy lacks it
        shared = openvino.Tensor(memory, openvino.Shape(shape), node.get_element_type())
        self._request.set_tensor(node.get_any_name(), shared)
        return cache

    @property
    def takes_trees(self) -> bool:
        """No."""
        return False

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[RowInput], drawn: Tensor | None = None, extra: Sequence[NDArray[Any]] = ()
    ) -> Tensor:
        """As :meth:`ModelRunner.forward`; nothing comes along."""
        self.extra = None
        own = lay_out_rows(rows, self.loaded.vocab_size, self.pool, False, num_drawn=0 if drawn is None else len(drawn))
        for group in self.pool.groups:  # what nobody has written is not read
            group.prepare(self._copy_blocks, lambda _: None)
        tokens = own.tokens
        if drawn is not None:
            tokens = tokens.copy()
            put_drawn(torch.from_numpy(tokens), drawn)
        past, counts = own.num_cached, own.num_tokens
        ends = counts.cumsum()
        tables = [
            row.sequence.tables[0][: -(-length // BLOCK_SIZE)]
            for row, length in zip(rows, (past + counts).tolist(), strict=True)
        ]
        in_row = np.arange(ends[-1]) - (ends - counts).repeat(counts)
        wanted = np.flatnonzero(in_row >= (counts - own.num_logits).repeat(counts))
        given = {
            "input_ids": tokens.astype(np.int64),
            "position_ids": in_row + past.repeat(counts),
            "wanted": wanted if len(wanted) else np.zeros(1, np.int64),
            "past_lens": past.astype(np.int32),
            "subsequence_begins": np.array([0, *ends], np.int32),
            "block_indices": np.fromiter(chain.from_iterable(tables), np.int32),
            "block_indices_begins": np.array([0, *accumulate(map(len, tables))], np.int32),
            "max_context_len": np.array((past + counts).max(), np.int32),
        }
        for name, array in given.items():
            self._request.set_tensor(name, openvino.Tensor(array))
        self._request.infer()
        logits, magnitudes = (torch.from_numpy(self._request.get_output_tensor(i).data.copy()) for i in range(2))
        logits = logits[: len(wanted)]
        self.progress.advance(self.loaded.device)  # its layers are not ours to count
        for row in rows:
            row.sequence.tokens.extend(row.tokens)
        self._note_finite(own, magnitudes.isfinite(), logits.amax(1).isfinite())
        return self._finish(logits)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(copies).T
        for cache in self._caches:
            cache[destinations] = cache[sources]


def runs_bfloat16() -> bool:
    """Return whether OpenVINO computes in bfloat16 on this machine's CPU."""
    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _is_cache(node: Any) -> bool:
    return str(node.get_any_name()).startswith(("key_cache.", "value_cache."))
