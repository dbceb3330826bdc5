"""Compile a grammar once in a process of its own: what llguidance has begun cannot be stopped, and may take for ever.

Run as a script it reads a grammar in llguidance's own form, and is ended by the kernel where that takes too much.
"""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys

_MOST_CPU_S = 3
"""Processor time, as a loaded machine has nothing to do with what is asked for."""
_MOST_BYTES = 2 << 30

_KNOWN = "<|tool|>"
"""A special token of the tokenizer that is used here; those of others stand for no more than it."""
_UNKNOWN = re.compile(r'unknown special token: "(<[^"]+>)"')
_TOKEN_IDS = re.compile(r"<\[[^\]]*\]>")


def takes_too_much(text: str, most_cpu_s: int = _MOST_CPU_S) -> bool:
    """Whether a grammar takes more processor time or memory to compile than it may; it may be wrong otherwise.

    Args:
        text: In llguidance's own form.
        most_cpu_s: Another bound.
    """
    # The script's own folder is left out of the path: its neighbours have names that others have, too.
    command = [sys.executable, "-P", __file__, str(most_cpu_s), *filter(None, sys.path)]
    ended = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    return ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGABRT)


def _main() -> None:
    sys.path[:] = sys.argv[2:]
    from llguidance import LLMatcher, LLTokenizer

    text = sys.stdin.buffer.read().decode()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_cpu_s = int(used.ru_utime + used.ru_stime) + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (most_cpu_s, most_cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    text, tokenizer = _TOKEN_IDS.sub(_KNOWN, text), LLTokenizer("byte")
    while True:
        unknown = _UNKNOWN.search(LLMatcher(tokenizer, text, log_level=0).get_error())
        if unknown is None or unknown[1] not in text:
            return
        text = text.replace(unknown[1], _KNOWN)


if __name__ == "__main__":
    _main()
