"""A command that writes files, on a disk without room: one line says so, the next try finds nothing half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import main
from tests.disk import room_for_files_of


def test_a_demo_that_finds_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr("cluster.models.demos._made_folder", lambda name: home / name)
    with room_for_files_of(1 << 20):
        assert main(["demo", "make", "hybrid"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec demo: demo hybrid: ")
    assert "File too large" in line
    assert list(home.iterdir()) == []
    assert main(["demo", "make", "hybrid"]) == 0
