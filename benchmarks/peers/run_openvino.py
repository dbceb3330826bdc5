"""OpenVINO GenAI: ``LLMPipeline`` with a draft model; the folders are converted models."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from loop import answer_requests, arguments

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
CACHE_GB = 1


def main() -> None:
    """Load the pair twice, with the draft and without, and answer."""
    given = arguments()
    precision = PRECISIONS[given.dtype]
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": given.threads,
    }
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    plain = genai.LLMPipeline(given.target, "CPU", scheduler_config=scheduler, **options)
    draft = genai.draft_model(given.draft, "CPU", **options)
    speculative = genai.LLMPipeline(given.target, "CPU", scheduler_config=scheduler, draft_model=draft, **options)

    def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        if num_speculative_tokens:
            config.num_assistant_tokens = num_speculative_tokens
        ids = np.array([prompt_ids], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        result = (speculative if num_speculative_tokens else plain).generate(inputs, config)
        answer: dict[str, Any] = {"token_ids": list(result.tokens[0])}
        if num_speculative_tokens:
            answer["num_accepted"] = result.extended_perf_metrics.get_num_accepted_tokens()
        return answer

    versions = {name: importlib.metadata.version(name) for name in ("openvino", "openvino-genai")}
    answer_requests(versions, f"LLMPipeline, draft_model, inference and cache in {precision}", generate)


if __name__ == "__main__":
    main()
