"""``specdec bench``: the target alone and with speculation, on a service that runs or on one of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform

from cluster.bench.compare import Comparison, compare, table
from cluster.config_files import load_config
from cluster.launch import LocalService, check_port
from specdec.errors import InvalidParameterError

USAGE = "[--url URL | --config FILE.yaml] [--streams 1,8] [--num-speculative-tokens 0,4] [--rounds N] [...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec bench``."""
    parser.add_argument("--url", help="where the service listens; by default one is started for the time of the bench")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration of the service that is started")
    parser.add_argument("--streams", default="1,8", help="numbers of streams at once, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; each runs every mode once")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests")
    parser.add_argument(
        "--num-speculative-tokens", default="0,4", help="draft lengths to compare; the first is what others relate to"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a Markdown table; returns the exit code."""
    if arguments.url is not None:
        print(asyncio.run(_measure(arguments, arguments.url)))
        return 0
    config = load_config(arguments.config)
    config = config.model_copy(update={"port": check_port(config.host, 0)})
    service = LocalService(config, lambda line: print(line, flush=True))
    try:
        service.start_ray()
        service.deploy()
        service.wait_until_ready()
        print(asyncio.run(_measure(arguments, service.url)))
    finally:
        service.stop()
    return 0


async def _measure(arguments: argparse.Namespace, url: str) -> str:
    modes: dict[str, int | None] = {
        _mode(k): k for k in _numbers("num_speculative_tokens", arguments.num_speculative_tokens, least=0)
    }
    comparisons: list[Comparison] = []
    for num_streams in _numbers("streams", arguments.streams, least=1):
        comparisons.append(
            await compare(
                url,
                modes,
                num_streams,
                rounds=arguments.rounds,
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                report=lambda line: print(line, flush=True),
            )
        )
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    work = f"{arguments.max_tokens} tokens a stream at temperature {arguments.temperature:g}"
    return f"\n{machine}; {work}; medians of {arguments.rounds} rounds\n\n{table(comparisons)}"


def _mode(num_speculative_tokens: int) -> str:
    return f"{num_speculative_tokens} draft tokens" if num_speculative_tokens else "target alone"


def _numbers(name: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise InvalidParameterError(name, f"{name} takes whole numbers of at least {least}, separated by commas")
    return numbers
