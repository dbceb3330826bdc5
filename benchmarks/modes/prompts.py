"""What is asked in a benchmark: kinds of prompts."""

from __future__ import annotations

import bisect
import inspect
import queue
import shlex
import textwrap

from specdec.core.errors import InvalidParameterError

CODE = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "    def test_split(self):\n        self.assertEqual(",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value, parent=None):\n",
    "async def connect(host, port, timeout=None):\n",
    'def encode(text, encoding="utf-8"):\n    """Return',
)

PROSE = (
    "This module reads a configuration file and",
    "# The cache holds at most a fixed number of entries. When it is full,",
    "Installation\n============\n\nTo install the package, run",
    '"""Return the first item of a sequence, or a default if the sequence is',
)

_LONG_CHARACTERS = 2600
_ENDINGS = {
    bisect: "\n\ndef binary_search(items, value):\n",
    queue: "\n\ndef merge_sorted(left, right):\n",
    shlex: "\n\ndef read_config(path, defaults=None):\n",
    textwrap: "\n\nclass TestWrap(unittest.TestCase):\n    def test_",
}

CODE_LONG = tuple(inspect.getsource(module)[:_LONG_CHARACTERS] + end for module, end in _ENDINGS.items())
"""The head of a module that every Python has, and of something new."""

_MIXED = tuple(prompt for trio in zip(CODE[:4], CODE_LONG, PROSE, strict=True) for prompt in trio)

PROMPTS = {"code": CODE, "code-long": CODE_LONG, "prose": PROSE, "mixed": _MIXED}
"""By kind: heads of code (about 15 tokens), a file with the head of something new (about 900), sentences, all."""


def prompts_of(kind: str, count: int) -> tuple[str, ...]:
    """The first ``count`` prompts of a kind, again from the start where there are fewer.

    Raises:
        InvalidParameterError: There is no such kind.
    """
    if kind not in PROMPTS:
        raise InvalidParameterError("prompts", f"prompts: {kind!r} is none of {', '.join(PROMPTS)}")
    known = PROMPTS[kind]
    return tuple(known[i % len(known)] for i in range(count))
