"""The comparison with other engines: those that need no installation really run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cluster.sources import demo_folder
from tests.bench.peers.__main__ import main
from tests.bench.peers.install import PEERS, Peer, SkippedError, run, write_older_form

PAIR = ("--target", str(demo_folder("target")), "--draft", str(demo_folder("draft")), "--dtype", "float32")


def test_ours_and_assisted_generation_say_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = ("--num-prompts", "1", "--max-tokens", "8", "--rounds", "1")
    assert main([*PAIR, "--work", str(tmp_path), "--peers", "ours,assisted", *work]) == 0
    out = capfd.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 3
    assert "transformers, assisted generation" in rows[2]
    assert all(row.endswith("| 2 of 2 |") for row in rows[1:])
    assert "skipped" not in out


def test_a_peer_that_does_not_run_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's script, with a Python that has no vLLM."""
    monkeypatch.setitem(PEERS, "vllm_cpu", Peer("vLLM"))
    assert main([*PAIR, "--work", str(tmp_path), "--peers", "vllm_cpu"]) == 0
    assert "vLLM: skipped: ModuleNotFoundError: No module named 'vllm'" in capfd.readouterr().out


def test_an_installation_that_fails_says_why() -> None:
    with pytest.raises(SkippedError, match="no such thing"):
        run([sys.executable, "-c", "import sys; sys.exit('no such thing')"], 20)
    with pytest.raises(SkippedError, match=r"not done in 0\.2 s"):
        run([sys.executable, "-c", "import time; time.sleep(30)"], 0.2)


def test_models_for_older_engines(tmp_path: Path) -> None:
    write_older_form(demo_folder("target"), tmp_path / "old", "bfloat16")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "bfloat16"
    tokenizer = json.loads((tmp_path / "old" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_unknown_peers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*PAIR, "--work", str(tmp_path), "--peers", "ours,theirs"])
    assert "theirs is none of ours, service, assisted" in capsys.readouterr().err
