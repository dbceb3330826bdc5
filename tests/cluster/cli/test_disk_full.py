"""Commands that write files, on a disk without room: one line says so, and the next try finds nothing half written."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize("full", ["kustomization.yaml", "serve.yaml", "environment.env", "grace.yaml", "manifests"])
def test_after_a_render_that_found_no_room_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: str
) -> None:
    (tmp_path / "service.yaml").write_text("demo: plain\n")

    def render(name: str) -> int:
        return main(["render", str(tmp_path / "service.yaml"), "--overlay", "dev", "--out", str(tmp_path / name)])

    def files(name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def half(path: Path, text: str, encoding: str) -> None:
        written(path, text[: len(text) // 2 if full in path.name else len(text)], encoding)
        if full in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    written = Path.write_text
    with monkeypatch.context() as patch, room_for_files_of(1000 if full == "manifests" else 1 << 30):
        patch.setattr(Path, "write_text", half)
        assert render("out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec render: ")
    assert "No space left on device" in line or "File too large" in line
    assert full == "manifests" or full not in files("out")
    assert render("out") == render("fresh") == 0
    assert files("out") == files("fresh")
