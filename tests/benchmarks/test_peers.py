"""The comparison with other engines: those that need no installation really run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.__main__ import main
from benchmarks.peers.install import PEERS, Peer, SkippedError, models_of, run, write_older_form
from cluster.models.demos import demo_folder

PAIR = ("--target", str(demo_folder("target")), "--draft", str(demo_folder("draft")), "--dtype", "float32")


@pytest.mark.whole
def test_ours_and_assisted_generation_say_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = ("--num-prompts", "1", "--max-tokens", "8", "--rounds", "1")
    figures = tmp_path / "figures.json"
    keys = ["ours", "assisted", "assisted_default"]
    assert main([*PAIR, "--work", str(tmp_path), "--peers", ",".join(keys), *work, "--json", str(figures)]) == 0
    out = capfd.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert "specdec: engine in process, in turn" in rows[1]
    assert "transformers, assisted generation: generate(assistant_model=...), 5 draft tokens" in rows[2]
    assert "transformers, assisted generation as it comes: generate(assistant_model=...), all else" in rows[3]
    assert all(row.endswith("| 2 of 2 |") for row in rows[1:])
    assert "skipped" not in out
    body = json.loads(figures.read_text())
    assert list(body["peers"]) == keys
    (own,) = body["peers"]["ours"]["speculative_tokens_per_s"]
    for peer, row in zip(body["peers"].values(), rows[1:], strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == ", ".join([f"{peer['plain_tokens_per_s'][0]:.1f}"] * 3)
        assert cells[3] == ", ".join([f"{peer['speculative_tokens_per_s'][0]:.1f}"] * 3)
        assert cells[5] == ", ".join([f"{own / peer['speculative_tokens_per_s'][0]:.2f}"] * 3)
        assert f"torch {peer['versions']['torch']}" in cells[1]
        assert peer["settings"] in cells[0]
        assert peer["num_same_texts"] == peer["num_texts"] == 2
    assert len(body["load"]) == body["options"]["rounds"] == 1
    assert out.endswith(f"\nLoad after a round: {body['load'][0]:.1f} (median).\n")


def test_a_peer_that_dies_between_requests_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input is closed before the next request is written; the others go on."""
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setitem(PEERS, "dying", Peer("One that dies"))
    monkeypatch.setitem(PEERS, "living", Peer("One that lives"))
    for key, num_answers in (("dying", 1), ("living", 100)):
        (tmp_path / f"run_{key}.py").write_text(_PEER.format(num_answers=num_answers))
    asked = peers.Process.ask

    def ask(process: peers.Process, *request: Any) -> dict[str, Any]:
        answer = asked(process, *request)
        with suppress(subprocess.TimeoutExpired):
            process._process.wait(0.5)
        return answer

    monkeypatch.setattr(peers.Process, "ask", ask)
    work = ("--num-prompts", "1", "--max-tokens", "1", "--rounds", "1")
    assert main([*PAIR, "--work", str(tmp_path), "--peers", "dying,living", *work]) == 0
    out = capfd.readouterr().out
    assert "One that dies: skipped: out of memory" in out
    assert "| One that lives: " in out


def test_a_peer_that_does_not_answer_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a child that would keep its output open."""
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setitem(PEERS, "silent", Peer("One that says nothing"))
    (tmp_path / "run_silent.py").write_text(
        "import subprocess, sys\nsubprocess.Popen(['sleep', '1000'])\nsys.stdin.read()"
    )
    assert main([*PAIR, "--work", str(tmp_path), "--peers", "silent", "--answer-timeout", "0.5"]) == 0
    assert "One that says nothing: skipped: it did not answer within 0.5 s" in capfd.readouterr().out


_PEER = """
import json, sys
print(json.dumps({{"versions": {{}}, "settings": "none"}}), flush=True)
for line, _ in zip(sys.stdin, range({num_answers})):
    print(json.dumps({{"token_ids": [1], "duration_s": 1.0}}), flush=True)
    if {num_answers} == 1:
        sys.exit("out of memory")
"""


def test_another_model_in_the_same_folder_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "other", Peer("Another", packages=("another",)))
    pair = (tmp_path / "pair" / "target", tmp_path / "pair" / "draft")
    for folder, role in zip(pair, ("target", "draft"), strict=True):
        shutil.copytree(demo_folder(role), folder)
    made = [models_of("other", "python", pair, "bfloat16", tmp_path, 1.0) for _ in range(2)]
    assert made[0] == made[1]
    shutil.copy(demo_folder("hybrid") / "model.safetensors", pair[0] / "model.safetensors")
    again = models_of("other", "python", pair, "bfloat16", tmp_path, 1.0)
    assert again[1] == made[0][1]
    assert again[0] != made[0][0]
    config = json.loads((pair[1] / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (pair[1] / "config.json").write_text(json.dumps(config))
    assert models_of("other", "python", pair, "bfloat16", tmp_path, 1.0)[1] != made[0][1]


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
    assert "theirs is none of ours, ours_openvino, service" in capsys.readouterr().err
