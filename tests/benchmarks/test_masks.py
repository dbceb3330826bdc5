"""What grammars cost a step."""

from __future__ import annotations

import pytest

from benchmarks.masks import MaskTime, main, mask_table


def test_times_are_told_in_microseconds_a_row() -> None:
    text = mask_table([MaskTime(16, 4, 160e-6, 480e-6, 320e-6)])
    assert text[2:] == ["| 16 | 4 | 10 | 30 | 20 | 60 |"]


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of steps in which nothing fails and no draft is cut, which the script asserts itself."""
    main(["--rows", "1,3", "--drafts", "0,2", "--repeats", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines[3:]] == [["| 1", "0"], ["| 1", "2"], ["| 3", "0"], ["| 3", "2"]]
