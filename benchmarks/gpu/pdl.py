"""Programmatic dependent launches: the steps of a pair with them and without, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.pair import FULL as PAIR_FULL
from benchmarks.gpu.pair import SMALL as PAIR_SMALL
from benchmarks.gpu.pair import ServedPair
from benchmarks.gpu.pair import Sizes as PairSizes
from benchmarks.gpu.report import Report

OPTION = "dependent_launches"
"""Of :class:`~specdec.engine.build.BackendOptions`."""
_MOST_S = 150.0
_NEEDED_S = 50.0
"""For the times of one way."""


@dataclass(frozen=True)
class Sizes:
    """What is run: the pair, and streams at once."""

    pair: PairSizes
    streams: tuple[int, ...]
    is_small: bool


FULL = Sizes(PAIR_FULL, (1, 64), False)
SMALL = Sizes(PAIR_SMALL, (1,), True)


def run(report: Report, device: torch.device, sizes: Sizes = FULL) -> None:
    """Time the steps in both ways."""
    found: dict[str, Mapping[str, float]] = {}
    for value in ("0", "1"):
        if found and not report.has_time(_NEEDED_S, f"steps with {OPTION}"):
            return
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.gpu.pdl", folder, value, *["small"][: int(sizes.is_small)]]
            subprocess.run(command, check=True, timeout=max(1.0, min(report.left(), _MOST_S)), stdout=sys.stderr)
            told = Report(folder=Path(folder))
            told.read()
        found[value] = told.figures
    for name in (one for one in found["0"] if one.endswith("_ms")):
        report.figure(f"pdl_{name}", found["1"][name], over=found["0"][name])


def main(folder: Path, sizes: Sizes, further: Mapping[str, bool]) -> None:
    """Time the steps as this process has them."""
    report, device = Report(folder=folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    of_pair = replace(sizes.pair, streams=sizes.streams)
    with tempfile.TemporaryDirectory() as name:
        sizes.pair.chain.write(Path(name))
        pair = ServedPair.load(Path(name), device, of_pair, report, **further)
    pair.times(report, sizes.streams, of_pair.context + of_pair.num_tokens // 2, of_pair.repeats)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SMALL if sys.argv[3:] else FULL, {OPTION: sys.argv[2] == "1"})
