"""This project's engine in one process."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from loop import answer_requests, arguments

import specdec
from benchmarks.modes.load import fresh_salt
from specdec import BackendOptions, ModelSource, SamplingParams, SpeculativeEngine
from specdec.core.types import Engine


def main(engine: Engine = "transformers") -> None:
    """Load the pair and answer."""
    given = arguments()
    torch.set_num_threads(given.threads)
    folders = given.target, given.draft
    sources = [ModelSource(folder, dtype=given.dtype, device="cpu", engine=engine) for folder in folders]
    pair = SpeculativeEngine.from_pretrained(*sources, options=BackendOptions(kv_cache_memory=256 << 20))
    sampling = SamplingParams(temperature=0, ignore_eos=True)

    def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        options = {"max_tokens": max_tokens, "num_speculative_tokens": num_speculative_tokens}
        result = pair.generate(prompt_ids, sampling, seed=0, cache_salt=fresh_salt(), **options)
        return {"token_ids": list(result.token_ids), "num_accepted": result.stats.num_accepted_tokens}

    versions = {"specdec": specdec.__version__, "torch": importlib.metadata.version("torch")}
    answer_requests(versions, f"engine in process, in turn, by {engine}", generate)


if __name__ == "__main__":
    main()
