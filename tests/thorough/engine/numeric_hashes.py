"""Hashes that a strict target names, and those of the logits of a text, for numbers of threads, as rows of JSON.

``ONEDNN_MAX_CPU_ISA=AVX2 python -m tests.thorough.engine.numeric_hashes 1 2 4 8`` shows that a hash differs wherever
logits do: which bits a product has depends on the instruction set and, for some shapes, on the number of threads.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.executor.rows import RowInput
from specdec.executor.runner import ModelRunner
from specdec.models.loading import prepare_model
from specdec.models.parity_check import check_bits

TOKENS = [i * 37 % 2000 for i in range(90)]
TILE_TOKENS = 16
DTYPES = (torch.float32, torch.bfloat16)


def hashes(dtype: torch.dtype, num_threads: int) -> dict[str, object]:
    """Load a model with so many threads; the hash that it names, and that of a text's logits."""
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
    model = LlamaForCausalLM(config).to(dtype).eval()
    torch.set_num_threads(num_threads)
    runner = ModelRunner(prepare_model(model, "tiny"), num_blocks=96, block_size=16, tile_tokens=TILE_TOKENS)
    named = check_bits(runner)
    sequence = runner.new_sequence(b"")
    assert runner.reserve(sequence, len(TOKENS))
    logits = runner.forward([RowInput(sequence, TOKENS, len(TOKENS))])
    seen = sha256(logits.contiguous().view(torch.uint8).numpy()).hexdigest()
    return {"dtype": str(dtype), "threads": num_threads, "named": named, "logits": seen}


def main() -> None:
    """Print a row for each type and number of threads."""
    for dtype in DTYPES:
        for count in map(int, sys.argv[1:]):
            print(json.dumps(hashes(dtype, count)), flush=True)


if __name__ == "__main__":
    main()
