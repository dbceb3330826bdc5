"""Exactness and times on a GPU, section by section; figures are printed and written as they come.

    python -m benchmarks.gpu --call a|b|c|d [--out FOLDER]
    python -m benchmarks.gpu [--sections device,attention,...] [--streams 1,64] [--kinds hybrid,int8] [--out FOLDER]
    python -m benchmarks.gpu --small ...              # all of it in a small size, on a CPU: does it run?

A call is a choice of sections that takes at most ten minutes on an H200. A section that needs what is not installed
says "not run". The run fails if a check of exactness does, or a section breaks; an aim that is missed fails nothing.
Each section has a process of its own and a time limit: an error of the device lasts as long as its process, and what is
measured before the limit is kept.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.interpreted import VARIABLE, prepare_interpreter
from benchmarks.gpu.report import ERRORS, FIGURES, LOG, MissingError, Report

SECTIONS = {
    "device": "the rates that floors are computed from",
    "attention": "the attention kernel: bits, errors, times",
    "tuning": "the attention kernel's table of tiles beside others",
    "sampling": "the sampling kernels: noise, tokens, times",
    "executor": "steps recorded as CUDA graphs against steps launched one by one",
    "long": "recorded steps of an 8B target over the least, weights, keys and arithmetic; its waits and logits",
    "pair": "an 8B target and a 1B draft in one process, as the service runs them: over plain, beside the limit",
    "pdl": "the same steps with and without programmatic dependent launches",
    "layers": "steps of a hybrid, experts, four adapters and int8 over the least, launched one by one and recorded",
    "heads": "drafts of an EAGLE-3 head on an 8B target, and whole rounds, over the least",
    "exact": "the same tokens with 0, 4 and 8 draft tokens a round, in fp32; how often rounding decides in bf16",
    "strict": "exactness: strict: products that the library splits, bits over many kinds of steps, the cost over fast",
    "memory": "what recorded steps take beside the plan",
    "faults": "memory that runs out, a device that hangs, is shared, or is lost",
    "host_drafter": "a service of a 32B target on the GPU whose draft runs on the host's cores: over plain",
    "service": "a whole service with drafts over without, beside what step times allow; its target killed under load",
}
INTERPRETED = {"attention", "tuning", "sampling", "layers", "strict"}
"""On a CPU their kernels run in Triton's interpreter."""
GRACE_S = 10.0
"""A section that is still there so long after its limit is killed."""


@dataclass(frozen=True)
class Part:
    """A section of a call.

    Attributes:
        limit_s: Of the section; what others have left is not added.
        changes: Of the section's sizes, as on the command line.
    """

    section: str
    limit_s: float
    changes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


CALLS = {
    "a": (
        Part("device", 30),
        Part("attention", 70),
        Part("sampling", 60),
        Part("executor", 70),
        Part("long", 130, {"contexts": "1024"}),
        Part("pair", 200, {"streams": "1,64"}),
    ),
    "b": (Part("device", 30), Part("host_drafter", 530)),
    "c": (
        Part("long", 160, {"contexts": "8192"}),
        Part("exact", 160),
        Part("memory", 100),
        Part("tuning", 140),
    ),
    "d": (Part("service", 290, {"streams": "1,64"}), Part("strict", 150), Part("pdl", 120)),
}
"""In order of value. Limits of a call's sections add up to 560 s, beside what Python takes to start."""
CHANGES = {"streams": int, "contexts": int, "kinds": str}
"""Fields of sections' sizes that the command line names."""
LIMIT_S = 480.0
_SMALL_TAKES = 4
"""Times as long: a CPU that interprets kernels, and does other work, is slow."""


def main(arguments: list[str] | None = None) -> int:
    """Run sections; gives the exit code: 0 also where there is no GPU, with a line that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", choices=CALLS, help="a choice of sections that fits into ten minutes")
    parser.add_argument("--sections", help="which, separated by commas: " + sections_help())
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of each section at most")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"gets {FIGURES}, {LOG} and {ERRORS}")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", help="of pair and service, as in 1,64")
    parser.add_argument("--contexts", help="of long, as in 1024,8192")
    parser.add_argument("--kinds", help="of layers, as in hybrid,int8")
    options = parser.parse_args(arguments)
    changes = {name: value for name in CHANGES if (value := getattr(options, name)) is not None}
    names = (options.sections or ",".join(SECTIONS)).split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: {unknown[0]} is none of {', '.join(SECTIONS)}")
    if not options.small and not torch.cuda.is_available():
        sys.stdout.write("skipped: torch finds no GPU here\n")
        return 0
    if options.here:
        code = run_here(Part(names[0], options.limit, changes), options.out, is_small=options.small)
        sys.stdout.flush()
        os._exit(code)  # libraries of devices may abort a process that ends
    parts = CALLS[options.call] if options.call else tuple(Part(name, options.limit, changes) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        report = Report(folder=options.out or Path(folder))
        assert report.folder is not None
        report.folder.mkdir(parents=True, exist_ok=True)
        for name in (FIGURES, LOG, ERRORS):
            (report.folder / name).unlink(missing_ok=True)
        for part in parts:
            report.say(f"== {part.section}: {SECTIONS[part.section]}")
            run_apart(part, report, is_small=options.small)
        report.say(f"failed: {', '.join(report.failures)}" if report.failures else "all checks passed")
    return 1 if report.failures else 0


def run_here(part: Part, folder: Path, *, is_small: bool) -> int:
    """Run a section in this process, which does nothing else; gives its exit code."""
    logging.basicConfig(level=logging.INFO)
    if is_small and os.environ.get(VARIABLE):
        prepare_interpreter()
    report = Report(folder=folder, limit_s=part.limit_s)
    report.read()
    num_before = len(report.failures)
    try:
        module: Any = importlib.import_module(f"benchmarks.gpu.{part.section}")
        sizes = [changed(module.SMALL if is_small else module.FULL, part.changes, is_small)]
        module.run(report, torch.device("cuda" if torch.cuda.is_available() else "cpu"), *sizes)
    except (ImportError, MissingError) as error:
        report.not_run.append(part.section)
        report.say(f"not run: {error}")
    except Exception:  # the sections after it are worth their figures
        report.failures.append(part.section)
        report.say(traceback.format_exc())
    report.write()
    return 1 if len(report.failures) > num_before else 0


def changed(sizes: Any, changes: Mapping[str, str], is_small: bool) -> Any:
    """Sizes with those fields changed that they have; small ones stay as they are, but for the kinds."""
    known = {one.name for one in fields(sizes)} & changes.keys() & ({"kinds"} if is_small else CHANGES.keys())
    return replace(sizes, **{name: tuple(map(CHANGES[name], changes[name].split(","))) for name in known})


def run_apart(part: Part, report: Report, *, is_small: bool = False) -> None:
    """Run a section in a process of its own, and end it if it does not end itself."""
    assert report.folder is not None
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--sections", part.section]
    limit_s = part.limit_s * (_SMALL_TAKES if is_small else 1)
    command += ["--limit", f"{limit_s:g}", "--out", str(report.folder), *["--small"][: int(is_small)]]
    command += [word for name, value in part.changes.items() for word in (f"--{name}", value)]
    environment = os.environ | ({VARIABLE: "1"} if is_small and part.section in INTERPRETED else {})
    with (report.folder / ERRORS).open("a") as errors:
        process = subprocess.Popen(command, start_new_session=True, stderr=errors, env=environment)
        try:
            ended = f"broken: {part.section} ended with {process.wait(limit_s + GRACE_S)}"
        except subprocess.TimeoutExpired:
            ended = f"ended: {part.section} took more than {limit_s:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a section has started and not stopped
            code = process.wait()
    report.read()
    if code not in (0, 1):
        report.failures.append(part.section)
        report.say(ended)
        report.write()


def sections_help() -> str:
    """The sections for the help."""
    return "; ".join(f"{name} ({about})" for name, about in SECTIONS.items())


def limits_s(parts: Sequence[Part]) -> float:
    """Seconds that the parts of a call take at most, by their own clocks."""
    return sum(part.limit_s for part in parts)


if __name__ == "__main__":
    raise SystemExit(main())
