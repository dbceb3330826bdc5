"""``specdec train-draft``: a draft model that has learned recorded answers, and whether it is better for it."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.audition import add_log_temperature, compared_length, try_draft
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from cluster.config.app import ServiceConfig
    from specdec.audition.training import TrainingPlan
    from specdec.models.loading import ModelSource

USAGE = "FILE --draft MODEL --out FOLDER [--target MODEL] [--lora-rank RANK] [KEY ...]"
_KEYS = ("target.model", "target.revision", "target.token", "draft.revision", "draft.token", "draft.dtype")


def add_arguments(parser: Parser) -> None:
    """Add the flags of ``specdec train-draft``."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording: a sample a line of JSON, or a folder of such"
    )
    parser.add_argument("--draft", metavar="MODEL", dest="start", required=True, help="the draft model to begin with")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="where the trained draft goes")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the recording (default 1)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of a step, with prompts (default 4096)")
    parser.add_argument("--learning-rate", type=float, help="peak rate of AdamW (default 0.0001, with LoRA 0.001)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train changes of this rank; 0 (default): all weights")
    parser.add_argument("--checkpoint-steps", type=int, default=50, help="steps between checkpoints (default 50)")
    add_log_temperature(parser)
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    keys = (*_KEYS, "draft.device", "draft.kv_cache_memory", "max_model_len", "num_speculative_tokens", "log_level")
    add_config_flags(parser, only=keys)


def run(arguments: argparse.Namespace) -> int:
    """Train, and try both drafts on the samples held out; returns the exit code."""
    overrides = config_overrides(arguments)
    if arguments.config is None:
        overrides.setdefault("target.model", arguments.start)  # whose tokens the recording has
    config = load_config(arguments.config, overrides | {"draft.model": arguments.start})

    from cluster.models.sources import target_source
    from specdec.audition.logs import AnswerReader
    from specdec.audition.report import as_table, verdict
    from specdec.audition.training import check_out, split, train_draft
    from specdec.models.describe import describe_pair

    source = _source(config)
    plan = _plan(arguments, source)
    check_out(arguments.out)
    target = target_source(config)
    samples = list(AnswerReader(target, arguments.log_temperature).read(arguments.file))
    _, held_out = split(samples)
    describe_pair(target, source)
    train_draft(samples, source, arguments.out, plan, lambda line: print(line, file=sys.stderr, flush=True))
    first, trained = (
        try_draft(arguments.config, overrides, name, held_out) for name in (arguments.start, str(arguments.out))
    )
    print(as_table([first, trained], None))
    found = verdict(first, trained, compared_length(config))
    print(found if found.is_better else f"{found}; keep {arguments.start}")
    return 0


def _source(config: ServiceConfig) -> ModelSource:
    """Return the draft to begin with.

    Raises:
        InvalidParameterError: The configuration drafts in a way that is not trained here.
    """
    from cluster.models.sources import draft_source

    if config.draft.parallel_drafting or config.draft.other_vocabulary:
        key = "parallel_drafting" if config.draft.parallel_drafting else "other_vocabulary"
        message = f"draft.{key}: train-draft takes a draft with the target's vocabulary, which gives a token a pass"
        raise InvalidParameterError(f"draft.{key}", message)
    if config.draft.dtype == "float16":
        raise InvalidParameterError("draft.dtype", "draft.dtype: float16 is not trained in: use bfloat16 or float32")
    source = draft_source(config)
    assert source is not None, "the configuration names one"
    return replace(source, device_map=None, adapters=None, engine="transformers")


def _plan(arguments: argparse.Namespace, source: ModelSource) -> TrainingPlan:
    """Return how to train.

    Raises:
        InvalidParameterError: A flag is out of its range.
    """
    from specdec.audition.training import TrainingPlan
    from specdec.models.loading import choose_device

    for name, least in (("epochs", 1), ("batch_tokens", 2), ("lora_rank", 0), ("checkpoint_steps", 1)):
        if getattr(arguments, name) < least:
            raise InvalidParameterError(name, f"--{name.replace('_', '-')} must be at least {least}")
    rate = arguments.learning_rate
    if rate is None:
        rate = 1e-3 if arguments.lora_rank else 1e-4
    if not 0 < rate < math.inf:
        raise InvalidParameterError("learning_rate", "--learning-rate must be above 0")
    has_bfloat16 = source.dtype == "bfloat16" or (source.dtype == "auto" and choose_device(source.device).type != "cpu")
    return TrainingPlan(
        arguments.epochs, arguments.batch_tokens, rate, arguments.lora_rank, has_bfloat16, arguments.checkpoint_steps
    )
