"""``python -m benchmarks.modes`` over HTTP as it is typed: its own service, its workers' figures and files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.limits import main as print_limits

TIMEOUT_S = 420
WORK = (
    *("--modes", "outcomes", "--streams", "1", "--num-speculative-tokens", "0,4", "--rounds", "1"),
    *("--max-tokens", "32", "--backend", "benchmarks.backends:stand_in:target=30,draft=3,acceptance=0.8"),
)


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_figures_of_a_service_on_emulated_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.modes", *WORK, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Not real: backend: {WORK[-1]}" in done.stdout
    alone, outcomes = json.loads(figures.read_text())["rows"]
    assert [alone["variant"], outcomes["variant"]] == ["target alone", "outcomes, 4 draft tokens"]
    for row in (alone, outcomes):
        assert row["step_s"]["target"] >= 0.030  # an emulated step may take longer, on a busy machine, and never less
        assert 0 <= row["idle_share"]["target"] < 1
        assert row["num_emulated_steps"] > 0
        assert row["has_equal_texts"]
    assert outcomes["step_s"]["draft"] >= 0.003
    assert outcomes["acceptance_rate"] is not None
    assert outcomes["tokens_per_round"] > 1
    print_limits([str(figures), *WORK[-2:]])
    assert "outcomes, 4 draft tokens" in capsys.readouterr().out.splitlines()[-1]
