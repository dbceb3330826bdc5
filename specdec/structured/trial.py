"""Compile a grammar once in a process of its own: what llguidance has begun cannot be stopped, and may take for ever.

Run as a script it reads a grammar in llguidance's own form, and is ended by the kernel where that takes too much.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

_MOST_CPU_S = 3
"""Processor time, as a loaded machine has nothing to do with what is asked for."""
_MOST_BYTES = 32 << 20
"""Of address space, beside what the process has before."""
_STACK_BYTES = 2 << 20
"""Of the thread that compiles: less than whoever compiles in earnest has, so that no depth of nesting ends that one."""

_KNOWN = "<|tool|>"
"""A special token of the tokenizer that is used here; those of others stand for no more than it."""
_UNKNOWN = re.compile(r'unknown special token: "(<[^"]+>)"')
_TOKEN_IDS = re.compile(r"<\[[^\]]*\]>")


def takes_too_much(text: str, most_cpu_s: int = _MOST_CPU_S) -> bool:
    """Whether a grammar takes more processor time, memory or stack than it may; it may be wrong otherwise.

    Args:
        text: In llguidance's own form.
        most_cpu_s: Another bound.

    Raises:
        OSError: The process was not begun, or did not come to an end of its own: that says nothing of the grammar.
    """
    # The script's own folder is left out of the path: its neighbours have names that others have, too.
    command = [sys.executable, "-P", __file__, str(most_cpu_s), *filter(None, sys.path)]
    ended = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if ended.returncode > 0 or ended.returncode == -signal.SIGKILL:  # which is no limit of ours
        raise OSError(f"the process that tries it ended with {ended.returncode}")
    return ended.returncode < 0  # by a signal


def _main() -> None:
    sys.path[:] = sys.argv[2:]
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_try)
    thread.start()
    thread.join()


def _try() -> None:
    from llguidance import LLMatcher, LLTokenizer

    text, tokenizer = _TOKEN_IDS.sub(_KNOWN, sys.stdin.buffer.read().decode()), LLTokenizer("byte")
    _limit(int(sys.argv[1]))
    while True:
        matcher = LLMatcher(tokenizer, text, log_level=0)
        # What is forced, and which tokens are allowed, is asked in every step.
        matcher.compute_ff_tokens()
        matcher.compute_bitmask()
        unknown = _UNKNOWN.search(matcher.get_error())
        if unknown is None or unknown[1] not in text:
            return
        text = text.replace(unknown[1], _KNOWN)


def _limit(most_cpu_s: int) -> None:
    used, num_pages = resource.getrusage(resource.RUSAGE_SELF), int(Path("/proc/self/statm").read_text().split()[0])
    most_cpu_s += int(used.ru_utime + used.ru_stime)
    most_bytes = num_pages * resource.getpagesize() + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _main()
