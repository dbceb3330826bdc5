"""Short bursts over HTTP: the service's default against the target alone, and that against itself as a control.

``python -m benchmarks.bursts --rounds 9 --json bursts.json [KEY ...]`` starts a service and asks every cell (streams,
temperature) in every round, three times: by default, with ``num_speculative_tokens: 0``, and with that again, in an
order that changes. A file that is there is gone on with, so that rounds can be run in parts. The keys are those of
``specdec serve``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.modes.load import Workload, run_workload, served_model
from benchmarks.modes.prompts import prompts_of
from benchmarks.modes.services import Services
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.serve import serve
from cluster.config.files import load_config

MAX_TOKENS = 96
VARIANTS: dict[str, int | None] = {"default": None, "alone": 0, "control": 0}
RESAMPLES = 4000
Rates = dict[str, list[float]]
"""Tokens per second by variant, a figure a round."""


class Ratio(NamedTuple):
    """A ratio of geometric means, and its 95% interval by bootstrap over rounds."""

    ratio: float
    low: float
    high: float


def ratio_of(rates: Rates, variant: str, rng: random.Random) -> Ratio:
    """A variant over the target alone, within rounds."""
    logs = [math.log(mine / alone) for mine, alone in zip(rates[variant], rates["alone"], strict=True)]
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    cuts = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    return Ratio(math.exp(statistics.fmean(logs)), *(math.exp(cut) for cut in cuts))


def table(cells: Mapping[str, Rates]) -> str:
    """Markdown: each cell's ratio and its control's, and the geometric mean of the cells."""
    rng, lines, means = (
        random.Random(0),
        ["| cell | rounds | over the target alone | control |", "|---|---|---|---|"],
        [],
    )
    for name, rates in cells.items():
        mine, control = (ratio_of(rates, variant, rng) for variant in ("default", "control"))
        means.append(math.log(mine.ratio))
        figures = [f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})" for one in (mine, control)]
        lines.append(f"| {name} | {len(rates['alone'])} | {' | '.join(figures)} |")
    return "\n".join([*lines, f"geometric mean of the cells: {math.exp(statistics.fmean(means)):.3f}"])


async def run_round(url: str, number: int, cells: Mapping[str, Rates], wanted: Sequence[tuple[int, float]]) -> None:
    """Every cell in every variant once."""
    model = await served_model(url)
    orders = list(itertools.permutations(VARIANTS))
    for i, (num_streams, temperature) in enumerate(wanted):
        prompts = prompts_of("code", num_streams)
        for variant in orders[(number + i) % len(orders)]:
            workload = Workload(prompts, MAX_TOKENS, temperature, VARIANTS[variant], number * num_streams)
            run = await run_workload(url, model, workload)
            cells[cell_name(num_streams, temperature)][variant].append(run.tokens_per_s)


def cell_name(num_streams: int, temperature: float) -> str:
    """As a table names it."""
    return f"{num_streams} streams, T={temperature:g}"


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where a service listens; by default one is started")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="figures of all rounds; gone on with where it is there")
    add_config_flags(parser)
    arguments = parser.parse_args()
    wanted = [(int(n), float(t)) for n in arguments.streams.split(",") for t in arguments.temperatures.split(",")]
    cells: dict[str, Rates] = {cell_name(*cell): {variant: [] for variant in VARIANTS} for cell in wanted}
    if arguments.json is not None and arguments.json.exists():
        cells |= json.loads(arguments.json.read_text())
    if arguments.url is not None:
        measure(arguments, arguments.url, wanted, cells)
        return
    with Services({"auto": load_config(None, config_overrides(arguments))}, serve) as services:
        measure(arguments, services.urls["auto"], wanted, cells)


def measure(
    arguments: argparse.Namespace, url: str, wanted: Sequence[tuple[int, float]], cells: dict[str, Rates]
) -> None:
    """Rounds, the first of which does not count; prints and keeps the figures after each."""
    done = len(cells[cell_name(*wanted[0])]["alone"])
    scratch: dict[str, Rates] = {name: {variant: [] for variant in VARIANTS} for name in cells}
    asyncio.run(run_round(url, done, scratch, wanted))
    for number in range(done, done + arguments.rounds):
        asyncio.run(run_round(url, 1 + number, cells, wanted))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(cells))
        sys.stdout.write(table(cells) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
