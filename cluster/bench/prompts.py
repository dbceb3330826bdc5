"""What is asked in a benchmark: kinds of prompts, all written for it."""

from __future__ import annotations

from specdec.errors import InvalidParameterError

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

_PARTS = (
    '''class Account:
    """A balance that never goes below zero."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        """Add an amount to the balance."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        """Take an amount from the balance."""
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))


''',
    '''def parse_line(line):
    """Split a line of the form 'name = value' into its two parts.

    Returns None for empty lines and comments.
    """
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    name, found, value = line.partition("=")
    if not found:
        raise ValueError("expected 'name = value', got %r" % line)
    return name.strip(), value.strip()


def read_config(path, defaults=None):
    """Read a file of such lines into a dictionary."""
    values = dict(defaults or {})
    with open(path, encoding="utf-8") as file:
        for line in file:
            parsed = parse_line(line)
            if parsed is not None:
                name, value = parsed
                values[name] = value
    return values


''',
    '''def merge(left, right):
    """Merge two sorted lists into one."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def merge_sort(items):
    """Return a sorted copy of a list."""
    if len(items) <= 1:
        return list(items)
    middle = len(items) // 2
    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))


''',
    """class TestConfig(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "config.txt")

    def tearDown(self):
        self.folder.cleanup()

    def write(self, text):
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)

    def test_empty_file(self):
        self.write("")
        self.assertEqual(read_config(self.path), {})

    def test_comment(self):
        self.write("# nothing here\\nname = value\\n")
        self.assertEqual(read_config(self.path), {"name": "value"})


""",
)


def _long(first: int, ending: str) -> str:
    """All parts, beginning with another one each time, and the head of something new."""
    return "".join((*_PARTS[first:], *_PARTS[:first])) + ending


CODE_LONG = (
    _long(0, "def transfer(source, target, amount):\n"),
    _long(1, "def write_config(path, values):\n"),
    _long(2, "def binary_search(items, value):\n"),
    _long(3, "class TestMerge(unittest.TestCase):\n    def test_"),
)

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
