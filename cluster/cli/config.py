"""``specdec config``: the configuration that is in force, as YAML."""

from __future__ import annotations

import argparse

import yaml

from cluster.cli.flags import add_config_flags, add_model_argument, config_overrides
from cluster.config_files import load_config

USAGE = "[MODEL] [--draft MODEL] [--config FILE.yaml] [KEY ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec config``: those of ``specdec serve``."""
    add_model_argument(parser)
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every key with its value; secrets are masked. Returns the exit code."""
    config = load_config(arguments.config, config_overrides(arguments))
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    return 0
