"""``specdec doctor`` on a model with recurrent layers."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.cli.doctor import branch_line
from cluster.models.demos import demo_folder
from tests.specdec.models.recurrent_families import make_recurrent


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, ...]:
    """A hybrid target with the demo draft, as flags."""
    make_recurrent("bamba", vocab_size=4096, mamba_d_state=32).save_pretrained(tmp_path)
    for file in demo_folder("draft").glob("*token*"):
        shutil.copy(file, tmp_path)
    return ("--target", str(tmp_path), "--draft", str(demo_folder("draft")), "--max-model-len", "256")


def test_doctor_says_what_states_take(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "8MiB", "--num-speculative-tokens", "4")
    assert main(["doctor", *pair, *memory]) == 0
    text = capsys.readouterr().out
    for words in ("recurrent: ", "MiB of checkpoints a sequence", "rolled back by up to 16 tokens,"):
        assert words in text
    assert "parity check passed" in text


def test_doctor_says_how_many_branches_of_a_recurrent_draft_fit(
    pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pair[1]
    flags = ("--target", str(demo_folder("target")), "--draft", folder, "--max-model-len", "256")
    memory = ("--target-kv-cache-memory", "16MiB", "--draft-kv-cache-memory", "16MiB")
    assert main(["doctor", *flags, *memory]) == 0
    text = capsys.readouterr().out
    (slots,) = re.findall(r"recurrent: .* ([\d,]+) slots", text)
    num_slots = int(slots.replace(",", ""))
    assert num_slots >= 2
    assert text.count(branch_line(num_slots)) == 1
    assert f"beside 1 sequence {num_slots - 1:,} branches fit" in text
    assert main(["doctor", *pair, "--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "8MiB"]) == 0
    assert "takes a slot" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_slots", "words"),
    [
        (1, ": there is none for a branch"),
        (6, ": beside 1 sequence 5 branches fit; beside more than 3 not one each"),
        (67, ": beside 1 sequence 66 branches fit, beside 8 sequences 7 each; beside more than 33 not one each"),
    ],
)
def test_a_slot_for_each_sequence_and_each_branch(num_slots: int, words: str) -> None:
    assert branch_line(num_slots).endswith(words)


def test_doctor_says_how_much_memory_a_state_lacks(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    make_recurrent("bamba", vocab_size=4096, mamba_d_state=256).save_pretrained(pair[1])
    lengths = ("--max-model-len", "1024", "--num-speculative-tokens", "64")
    memory = ("--target-kv-cache-memory", "1MiB", "--draft-kv-cache-memory", "8MiB")
    assert main(["doctor", "--json", *pair, *lengths, *memory]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "MiB of recurrent state and" in problem
    assert "1.0 MiB may be used" in problem


def test_the_check_can_be_skipped(pair: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--target-kv-cache-memory", "64MiB", "--draft-kv-cache-memory", "8MiB")
    assert main(["doctor", *pair, *memory, "--skip-parity-check"]) == 0
    assert "parity check skipped" in capsys.readouterr().out
