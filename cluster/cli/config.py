"""``specdec config``: the configuration that is in force, as YAML."""

from __future__ import annotations

import argparse

import yaml

from cluster.cli.flags import Parser, add_service_flags, config_overrides
from cluster.config.files import load_config

USAGE = "[MODEL] [--draft MODEL] [--config FILE.yaml] [KEY ...]"


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec config``: those of ``specdec serve``."""
    add_service_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every key with its value; secrets are masked. Returns the exit code."""
    config = load_config(arguments.config, config_overrides(arguments))
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    return 0
