"""Modes compared on the same work: rounds in which each mode runs once, so that a machine's drift hits all alike."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.bench.load import Run, Workload, run_workload, served_model

PROMPTS = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "    def test_split(self):\n        self.assertEqual(",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value, parent=None):\n",
    "async def connect(host, port, timeout=None):\n",
    'def encode(text, encoding="utf-8"):\n    """Return',
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of every mode at one number of streams, round by round.

    Attributes:
        runs: By mode's name; the first mode is what the others are measured against.
    """

    num_streams: int
    runs: dict[str, tuple[Run, ...]]

    def tokens_per_s(self, mode: str) -> float:
        """Median over the rounds."""
        return statistics.median(run.tokens_per_s for run in self.runs[mode])

    def ratios(self, mode: str) -> tuple[float, float, float]:
        """Throughput over that of the first mode, within rounds: least, median, most."""
        base = next(iter(self.runs.values()))
        ratios = sorted(a.tokens_per_s / b.tokens_per_s for a, b in zip(self.runs[mode], base, strict=True))
        return ratios[0], statistics.median(ratios), ratios[-1]

    @property
    def has_equal_texts(self) -> bool:
        """Whether every run of every mode gave the same texts."""
        return len({run.texts for runs in self.runs.values() for run in runs}) == 1


async def compare(
    url: str,
    modes: dict[str, int | None],
    num_streams: int,
    *,
    rounds: int,
    max_tokens: int,
    temperature: float,
    report: Callable[[str], None],
) -> Comparison:
    """Run every mode once a round, after a round that does not count.

    Args:
        url: Of the service.
        modes: Draft tokens per round, by the mode's name.
        num_streams: Streams at once.
        rounds: That count.
        max_tokens: Output tokens of each stream.
        temperature: Of all requests.
        report: Is given a line per round.
    """
    model = await served_model(url)
    prompts = tuple(PROMPTS[i % len(PROMPTS)] for i in range(num_streams))
    workload = Workload(prompts, max_tokens, temperature, None)
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        for mode, num_speculative_tokens in modes.items():
            run = await run_workload(url, model, replace(workload, num_speculative_tokens=num_speculative_tokens))
            if number:
                runs[mode].append(run)
        load = os.getloadavg()[0]
        report(f"{num_streams} stream(s): round {number} of {rounds} done, load {load:.1f}")
    return Comparison(num_streams, {mode: tuple(done) for mode, done in runs.items()})


def table(comparisons: list[Comparison]) -> str:
    """A Markdown table: a row per number of streams and mode."""
    lines = [
        "| streams | mode | tokens/s | against the first mode (least, median, most) | acceptance | same text |",
        "|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        same = "yes" if comparison.has_equal_texts else "no"
        for mode, runs in comparison.runs.items():
            least, median, most = comparison.ratios(mode)
            accepted = statistics.median(run.acceptance_rate for run in runs)
            lines.append(
                f"| {comparison.num_streams} | {mode} | {comparison.tokens_per_s(mode):.1f} "
                f"| {least:.2f}, {median:.2f}, {most:.2f} | {accepted:.2f} | {same} |"
            )
    return "\n".join(lines)
