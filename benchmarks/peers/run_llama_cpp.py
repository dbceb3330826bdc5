"""llama.cpp's server, from the wheels of ``xllamacpp``, over HTTP: one with the draft and one without."""

from __future__ import annotations

import importlib.metadata
import json
import urllib.request
from typing import Any

import xllamacpp
from loop import answer_requests, arguments

CONTEXT_LENGTH = 2048
CACHE_TYPES = {
    "float32": xllamacpp.ggml_type.GGML_TYPE_F32,
    "bfloat16": xllamacpp.ggml_type.GGML_TYPE_BF16,
}


def common_params(model: str, dtype: str, num_threads: int) -> xllamacpp.CommonParams:
    """One slot, greedy, a free port of 127.0.0.1."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.port = CONTEXT_LENGTH, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
    params.cache_type_k = params.cache_type_v = CACHE_TYPES[dtype]
    params.fit_params = False
    return params


def main() -> None:
    """Load the pair twice, with the draft and without, and answer."""
    given = arguments()
    plain = xllamacpp.Server(common_params(given.target, given.dtype, given.threads))
    params = common_params(given.target, given.dtype, given.threads)
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = params.speculative.draft
    draft.mparams.path = given.draft
    draft.n_max, draft.n_min, draft.p_min = given.num_speculative_tokens, 0, 0.0
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = given.threads
    draft.cache_type_k = draft.cache_type_v = CACHE_TYPES[given.dtype]
    speculative = xllamacpp.Server(params)

    def generate(prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        server = speculative if num_speculative_tokens else plain
        body = {"prompt": prompt_ids, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body | {"return_tokens": True, "cache_prompt": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            result = json.load(response)
        answer: dict[str, Any] = {"token_ids": result["tokens"]}
        if num_speculative_tokens:
            answer["num_accepted"] = result["timings"].get("draft_n_accepted", 0)
        return answer

    versions = {"xllamacpp": importlib.metadata.version("xllamacpp")}
    answer_requests(versions, f"llama-server over HTTP, draft-simple, cache in {given.dtype}", generate)


if __name__ == "__main__":
    main()
