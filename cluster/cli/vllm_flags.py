"""vLLM's flags, where they mean the same here. What they set are keys of ours, each of which has a flag of its own.

What to use here in place of flags of vLLM, SGLang, llama.cpp's server and others, and of earlier versions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from specdec.core.errors import InvalidParameterError
from specdec.drafting.registry import HEADS, TOKEN_DRAFTERS

ALIASES = {
    "target.dtype": "--dtype",
    "target.quantization": "--quantization",
    "target.revision": "--revision",
    "target.token": "--hf-token",
    "limits.max_logprobs": "--max-logprobs",
    "lora.max_loras": "--max-loras",
    "lora.max_rank": "--max-lora-rank",
    "tls.ssl_certfile": "--ssl-certfile",
    "tls.ssl_keyfile": "--ssl-keyfile",
    "access.allowed_origins": "--allowed-origins",
}
"""By key, vLLM's flag for it: another name of its own flag."""

_METHODS = {"draft_model": "model"} | {name: name for name in (*TOKEN_DRAFTERS, *HEADS)}
"""By vLLM's name of a method of drafting, ours."""
_SPECULATIVE_KEYS = ("model", "num_speculative_tokens", "method", "parallel_drafting")


def add_vllm_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Add and return the flags of vLLM's that are more than another name of one key."""
    group = parser.add_argument_group("as in vLLM")
    return [
        group.add_argument(
            "--speculative-config",
            metavar="JSON",
            help=f"draft model, number of tokens and method ({', '.join(_METHODS)}) as one object: "
            """'{"model": "M", "num_speculative_tokens": 4}'""",
        ),
        group.add_argument(
            "--lora-modules", nargs="+", metavar="NAME=PATH", help="adapters by name; an entry may be a JSON object"
        ),
        group.add_argument(
            "--enable-lora", action="store_true", help="needs --lora-modules or --lora-folder, and adds nothing"
        ),
        group.add_argument(
            "--api-key",
            nargs="+",
            metavar="KEY",
            help="keys that callers need, at least 16 characters each; other users of this machine can read them in "
            "its list of processes: access.api_keys_file is safer",
        ),
        group.add_argument(
            "--enforce-eager", action="store_true", help="no CUDA graphs and nothing compiled: executor: eager"
        ),
        group.add_argument(
            "--download-dir", metavar="FOLDER", help="where models of the hub are kept, for this command alone"
        ),
    ]


def vllm_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """What these flags say, by key.

    Raises:
        InvalidParameterError: One has a value that it cannot have.
    """
    given = vars(arguments)
    overrides: dict[str, Any] = {}
    if given.get("speculative_config") is not None:
        overrides |= _speculative(given["speculative_config"])
    if given.get("lora_modules"):
        overrides["lora.adapters"] = [_module(entry) for entry in given["lora_modules"]]
    if given.get("enforce_eager"):
        overrides["executor"] = "eager"
    if given.get("enable_lora") and not (
        {"lora.adapters", "lora.folder", "lora.hub"} & (overrides.keys() | given.keys())
    ):
        text = "--enable-lora: name adapters by --lora-modules, or by --lora-folder where requests may load them from"
        raise InvalidParameterError("enable-lora", text)
    return overrides


def key_entries(keys: Sequence[str]) -> str:
    """API keys of the command line in the form of the variable that has them.

    Raises:
        InvalidParameterError: One holds a comma.
    """
    if any("," in key for key in keys):
        raise InvalidParameterError(
            "api-key", "--api-key: a key must not contain a comma; separate several keys by spaces"
        )
    return ",".join(f"command-line-{number}={key}" for number, key in enumerate(keys, 1))


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParameterError(flag, f"--{flag}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidParameterError(flag, f"--{flag}: must be a JSON object")
    return found


def _speculative(text: str) -> dict[str, Any]:
    flag, found = "speculative-config", _object("speculative-config", text)
    unknown = found.keys() - set(_SPECULATIVE_KEYS)
    if unknown:
        allowed = ", ".join(_SPECULATIVE_KEYS)
        raise InvalidParameterError(flag, f"--{flag}: unknown key '{min(unknown)}'; allowed are {allowed}")
    named = found.get("method", "draft_model" if "model" in found else None)
    if named is not None and named not in _METHODS:
        raise InvalidParameterError(flag, f"--{flag}: method must be one of {', '.join(_METHODS)}")
    overrides: dict[str, Any] = {}
    if named is not None:
        overrides["draft.method"] = _METHODS[named]
    if "num_speculative_tokens" in found:
        overrides["num_speculative_tokens"] = found["num_speculative_tokens"]
    if "parallel_drafting" in found:
        overrides["draft.parallel_drafting"] = found["parallel_drafting"]
    if "model" in found and named not in TOKEN_DRAFTERS:
        overrides["draft.heads" if named in HEADS else "draft.model"] = found["model"]
    return overrides


def _module(entry: str) -> dict[str, Any]:
    if entry.lstrip().startswith("{"):
        found = _object("lora-modules", entry)
        unknown = found.keys() - {"name", "path", "base_model_name"}
        if unknown or not {"name", "path"} <= found.keys():
            raise InvalidParameterError("lora-modules", "--lora-modules: an object must have name and path")
        return {"name": found["name"], "path": found["path"]}
    name, _, path = entry.partition("=")
    if not name or not path:
        raise InvalidParameterError("lora-modules", f"--lora-modules: {entry} must have the form NAME=PATH")
    return {"name": name, "path": path}


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
    "--mem-fraction-static": "use --gpu-memory-utilization",
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
