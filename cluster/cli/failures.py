"""Errors as one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from specdec.core.errors import ServiceUnavailableError, SpecdecError

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def exit_code(command: str, body: Callable[[], int], *, is_debugged: bool = False) -> int:
    """Run ``body``; turn what it raises into a line and a code.

    Args:
        command: The program's name, for the line.
        body: Returns an exit code.
        is_debugged: Let errors that are nobody's fault show their traceback.

    Returns:
        The body's code; 2 where what was asked is not possible, 1 where something failed, 130 after Ctrl-C.
    """
    try:
        return body()
    except SpecdecError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if _is_users(error) else EXIT_FAILED
    except BrokenPipeError:
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if is_debugged:
            raise
        print(f"{command}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED


def _is_users(error: SpecdecError) -> bool:
    """Whether the user can mend the cause by asking for something else."""
    return bool(getattr(error, "is_users", not isinstance(error, ServiceUnavailableError)))
