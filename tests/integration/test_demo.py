"""``make demo``: its command, and that a text which differs makes it fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.demo import PROMPTS, Row, is_same, report
from tests.integration.kills import Stream
from tests.integration.running import ROOT


def test_the_demo_shows_the_same_texts_and_leaves_with_0() -> None:
    command = [sys.executable, "-m", "examples.demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.partition("Act 3")[2].splitlines()
    assert sum(line.endswith("  same text") for line in table) == len(PROMPTS) + 1
    assert "then went on to its end" in done.stdout
    assert "Every text is the same" in done.stdout


@pytest.mark.parametrize(
    "other", [Stream("def g", 2), Stream("def f", 3), Stream("def f", 2, error="lost"), Stream("def f", None)]
)
def test_a_text_that_differs_fails_the_demo(other: Stream, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row(name, 2, is_same(Stream("def f", 2), stream), (2.0, 1.0))
        for name, stream in (("x", Stream("def f", 2)), ("y", other))
    ]
    assert report(rows, 60.0) == 1
    assert "FAILED: a text differs (y)" in capsys.readouterr().out
    assert report(rows[:1], 60.0) == 0
