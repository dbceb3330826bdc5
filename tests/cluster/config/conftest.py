"""A module outside the tree, with keys of its own and a drafter from tokens."""

from pathlib import Path

import pytest

MODULE = '''
from pydantic import Field

from cluster.config.base import StrictModel
from specdec.core.drafts import Draft


class Keys(StrictModel):
    """Its keys."""

    ahead: int = Field(1, ge=1, le=8)


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
    ahead = args.extension(Keys).ahead
    return lambda spec, most: Counting(min(ahead, most))
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_specdec.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
