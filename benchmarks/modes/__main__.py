"""Speculation modes compared on the same work, on services or in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

from benchmarks.modes.compare import Runner, ServiceMode, Variant, Work, compare, parse_variants
from benchmarks.modes.load import service_stand_ins
from benchmarks.modes.prompts import PROMPTS, prompts_of
from benchmarks.modes.report import BenchReport, Environment, command_line, processor_name
from benchmarks.modes.services import HttpRunner, Services
from benchmarks.modes.summary import summarize
from cluster.cli.failures import exit_code
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.serve import serve
from cluster.config.app import ServiceConfig
from cluster.config.files import config_keys, load_config
from specdec.core.errors import InvalidParameterError
from specdec.core.validation import MAX_TEMPERATURE

USAGE = "%(prog)s [--offline | --url URL] [--streams 1,8] [--modes MODE,...] [--num-speculative-tokens 0,4] [KEY ...]"
_DEFAULT_MODES = "overlap,auto"
OWN_KEYS = {"num_speculative_tokens", "speculation_mode", "host", "port"}
"""Keys that the bench chooses itself; all others are flags as for ``specdec serve``."""

Say = Callable[[str], None]


def add_arguments(parser: Parser) -> None:
    """The flags."""
    parser.add_argument("--url", help="where a service listens; by default one is started per mode")
    parser.add_argument("--offline", action="store_true", help="the engine in this process, in turn, without a service")
    parser.add_argument("--config", metavar="FILE.yaml", help="configuration file; flags win over it")
    parser.add_argument("--streams", default="1,8", help="numbers of streams at once, separated by commas")
    parser.add_argument("--prompts", default="code", help=f"kinds of prompts: {', '.join(PROMPTS)}")
    parser.add_argument("--temperatures", default="0", help="of all requests, separated by commas; 0,1 compares both")
    parser.add_argument(
        "--modes", help=f"modes to compare: {', '.join(get_args(ServiceMode))}; by default {_DEFAULT_MODES}"
    )
    parser.add_argument(
        "--num-speculative-tokens", default="0,4", help="draft lengths to compare; 0 is the target alone, and first"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; each runs every variant once")
    parser.add_argument(
        "--warmup-rounds", type=int, default=1, help="rounds before them; a controller has learnt the load by then"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    add_config_flags(parser, only={path for path, _ in config_keys()} - OWN_KEYS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print Markdown tables; returns the exit code."""
    overrides = config_overrides(arguments)
    for key in OWN_KEYS:
        overrides.pop(key, None)
    config = load_config(arguments.config, overrides)
    variants, works = _variants(arguments, config), _works(arguments)
    with _runner(arguments, config, variants) as runner:
        rows = []
        for work in works:
            counts = {"rounds": arguments.rounds, "warmup_rounds": arguments.warmup_rounds}
            rows += summarize(compare(runner, variants, work, report=_say, **counts))
    report = BenchReport(_environment(arguments, config), tuple(rows))
    print(f"\n{report.markdown()}")
    if arguments.json is not None:
        Path(arguments.json).write_text(report.as_json(), encoding="utf-8")
    return 0


@contextmanager
def _runner(arguments: argparse.Namespace, config: ServiceConfig, variants: tuple[Variant, ...]) -> Iterator[Runner]:
    """What runs the workloads, for as long as they run."""
    if arguments.offline:
        yield _offline(config)
    elif arguments.url is not None:
        yield HttpRunner({"": arguments.url})
    else:
        names = [variant.mode for variant in variants if variant.mode is not None] or ["auto"]
        configs: dict[str, ServiceConfig] = {name: config.model_copy(update=_service_keys(name)) for name in names}
        with Services(configs, serve) as services:
            yield HttpRunner(services.urls)


def _service_keys(mode: str) -> dict[str, object]:
    """What makes a service of this mode; requests say the draft length, except to ``auto``."""
    if mode == "auto":
        return {"speculation_mode": "auto", "num_speculative_tokens": "auto"}
    return {"speculation_mode": mode, "num_speculative_tokens": _FIXED_TOKENS}


_FIXED_TOKENS = 4
"""Any whole number: it makes the draft length of a request count."""


def _offline(config: ServiceConfig) -> Runner:
    import torch

    from benchmarks.modes.offline import load_pair

    torch.set_num_threads(int(config.actors.target.num_cpus or 1))
    return load_pair(config, _say).run


def _variants(arguments: argparse.Namespace, config: ServiceConfig) -> tuple[Variant, ...]:
    if arguments.offline and arguments.url is not None:
        raise InvalidParameterError("offline", "offline and url exclude each other")
    lengths = _numbers("num_speculative_tokens", arguments.num_speculative_tokens, least=0)
    if arguments.offline or arguments.url is not None:
        if arguments.modes is not None:
            where = "--offline runs in turn" if arguments.offline else "a running service has the mode it has"
            raise InvalidParameterError("modes", f"modes: {where}; only services started here take modes")
        return parse_variants(["sequential"] if arguments.offline else [], lengths)
    return parse_variants((arguments.modes or _DEFAULT_MODES).split(","), lengths)


def _works(arguments: argparse.Namespace) -> list[Work]:
    for name, least in (("rounds", 1), ("warmup_rounds", 0), ("max_tokens", 1)):
        if getattr(arguments, name) < least:
            raise InvalidParameterError(name, f"{name} must be at least {least}")
    streams = _numbers("streams", arguments.streams, least=1)
    kinds = arguments.prompts.split(",")
    for kind in kinds:
        prompts_of(kind, 1)
    temperatures = _temperatures(arguments.temperatures)
    return [Work(k, n, arguments.max_tokens, t) for k in kinds for t in temperatures for n in streams]


def _environment(arguments: argparse.Namespace, config: ServiceConfig) -> Environment:
    from benchmarks.modes.shapes import model_shapes
    from cluster.cli.doctor import this_machine

    machine = this_machine()
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    where = "engine in one process" if arguments.offline else "over HTTP"
    rounds = f"medians of {arguments.rounds} interleaved rounds, after {arguments.warmup_rounds} to warm up"
    is_ours = arguments.url is None
    return Environment(
        machine=f"{processor_name()}, {machine.num_cpus} cores, {gpus}",
        versions=machine.versions,
        models=model_shapes(config) if is_ours else {},
        stand_ins=_stand_ins(config) if is_ours else asyncio.run(service_stand_ins(arguments.url)),
        work=f"{where}; {arguments.max_tokens} tokens a stream; {rounds}",
        command=command_line(sys.argv[1:]),
    )


def _stand_ins(config: ServiceConfig) -> tuple[str, ...]:
    return () if config.backend is None else (f"backend: {config.backend}",)


def _say(line: str) -> None:
    print(f"{line} (load {os.getloadavg()[0]:.1f})", flush=True)


def _temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= MAX_TEMPERATURE for value in values):
        raise InvalidParameterError(
            "temperatures", f"temperatures takes numbers from 0 to {MAX_TEMPERATURE:g}, separated by commas, not {text}"
        )
    return values


def _numbers(name: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise InvalidParameterError(name, f"{name} takes whole numbers of at least {least}, separated by commas")
    return numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    parser = Parser(prog="python -m benchmarks.modes", description=__doc__, usage=USAGE)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return exit_code(
        "benchmarks.modes", lambda: run(arguments), is_debugged=getattr(arguments, "log_level", "info") == "debug"
    )


if __name__ == "__main__":
    sys.exit(main())
