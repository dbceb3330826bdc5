"""Pads every step of every runner to a fixed size, as graphs hold them: ``pytest --padded``."""

from __future__ import annotations

from typing import Any

from specdec.executor.graphs import ExecutorLimits
from specdec.executor.runner import ModelRunner
from specdec.models.loading import LoadedModel


def pad_all_steps() -> None:
    """From now on the steps of new runners are recorded, which on a CPU pads them."""
    init = ModelRunner.__init__

    def make(self: ModelRunner, loaded: LoadedModel, **options: Any) -> None:
        length = max(8192, options["num_blocks"] * options.get("block_size", 16))
        limits = ExecutorLimits(max_rows=256, max_tokens=4096, max_length=length, max_draft_tokens=7, has_trees=True)
        init(self, loaded, **options)
        if options["num_blocks"] > 1:  # with one block, a step of the largest size is measured
            self.record_graphs(limits)

    ModelRunner.__init__ = make  # type: ignore[method-assign]
