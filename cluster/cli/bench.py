"""``specdec bench``: the target alone and with speculation, on a running service."""

from __future__ import annotations

import argparse
import asyncio
import platform

from cluster.bench.compare import Comparison, compare, table
from specdec.errors import InvalidParameterError

USAGE = "[--url URL] [--streams 1,8] [--rounds N] [--max-tokens N] [--temperature T] [--num-speculative-tokens K,...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``specdec bench``."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the service listens")
    parser.add_argument("--streams", default="1,8", help="numbers of streams at once, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; each runs every mode once")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests")
    parser.add_argument(
        "--num-speculative-tokens", default="0,4", help="draft lengths to compare; the first is what others relate to"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a Markdown table; returns the exit code."""
    print(asyncio.run(_measure(arguments)))
    return 0


async def _measure(arguments: argparse.Namespace) -> str:
    modes = {_mode(k): k for k in _numbers("num_speculative_tokens", arguments.num_speculative_tokens, least=0)}
    comparisons: list[Comparison] = []
    for num_streams in _numbers("streams", arguments.streams, least=1):
        comparisons.append(
            await compare(
                arguments.url,
                modes,
                num_streams,
                rounds=arguments.rounds,
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                report=lambda line: print(line, flush=True),
            )
        )
    head = f"{platform.processor() or platform.machine()}, temperature {arguments.temperature:g}"
    return f"\n{head}, {arguments.max_tokens} tokens a stream, medians of {arguments.rounds} rounds\n\n{table(comparisons)}"


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
