"""A module outside the tree, with a drafter from tokens."""

from pathlib import Path

import pytest

MODULE = '''
from specdec.core.drafts import Draft


class Counting:
    """Drafts that each token is one more than the one before it."""

    is_long = True

    def __init__(self, most):
        self.most, self.judged = most, []

    def draft(self, log, room, reading):
        (last,) = log.tail(len(log) - 1)
        return Draft(tuple(range(last + 1, last + 1 + min(self.most, room))), source="counting")

    def judge(self, num_drafted, num_accepted):
        self.judged.append((num_drafted, num_accepted))


def drafter(args):
    """Makes the drafter of each sequence."""
    return lambda spec, most: Counting(min(3, most))
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_specdec.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
