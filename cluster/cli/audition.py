"""``specdec audition``: what drafts would have earned on recorded answers, without the target where they need none."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.generate import CONFIG_KEYS, SEQUENTIAL_TOKENS
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError
from specdec.drafting.registry import HEADS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.config.app import ServiceConfig
    from specdec.audition.recording import Sample
    from specdec.audition.report import Audition

USAGE = "FILE --draft MODEL [--draft MODEL ...] --target MODEL [--require better] [--json] [KEY ...]"
EXIT_NOT_MET = 3
_MOST = 16


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec audition``."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording, or a log in OpenAI's form, a line an answer; or a folder"
    )
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        dest="drafts",
        action="append",
        required=True,
        help="a draft model, METHOD:PATH for heads (as in eagle3:PATH; loads the target), or ngram for prompt lookup; "
        "others are compared with the first",
    )
    parser.add_argument("--target-step-ms", type=float, help="time of a target step, for the gain")
    parser.add_argument(
        "--draft-step-ms", type=float, action="append", help="time of a draft step: for all drafts, or for each in turn"
    )
    add_log_temperature(parser)
    parser.add_argument("--held-out", action="store_true", help="only samples that specdec train-draft holds out")
    parser.add_argument(
        "--same-target", metavar="FILE", type=Path, help="only samples with a system_fingerprint of this recording"
    )
    parser.add_argument(
        "--require",
        choices=("better", "not-worse"),
        help=f"exit with {EXIT_NOT_MET} unless the last draft is better than the first (p < .001), not worse (p < .05)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    keys = (*CONFIG_KEYS, "draft.quantization", "draft.other_vocabulary", "draft.parallel_drafting")
    left_out = ("draft.model", "draft.method", "draft.heads", "draft.tree_tokens")
    add_config_flags(parser, only=[key for key in keys if key not in left_out])


def add_log_temperature(parser: Parser) -> None:
    """The flag of commands that read logs."""
    parser.add_argument(
        "--log-temperature", type=float, default=1.0, help="of a log's answers whose line does not say; default 1"
    )


def run(arguments: argparse.Namespace) -> int:
    """Try all drafts; returns the exit code."""
    step_ms = _step_ms(arguments)
    if arguments.require and len(arguments.drafts) < 2:
        raise InvalidParameterError("draft", "--require compares the last draft with the first: give --draft twice")

    from specdec.audition.report import as_json, as_table, verdict

    overrides = config_overrides(arguments)
    config = load_config(arguments.config, overrides)
    samples = _samples(arguments, config)
    if arguments.require == "not-worse" and not samples:
        print(f"{arguments.file} has no sample to try: nothing is worse")
        return 0
    if not samples:
        raise InvalidParameterError("file", f"{arguments.file} has no sample with an output that is to be tried")
    auditions = []
    for name in arguments.drafts:
        print(f"{name}: trying it on {len(samples)} samples", file=sys.stderr, flush=True)
        auditions.append(try_draft(arguments.config, overrides, name, samples))
    print(json.dumps(as_json(auditions, step_ms)) if arguments.json else as_table(auditions, step_ms))
    if not arguments.require:
        return 0
    found = verdict(auditions[0], auditions[-1], compared_length(config))
    print(found, file=sys.stderr if arguments.json else sys.stdout)
    is_met = found.is_better if arguments.require == "better" else not found.is_worse
    return 0 if is_met else EXIT_NOT_MET


def _samples(arguments: argparse.Namespace, config: ServiceConfig) -> list[Sample]:
    """Read the samples to try."""
    from cluster.models.sources import target_source
    from specdec.audition.logs import AnswerReader
    from specdec.audition.training import is_held_out

    reader = AnswerReader(target_source(config), arguments.log_temperature)
    samples = [sample for sample in reader.read(arguments.file) if sample.output_token_ids]
    if arguments.held_out:
        samples = [sample for sample in samples if is_held_out(sample)]
    if arguments.same_target is not None:
        allowed = {sample.system_fingerprint for sample in reader.read(arguments.same_target)}
        samples = [sample for sample in samples if sample.system_fingerprint in allowed]
    return samples


def compared_length(config: ServiceConfig) -> int:
    """Return the draft length at which drafts are compared: the configured one, or 4 if that is ``auto``."""
    length = config.num_speculative_tokens
    return SEQUENTIAL_TOKENS if length == "auto" else max(1, min(length, _MOST))


def try_draft(config_file: str | None, overrides: Mapping[str, Any], name: str, samples: Sequence[Sample]) -> Audition:
    """Try one draft model, heads, or prompt lookup, as the configuration runs drafts."""
    from cluster.models.sources import backend_options, draft_source, target_source
    from specdec.audition.audition import audition_heads, audition_lookup, audition_model
    from specdec.drafting.heads import HeadsOptions
    from specdec.models.memory import free_unused

    free_unused()  # of a draft that was tried before
    lengths = range(1, _MOST + 1)
    if name == "ngram":
        return audition_lookup(samples, lengths)
    method, colon, path = name.partition(":")
    if colon and method in HEADS:
        config = load_config(config_file, overrides)
        heads = HeadsOptions(path, _MOST, method=method)
        options = replace(backend_options(config, config.target), heads=heads, max_draft_tokens=_MOST)
        return audition_heads(samples, target_source(config), options, lengths)
    config = load_config(config_file, {**overrides, "draft.model": name})
    draft = draft_source(config)
    assert draft is not None, "the configuration names one"
    options = backend_options(config, config.draft)
    num_step_tokens = 1 + _MOST if config.draft.parallel_drafting else 1
    options = replace(options, num_step_tokens=num_step_tokens, max_draft_tokens=_MOST)
    return audition_model(samples, target_source(config), draft, options, lengths)


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
