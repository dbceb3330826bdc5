"""What tests cost: the CPU seconds of each, with those of ended child processes, in a file that git ignores.

``.durations/`` gets a file a run, ``NAME.tsv`` after the first path that was given: CPU seconds, seconds, test.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_SHOWN = 12
FOLDER = ".durations"
COST = "cost"


def cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Durations:
    """The plugin. A worker of xdist hands what it measured to the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._costs: dict[str, tuple[float, float]] = {}
        self._whole_cpu_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test with its fixtures."""
        before = cpu_s(), time.monotonic()
        try:
            return (yield)
        finally:
            self._costs[item.nodeid] = cpu_s() - before[0], time.monotonic() - before[1]

    def pytest_sessionfinish(self) -> None:
        """Hand over, or write."""
        self._whole_cpu_s += cpu_s() if not self._has_workers() else 0.0
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[COST] = [self._whole_cpu_s, self._costs]
        elif self._costs:
            folder = Path(self._config.rootpath, FOLDER)
            folder.mkdir(exist_ok=True)
            rows = [f"{cpu:.2f}\t{wall:.2f}\t{test}" for test, (cpu, wall) in self._ranked()]
            name = re.sub(r"\W+", "-", Path(self._config.args[0]).name if self._config.args else "tests")
            (folder / f"{name}.tsv").write_text("\n".join([f"{self._whole_cpu_s:.2f}\t\twhole", *rows]) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """A worker of xdist has ended."""
        whole_cpu_s, costs = getattr(node, "workeroutput", {}).get(COST, (0.0, {}))
        self._whole_cpu_s += whole_cpu_s
        self._costs.update({test: tuple(cost) for test, cost in costs.items()})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The dearest."""
        if not self._costs:
            return
        terminalreporter.section(f"{self._whole_cpu_s:.0f} s of CPU time; all durations are in {FOLDER}/")
        for test, (cpu, wall) in self._ranked()[:NUM_SHOWN]:
            terminalreporter.write_line(f"{cpu:7.2f} s of CPU {wall:7.2f} s  {test}")

    def _has_workers(self) -> bool:
        return bool(getattr(self._config.option, "numprocesses", None)) and not hasattr(self._config, "workerinput")

    def _ranked(self) -> list[tuple[str, tuple[float, float]]]:
        return sorted(self._costs.items(), key=lambda cost: -cost[1][0])
