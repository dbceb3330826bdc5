"""Arguments in, exit code out. Heavy libraries are imported by the commands that need them."""

from __future__ import annotations

from collections.abc import Sequence

import argcomplete

import specdec
from cluster.cli import audition, config, demo, doctor, generate, record, render, replay, serve, train_draft
from cluster.cli.failures import exit_code
from cluster.cli.flags import Parser
from cluster.cli.vllm_flags import key_entries
from cluster.config.environment import set_for_command

COMMANDS = {
    "serve": (serve, "serve a pair of models over HTTP until Ctrl-C"),
    "generate": (generate, "continue a prompt in this process, without a service"),
    "record": (record, "send requests to a service, and write its answers as a recording"),
    "replay": (replay, "say recorded answers again, and which token differs first"),
    "audition": (audition, "say what drafts would have earned on recorded answers, without the target"),
    "train-draft": (train_draft, "train a draft model on recorded answers, and say whether it is better"),
    "config": (config, "print the configuration that is in force"),
    "render": (render, "write Serve's YAML, or a RayService for KubeRay, from a configuration"),
    "demo": (demo, "put demo models on this machine that are not part of the package"),
    "doctor": (doctor, "say what there is, and whether the pair fits together and into memory"),
}


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="specdec", description="Speculative decoding as a distributed service.")
    parser.add_argument("--version", action="version", version=f"specdec {specdec.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, usage=f"specdec {name} {module.USAGE}")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; see :func:`cluster.cli.failures.exit_code` for what it returns."""
    parser = build_parser()
    argcomplete.autocomplete(parser)
    arguments = parser.parse_args(argv)
    is_debugged = getattr(arguments, "log_level", "info") == "debug"

    def run() -> int:
        keys = key_entries(getattr(arguments, "api_key", None) or ())
        set_for_command(keys, getattr(arguments, "download_dir", None))
        return int(arguments.run(arguments))

    return exit_code(f"specdec {arguments.command}", run, is_debugged=is_debugged)
