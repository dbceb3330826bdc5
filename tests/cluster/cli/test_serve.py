"""Progress that nobody takes stops nothing."""

from __future__ import annotations

import sys

import pytest

from cluster.cli.serve import progress, run_service, say
from cluster.config.app import ServiceConfig
from specdec.core.errors import InvalidParameterError


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


def test_a_separate_draft_is_not_served_on_one_machine() -> None:
    with pytest.raises(InvalidParameterError, match="separate_draft: is for a cluster"):
        run_service(ServiceConfig(separate_draft=True), "")
