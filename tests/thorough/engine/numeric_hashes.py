"""Print the hash that a strict target names, and that of a text's logits, for numbers of threads, as rows of JSON.

``ONEDNN_MAX_CPU_ISA=AVX2 python -m tests.thorough.engine.numeric_hashes 1 2 4 8`` shows that a hash differs wherever
logits do: a product's bits depend on the library, the instruction set and, for some shapes, the number of threads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.models.lora.slots import AdapterSlots, LoRAConfig
from specdec.models.parity_check import check_bits

TOKENS = [i * 37 % 2000 for i in range(530)]
TILE_TOKENS = 16
DTYPES = (torch.float32, torch.bfloat16)


def hashes(dtype: torch.dtype, num_threads: int, is_adapted: bool) -> dict[str, object]:
    """Load a model, maybe with an adapter, and return the hash that it names and that of a text's logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    loaded = prepare_model(LlamaForCausalLM(config).to(dtype), "tiny")
    if is_adapted:
        loaded = replace(loaded, adapters=AdapterSlots(loaded.model, LoRAConfig(max_loras=1, max_rank=16)))
        shapes = loaded.adapters.shapes.items()
        weights = [(name, torch.randn(16, width) / width, torch.randn(16, out)) for name, (out, width) in shapes]
        loaded.adapters.put(0, weights)
    torch.set_num_threads(num_threads)
    runner = ModelRunner(loaded, num_blocks=96, block_size=16, tile_tokens=TILE_TOKENS)
    named = check_bits(runner)
    sequence = runner.new_sequence(None)
    assert runner.reserve(sequence, len(TOKENS))
    logits = runner.forward([RowInput(sequence, TOKENS, len(TOKENS), adapter=0 if is_adapted else None)])
    seen = sha256(logits.contiguous().view(torch.uint8).numpy()).hexdigest()
    return {"dtype": str(dtype), "threads": num_threads, "is_adapted": is_adapted, "named": named, "logits": seen}


def main() -> None:
    """Print a row for each type, with and without an adapter, and number of threads."""
    for dtype, is_adapted, count in product(DTYPES, (False, True), map(int, sys.argv[1:])):
        print(json.dumps(hashes(dtype, count, is_adapted)), flush=True)


if __name__ == "__main__":
    main()
