"""Every example's Serve configuration runs: on as many nodes as it names pods, each replica where it belongs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES = {"dev": 2, "single-gpu": 2, "two-gpu": 2, "prod": 6, "prod-vllm": 6}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", NODES)
def test_an_overlay_answers_and_each_replica_is_where_it_belongs(example: str) -> None:
    command = [sys.executable, "-m", "tests.integration.example_runs", example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = json.loads(done.stdout.splitlines()[-1])
    assert ran["nodes"] == NODES[example]
    assert ran["answers"] == [{"tokens": 16, "without_key": 401}] * 2
    is_prod = example.startswith("prod")
    placed = ran["placed"]
    assert set(placed.pop("TargetServer")) == {"target" if is_prod else "models"}
    assert set(placed.pop("DraftServer")) == {"draft" if is_prod else "models"}
    assert set(placed) == {"OpenAIIngress", "SpeculationRouter", "Health", "Metrics"}
    assert {role for roles in placed.values() for role in roles} == {"front" if is_prod else "head"}
    assert all(placed.values())
    if is_prod:
        assert all(len(placed[name]) >= 2 for name in ("OpenAIIngress", "SpeculationRouter"))
