"""Assisted generation of transformers, with the draft length that was asked for."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from loop import answer_requests, arguments
from transformers import AutoModelForCausalLM


def main(*, is_tuned: bool = True) -> None:
    """Load the pair and answer.

    Args:
        is_tuned: With the draft length that was asked for, every round; else as transformers does it by itself.
    """
    given = arguments()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval() for folder in (given.target, given.draft)
    )
    if is_tuned:
        draft.generation_config.num_assistant_tokens = given.num_speculative_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0
        settings = f"{given.num_speculative_tokens} draft tokens, constant schedule, confidence threshold 0"
    else:
        settings = "all else as transformers sets it"

    @torch.inference_mode()
    def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        ids = torch.tensor([prompt_ids])
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            assistant_model=draft if num_speculative_tokens else None,
        )
        return {"token_ids": output[0, len(prompt_ids) :].tolist()}

    versions = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
    answer_requests(versions, f"generate(assistant_model=...), {settings}", generate)


if __name__ == "__main__":
    main()
