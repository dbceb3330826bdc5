"""Arguments in, exit code out. Heavy libraries are imported by the commands that need them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from cluster.cli import doctor, generate, serve
from cluster.cli.flags import Parser
from specdec.errors import ServiceUnavailableError, SpecdecError

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

COMMANDS = {
    "serve": (serve, "serve a pair of models over HTTP until Ctrl-C"),
    "generate": (generate, "continue a prompt in this process, without a service"),
    "doctor": (doctor, "say what there is, and whether the pair fits together and into memory"),
}


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="specdec", description="Speculative decoding as a distributed service.")
    parser.add_argument("--version", action="version", version=f"specdec {importlib.metadata.version('specdec')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, usage=f"specdec {name} {module.USAGE}")
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0 where it did what was asked, 2 where what was asked is not possible, 1 where something failed, 130 after
        Ctrl-C. Errors are one line on stderr.
    """
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except SpecdecError as error:
        print(f"specdec {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if is_users(error) else EXIT_FAILED
    except BrokenPipeError:
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if getattr(arguments, "log_level", "info") == "debug":
            raise
        line = " ".join(str(error).split())
        print(f"specdec {arguments.command}: {type(error).__name__}: {line}", file=sys.stderr)
        return EXIT_FAILED


def is_users(error: SpecdecError) -> bool:
    """Whether the user can mend the cause by asking for something else."""
    return bool(getattr(error, "is_users", not isinstance(error, ServiceUnavailableError)))
