"""The profile of a step: its shares make up the whole."""

from __future__ import annotations

import pytest

from benchmarks import profile_step
from cluster.identity import demo_folder


def test_shares_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--num-tokens", "3", "--num-past-tokens", "20", "--repeats", "2")
    assert profile_step.main(["--target", str(demo_folder("target")), *options]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("step of 3 tokens: ")
    shares = {kind: int(share.rstrip("%")) for kind, share in (line.split(": ") for line in rest)}
    assert list(shares) == ["linear layers", "attention", "small operators", "Python"]
    assert sum(shares.values()) == pytest.approx(100, abs=2)
    assert min(shares["linear layers"], shares["attention"]) > 0
