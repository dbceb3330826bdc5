"""``specdec generate``: both models in this process, the text to the terminal as it comes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.app import ServiceConfig
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError
from specdec.core.validation import MAX_TEMPERATURE

if TYPE_CHECKING:
    from specdec.core.params import SamplingParams
    from specdec.engine.engine import SpeculativeEngine
    from specdec.engine.results import SpecStats

CONFIG_KEYS = (
    "demo",
    *(
        f"{role}.{name}"
        for role in ("target", "draft")
        for name in ("model", "revision", "token", "engine", "dtype", "device")
    ),
    "draft.method",
    "draft.heads",
    "draft.tree_tokens",
    "target.device_map",
    "draft.device_map",
    "target.kv_cache_memory",
    "draft.kv_cache_memory",
    "max_model_len",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_speculative_tokens",
    "logits_processors",
    "log_level",
)

SEQUENTIAL_TOKENS = 4
"""In one process nothing is measured: what ``auto`` stands for here."""

USAGE = "PROMPT [--target MODEL --draft MODEL] [--temperature T] [--seed N] [--max-tokens N] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec generate``."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--temperature",
        type=float,
        default=None,
        help="0 takes the most likely token; default: what the model's generation config says, else 1",
    )
    parser.add_argument("--seed", type=int, default=None, help="seed of the noise; a new one each time by default")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate (default 128)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    add_config_flags(parser, only=CONFIG_KEYS)


def run(arguments: argparse.Namespace) -> int:
    """Generate once; returns the exit code."""
    config = load_config(arguments.config, config_overrides(arguments))
    options = request_options(arguments)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    engine = build_engine(config)
    options["sampling"] = sampling_params(engine.default_sampling, arguments)
    if arguments.json:
        print_json(engine, prompt, options)
    else:
        print_stream(engine, prompt, options)
    return 0


def request_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say about the one request.

    Raises:
        InvalidParameterError: A flag is out of its range.
    """
    if arguments.temperature is not None and not 0 <= arguments.temperature <= MAX_TEMPERATURE:
        raise InvalidParameterError("temperature", f"--temperature must be a number from 0 to {MAX_TEMPERATURE:g}")
    if arguments.max_tokens < 1:
        raise InvalidParameterError("max_tokens", "--max-tokens must be at least 1")
    seed = secrets.randbits(64) if arguments.seed is None else arguments.seed
    if not 0 <= seed < 1 << 64:
        raise InvalidParameterError("seed", "--seed must be at least 0 and less than 2**64")
    return {"seed": seed, "max_tokens": arguments.max_tokens}


def sampling_params(defaults: SamplingParams, arguments: argparse.Namespace) -> SamplingParams:
    """Return the model's own defaults, with what the flags say in their place."""
    if arguments.temperature is None:
        return defaults
    return dataclasses.replace(defaults, temperature=arguments.temperature)


def build_engine(config: ServiceConfig) -> SpeculativeEngine:
    """Load both models into this process; progress goes to stderr."""
    from cluster.models.sources import backend_options, check_one_process, draft_source, ngram_options, target_source
    from specdec.engine.engine import SpeculativeEngine

    check_one_process(config)
    return SpeculativeEngine.from_pretrained(
        target_source(config),
        draft_source(config),
        num_speculative_tokens=SEQUENTIAL_TOKENS
        if config.num_speculative_tokens == "auto"
        else config.num_speculative_tokens,
        ngram=ngram_options(config),
        options=backend_options(config, config.target),
        draft_options=backend_options(config, config.draft),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )


def print_json(engine: SpeculativeEngine, prompt: str, options: dict[str, Any]) -> None:
    """Print the whole result as one object."""
    result = engine.generate(prompt, **options)
    body = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "stats": stats_as_json(result.stats),
    }
    print(json.dumps(body), flush=True)


def print_stream(engine: SpeculativeEngine, prompt: str, options: dict[str, Any]) -> None:
    """Print the continuation as it comes, and a line of figures on stderr."""
    started_s = time.monotonic()
    for event in engine.stream(prompt, **options):
        print(event.text, end="", flush=True)
    print(flush=True)
    stats, duration_s = engine.stats, time.monotonic() - started_s
    figures = f"{stats.num_tokens} tokens, {stats.num_tokens / duration_s:.1f} per second"
    if stats.num_drafts:
        figures += f", {stats.acceptance_rate:.0%} of {stats.num_draft_tokens} draft tokens accepted"
    print(f"[{figures}]", file=sys.stderr)


def stats_as_json(stats: SpecStats) -> dict[str, Any]:
    """The counts of a request, with the two ratios that are read most."""
    ratios = {"acceptance_rate": stats.acceptance_rate, "mean_acceptance_length": stats.mean_acceptance_length}
    return dataclasses.asdict(stats) | ratios
