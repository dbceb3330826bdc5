"""``specdec audition``: what draft models would have earned on recorded answers, without the target."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.generate import CONFIG_KEYS
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config.app import ServiceConfig
    from specdec.audition.recording import Sample
    from specdec.audition.report import Audition

USAGE = "FILE --draft MODEL [--draft MODEL ...] --target MODEL [--json] [KEY ...]"
_MOST = 16


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec audition``."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording, or a log in OpenAI's form, a line an answer"
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        dest="drafts",
        action="append",
        required=True,
        help="a draft model, or ngram for prompt lookup; the first is what others are compared with",
    )
    parser.add_argument("--target-step-ms", type=float, help="time of a target step, for the gain")
    parser.add_argument(
        "--draft-step-ms", type=float, action="append", help="time of a draft step: for all drafts, or for each in turn"
    )
    add_log_temperature(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    keys = (*CONFIG_KEYS, "draft.quantization", "draft.other_vocabulary", "draft.parallel_drafting")
    left_out = ("draft.model", "draft.method", "draft.heads", "draft.tree_tokens", "num_speculative_tokens")
    add_config_flags(parser, only=[key for key in keys if key not in left_out])


def add_log_temperature(parser: Parser) -> None:
    """The flag of commands that read logs."""
    parser.add_argument(
        "--log-temperature", type=float, default=1.0, help="of a log's answers whose line does not say; default 1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Try all drafts; returns the exit code."""
    step_ms = _step_ms(arguments)

    from cluster.models.sources import target_source
    from specdec.audition.logs import AnswerReader
    from specdec.audition.report import as_json, as_table

    reader = AnswerReader(target_source(_config(arguments, None)), arguments.log_temperature)
    samples = [sample for sample in reader.read(arguments.file) if sample.output_token_ids]
    if not samples:
        raise InvalidParameterError("file", f"{arguments.file} has no sample with an output")
    auditions = [_audition(arguments, name, samples) for name in arguments.drafts]
    print(json.dumps(as_json(auditions, step_ms)) if arguments.json else as_table(auditions, step_ms))
    return 0


def _audition(arguments: argparse.Namespace, name: str, samples: Sequence[Sample]) -> Audition:
    from cluster.models.sources import backend_options, draft_source, target_source
    from specdec.audition.audition import audition_lookup, audition_model

    lengths = range(1, _MOST + 1)
    if name == "ngram":
        return audition_lookup(samples, lengths)
    config = _config(arguments, name)
    draft = draft_source(config)
    assert draft is not None, "the configuration names one"
    options = backend_options(config, config.draft)
    num_step_tokens = 1 + _MOST if config.draft.parallel_drafting else 1
    options = replace(options, num_step_tokens=num_step_tokens, max_draft_tokens=_MOST)
    return audition_model(samples, target_source(config), draft, options, lengths)


def _config(arguments: argparse.Namespace, draft: str | None) -> ServiceConfig:
    """The configuration with one draft."""
    overrides: dict[str, Any] = config_overrides(arguments)
    overrides["draft"] = overrides.get("draft", {}) | {"model": draft}
    return load_config(arguments.config, overrides)


def _step_ms(arguments: argparse.Namespace) -> tuple[float, list[float]] | None:
    """Step times of the target and of each draft; None if none are given.

    Raises:
        InvalidParameterError: Some are missing, or are not above 0.
    """
    target_ms, draft_ms = arguments.target_step_ms, arguments.draft_step_ms or []
    if target_ms is None and not draft_ms:
        return None
    num_drafts = len(arguments.drafts)
    if target_ms is None or len(draft_ms) not in (1, num_drafts):
        message = f"--target-step-ms goes with one --draft-step-ms, or {num_drafts}, not with {len(draft_ms)}"
        raise InvalidParameterError("draft_step_ms", message)
    if not min(target_ms, *draft_ms) > 0:
        raise InvalidParameterError("draft_step_ms", "--target-step-ms and --draft-step-ms must be above 0")
    return target_ms, draft_ms * num_drafts if len(draft_ms) == 1 else draft_ms
