"""``specdec audit``: answers are read by the model that they name, and held against their receipts."""

from __future__ import annotations

import argparse
import random
import sys
from typing import TYPE_CHECKING

from cluster.cli.failures import EXIT_FAILED
from cluster.cli.flags import Parser, config_overrides
from cluster.cli.receipts import add_common_arguments, objects, open_answer, own_model, progress, public_key
from cluster.config.app import ServiceConfig
from cluster.config.files import load_config
from specdec.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from specdec.receipts.audit import Answer, Auditor, Verdict
    from specdec.receipts.format import Receipt
    from specdec.receipts.signing import PublicKey

USAGE = "FILE [FILE ...] [--share P] [--url URL [--priority N]] [--config FILE.yaml] [--public-key FILE.pem] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """Its flags."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON or JSON lines: receipts, or answers with one")
    parser.add_argument("--share", type=float, default=1.0, help="part of them that is read, drawn at random")
    parser.add_argument("--priority", type=int, default=100, help="of requests to --url: lower ones go first")
    parser.add_argument("--json", action="store_true", help="print an object for each answer instead of a line")
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is found; returns 1 where an answer is flagged or cannot be audited."""
    if not 0 < arguments.share <= 1:
        raise InvalidParameterError("share", "--share must be above 0 and at most 1")
    config = load_config(arguments.config, config_overrides(arguments))
    answers, num_unsigned = drawn(arguments, public_key(arguments, config))
    verdicts, bounds = auditor(config, arguments, answers[0].receipt).audit(answers)
    for verdict in verdicts:
        print_verdict(verdict, as_json=arguments.json)
    counts = {status: sum(one.status == status for one in verdicts) for status in ("ok", "flagged", "refused")}
    figures = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(
        f"[{len(verdicts)} answers, {sum(one.num_tokens for one in verdicts)} tokens: {figures}; bounds: "
        f"gap {bounds.gap:.2g}, log probability {bounds.logprob:.2g}"
        f"{f'; {num_unsigned} signatures not checked' if num_unsigned else ''}]",
        file=sys.stderr,
    )
    return 0 if counts["ok"] == len(verdicts) else EXIT_FAILED


def drawn(arguments: argparse.Namespace, key: PublicKey | None) -> tuple[list[Answer], int]:
    """The answers to be audited, at least one, and how many of their signatures were not checked."""
    from specdec.receipts.audit import Answer

    found = [one for file in arguments.files for one in objects(file)]
    if not found:
        raise InvalidParameterError("files", "there are no receipts in these files")
    chosen = random.SystemRandom().sample(found, max(1, round(arguments.share * len(found))))
    opened = [open_answer(one, key) for one in chosen]
    return [Answer(one.receipt, shown) for one, shown in opened], sum(not one.is_signed for one, _ in opened)


def auditor(config: ServiceConfig, arguments: argparse.Namespace, receipt: Receipt) -> Auditor:
    """Reads answers in this process, or in the service that ``--url`` names; ``receipt`` is of one of them."""
    from cluster.cli.service_rerun import ServiceRerun
    from cluster.cli.service_scorer import ServiceScorer
    from cluster.models.sources import backend_options, check_one_process, target_source
    from specdec.checkpoint.compat import tokenizer_width
    from specdec.engine.build import make_sampler
    from specdec.models.loading import load_tokenizer
    from specdec.receipts.audit import Auditor
    from specdec.receipts.scoring import Scorer

    source = target_source(config)
    width = tokenizer_width(load_tokenizer(source))
    options = backend_options(config, config.target, width)
    if arguments.url is not None:
        sampler = make_sampler(source, width, receipt.eos_token_ids, options)
        service = ServiceRerun(arguments.url, arguments.api_key_file)
        reader = ServiceScorer(service, sampler, receipt, arguments.priority)
        return Auditor(reader, reader.own)
    check_one_process(config)
    return Auditor(Scorer.from_pretrained(source, options, progress), own_model(config))


def print_verdict(verdict: Verdict, *, as_json: bool) -> None:
    """A line on what became of an answer."""
    if as_json:
        import msgspec

        print(msgspec.json.encode(verdict).decode())
    elif verdict.status != "ok":
        print(f"{verdict.id}: {verdict.status}: {'; '.join(verdict.reasons)}")
