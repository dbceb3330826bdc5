"""Progress that nobody takes stops nothing."""

from __future__ import annotations

import sys

import pytest

from cluster.cli.serve import progress, say


class Broken:
    """A stream whose reader has gone, or whose disk is full."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    flush = write


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_a_line_that_cannot_be_written_is_not_an_error(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(error))
    progress()("stopping; Ctrl-C again to force")
    say("Try it")
