"""``specdec train-draft`` and the audition that decides: what they print, and with which exit code they end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import main
from specdec.audition.recording import Sample, write_recording
from tests.specdec.audition.learned import cycles, sample, shuffled
from tests.specdec.vocabularies import DRAFT, save_shuffled

TARGET = str(DRAFT.parent / "target")
FLAGS = [
    "--max-model-len",
    "64",
    "--draft-device",
    "cpu",
    "--draft-kv-cache-memory",
    "64MiB",
    "--draft-dtype",
    "float32",
]
TRAINING = ["--epochs", "2", "--batch-tokens", "256", "--learning-rate", "0.003"]


def recorded(path: Path, samples: list[Sample]) -> str:
    write_recording(path, samples)
    return str(path)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that has learned."""
    folder = tmp_path_factory.mktemp("learned")
    file = recorded(folder / "r.jsonl", cycles(150))
    assert main(["train-draft", file, "--draft", str(DRAFT), "--out", str(folder / "out"), *TRAINING, *FLAGS]) == 0
    return str(folder / "out")


def test_it_says_that_the_draft_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recordings").mkdir()
    samples = cycles(150)
    for number in range(2):
        recorded(tmp_path / "recordings" / f"{number}.jsonl", samples[number::2])
    out = str(tmp_path / "out")
    argv = ["train-draft", str(tmp_path / "recordings"), "--target", TARGET, "--draft", str(DRAFT), "--out", out]
    assert main([*argv, *TRAINING, *FLAGS, "--lora-rank", "8", "--learning-rate", "0.02"]) == 0
    printed = capsys.readouterr()
    assert f"{out} is better than {DRAFT}: +" in printed.out
    assert " by 12 samples" in printed.out
    assert "held-out loss" in printed.err


def test_it_says_that_the_draft_is_not_better(tmp_path: Path, learned: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "r.jsonl", shuffled(cycles(150)))
    argv = ["train-draft", file, "--draft", learned, "--out", str(tmp_path / "out"), "--epochs", "1"]
    assert main([*argv, "--learning-rate", "1e-8", *FLAGS]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "is not better than" in said
    assert said.endswith(f"; keep {learned}")


def test_the_exit_code_says_whether_a_draft_may_be_deployed(
    tmp_path: Path, learned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded(tmp_path / "r.jsonl", cycles(150))
    other = recorded(tmp_path / "o.jsonl", [replace(one, system_fingerprint="of another") for one in cycles(150)])

    def code(first: str, last: str, *flags: str) -> int:
        return main(["audition", *flags, "--target", TARGET, "--draft", first, "--draft", last, "--held-out", *FLAGS])

    assert code(str(DRAFT), learned, file, "--require", "better") == 0
    assert code(learned, str(DRAFT), file, "--require", "better") == 3
    assert code(str(DRAFT), str(DRAFT), file, "--require", "better") == 3
    assert code(str(DRAFT), str(DRAFT), file, "--require", "not-worse") == 0
    assert code(learned, str(DRAFT), file, "--require", "not-worse", "--json") == 3
    assert code(learned, str(DRAFT), file, "--require", "not-worse", "--same-target", file) == 3
    assert code(learned, str(DRAFT), other, "--require", "not-worse", "--same-target", file) == 0
    assert "nothing is worse" in capsys.readouterr().out


def test_what_cannot_be_trained_is_refused_with_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recorded(tmp_path / "r.jsonl", cycles(60))
    other = str(save_shuffled(tmp_path / "other"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").touch()
    for words, told in (
        ([file, "--epochs", "0"], "--epochs must be at least 1"),
        ([file, "--batch-tokens", "1"], "--batch-tokens must be at least 2"),
        ([file, "--lora-rank", "-1"], "--lora-rank must be at least 0"),
        ([file, "--checkpoint-steps", "0"], "--checkpoint-steps must be at least 1"),
        ([file, "--learning-rate", "nan"], "--learning-rate must be above 0"),
        ([file, "--draft-dtype", "float16"], "draft.dtype: float16 is not trained in"),
        ([file, "--out", str(tmp_path / "full")], "is not an empty folder"),
        ([file, "--target", TARGET, "--draft", other], "vocabular"),
        ([recorded(tmp_path / "empty", [])], "FILE has 0 samples with an output to learn"),
        ([recorded(tmp_path / "far", [*cycles(60), sample((5000,), (1,))])], "it is of another vocabulary"),
        ([str(tmp_path / "none")], "No such file"),
    ):
        code = main(["train-draft", "--draft", str(DRAFT), "--out", str(tmp_path / "out"), *words])
        line = capsys.readouterr().err.splitlines()[-1]  # after what is said of loading
        assert code == (1 if "No such" in told else 2)
        assert told in line
        assert not (tmp_path / "out").exists()
