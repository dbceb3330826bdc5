"""What to use here in place of flags of vLLM, SGLang, llama.cpp's server and others, and of earlier versions."""

from __future__ import annotations

_MODEL = "the model comes first: specdec serve MODEL --draft MODEL"
_MEMORY = (
    "use --target-kv-cache-memory and --draft-kv-cache-memory: a fraction of what is free, or an amount such as 8GiB"
)
_PARALLEL = (
    "use --target-device-map auto to spread a model over several GPUs, or --target-engine vllm with "
    "--target-engine-args '{tensor_parallel_size: N}'"
)
_QUANTIZATION = "use --target-quantization and --draft-quantization; a checkpoint that is quantized needs neither"
_LENGTH = "use --max-model-len"
_SEQUENCES = "use --max-num-seqs, for whose whole length the cache has room at most"
_DRAFT = "use --draft MODEL"
_DRAFT_LENGTH = "use --num-speculative-tokens"

INSTEAD = {
    "--model": _MODEL,
    "--model-path": _MODEL,
    "-m": _MODEL,
    "-hf": _MODEL,
    "--hf-repo": _MODEL,
    "--alias": "use --served-model-name",
    "-q": _QUANTIZATION,
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--kv-cache-memory-bytes": _MEMORY,
    "--tensor-parallel-size": _PARALLEL,
    "--tensor-parallel": _PARALLEL,
    "--tp-size": _PARALLEL,
    "--tp": _PARALLEL,
    "-tp": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "--data-parallel-size": "use --replicas-target",
    "--max-running-requests": _SEQUENCES,
    "--parallel": _SEQUENCES,
    "-np": _SEQUENCES,
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--context-length": _LENGTH,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
    "--enable-prefix-caching": "prefixes are always cached",
    "--trust-remote-code": "code of checkpoints is never run; models need an architecture of transformers",
    "--speculative-model": _DRAFT,
    "--speculative-draft-model-path": _DRAFT,
    "--model-draft": _DRAFT,
    "-md": _DRAFT,
    "--draft-max": _DRAFT_LENGTH,
    "--draft-model": _DRAFT,
    "--speculative-num-steps": _DRAFT_LENGTH,
    "--n-gpu-layers": "use --target-device cuda or cpu",
    "-ngl": "use --target-device cuda or cpu",
    "--tool-call-parser": "use --tool-parser",
    "--enable-auto-tool-choice": "tool_choice: auto is always on",
    "--reasoning-parser": "use --reasoning-tags",
    "--chat-template-file": "use --chat-template",
    "--threads": "use --actors-target-num-cpus",
}
"""By the flag of another server or version, what to use."""


def advice(flag: str) -> str | None:
    """What to use in place of another server's flag; None for a flag of nobody."""
    return INSTEAD.get(flag)
