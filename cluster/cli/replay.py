"""``specdec replay``: whether the target says recorded answers again, token by token."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cluster.cli.audition import add_log_temperature
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.generate import CONFIG_KEYS, build_engine
from cluster.config.files import load_config

USAGE = "FILE [--target MODEL] [--json] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec replay``."""
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="recording, or a log in OpenAI's form, a line an answer"
    )
    add_log_temperature(parser)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each sample")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    add_config_flags(parser, only=(*CONFIG_KEYS, "exactness"))


def run(arguments: argparse.Namespace) -> int:
    """Replay all samples; returns 0 if every one that could be compared is the same, else 1."""
    from dataclasses import asdict

    from cluster.models.sources import target_source
    from specdec.audition.logs import AnswerReader
    from specdec.audition.replay import replay

    config = load_config(arguments.config, config_overrides(arguments))
    samples = list(AnswerReader(target_source(config), arguments.log_temperature).read(arguments.file))
    engine = build_engine(config)
    num_same = num_skipped = 0
    for one in replay(engine, samples):
        num_same += one.is_same
        num_skipped += bool(one.skipped)
        if arguments.json:
            print(json.dumps(asdict(one) | {"is_same": one.is_same}), flush=True)
        elif one.skipped or one.error:
            print(f"sample {one.number}: {one.skipped and 'skipped: '}{one.skipped or one.error}", flush=True)
        elif not one.is_same:
            print(f"sample {one.number}: output token {one.place} was {one.recorded}, and is {one.said}", flush=True)
    num_compared = len(samples) - num_skipped
    if not arguments.json:
        print(f"{num_same} of {num_compared} samples are the same; {num_skipped} skipped")
    return int(num_same < num_compared)
