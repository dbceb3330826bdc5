"""Exactness and times on a GPU, section by section; figures are printed as they come.

    python -m benchmarks.gpu [--sections device,attention,...] [--json FILE]

A section that needs what is not installed says "not run". The run fails if a check of exactness does, or a section
breaks; an aim that is missed fails nothing. Beside torch, Triton and numpy the sections need transformers, msgspec and
llguidance; those of attention need none of these three.

Each of several sections has a process of its own and a time limit: an error of the device lasts as long as its
process. All of them may take 15 minutes on an H200, an estimate. Where a command may run for ten, run ``service``,
``tuning`` and ``faults`` apart.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.report import MissingError, Report

SECTIONS = {
    "device": "the rates that floors are computed from",
    "attention": "the attention kernel: bits, errors, times",
    "tuning": "the attention kernel's table of tiles beside others",
    "sampling": "the sampling kernels: noise, tokens, times",
    "executor": "steps recorded as CUDA graphs: tokens, times; this GPU's record, where all is right",
    "steps": "steps of an 8B target and a 1B draft with random weights over reading the weights once",
    "layers": "steps of a hybrid, experts, four adapters and int8 over the least, launched one by one and recorded",
    "heads": "drafts of an EAGLE-3 head on an 8B target, and whole rounds, over the least",
    "exact": "the same tokens with 0, 4 and 8 draft tokens a round, in fp32; how often rounding decides in bf16",
    "strict": "exactness: strict: products that the library splits, bits over many kinds of steps, the cost over fast",
    "memory": "what recorded steps take beside the plan",
    "faults": "memory that runs out, a device that hangs, is shared, or is lost",
    "host_drafter": "a 32B target whose draft runs on the host's cores: over plain, and over a draft on the GPU",
    "service": "a whole service with drafts over without, beside what step times allow; its target killed under load",
}

RECORDED = {"attention", "sampling", "executor"}
"""A GPU is recorded where these have passed, and what else was asked for."""
LIMIT_S = 480.0


def main(arguments: list[str] | None = None) -> int:
    """Run sections; gives the exit code: 0 also where there is no GPU, with a line that says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which, separated by commas: " + sections_help())
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, after each section")
    options = parser.parse_args(arguments)
    names = options.sections.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: {unknown[0]} is none of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.stdout.write("skipped: torch finds no GPU here\n")
        return 0
    logging.basicConfig(level=logging.INFO)
    report, not_run = Report(), list[str]()
    for name in names:
        report.say(f"== {name}: {SECTIONS[name]}")
        if not (run_apart if len(names) > 1 else run_here)(name, report):
            not_run.append(name)
        if options.json is not None:
            result = {"figures": report.figures, "failures": report.failures, "not_run": not_run}
            options.json.write_text(json.dumps(result, indent=1))
    # What a service needs says nothing of a GPU.
    if set(names) >= RECORDED and set(not_run) <= {"service"} and not report.failures:
        importlib.import_module("benchmarks.gpu.executor").write_record(report, torch.device("cuda"))
    report.say(f"failed: {', '.join(report.failures)}" if report.failures else "all checks passed")
    return 1 if report.failures else 0


def run_here(name: str, report: Report) -> bool:
    """Run a section in this process; gives whether it could run."""
    try:
        importlib.import_module(f"benchmarks.gpu.{name}").run(report, torch.device("cuda"))
    except (ImportError, MissingError) as error:
        report.say(f"not run: {error}")
        return False
    except Exception:  # the sections after it are worth their figures
        report.failures.append(name)
        report.say(traceback.format_exc())
    return True


def run_apart(name: str, report: Report, limit_s: float = LIMIT_S) -> bool:
    """Run a section in a process of its own, which ends after a time limit; gives whether it could run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--sections", name, "--json", str(path)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            report.failures.append(name)
            report.say(f"ended: {name} took more than {limit_s:g} s")
            return True
        if not path.exists():  # it died
            report.failures.append(name)
            report.say(f"broken: {name} ended with {code}")
            return True
        result = json.loads(path.read_text())
    report.figures |= result["figures"]
    report.failures += result["failures"]
    return not result["not_run"]


def sections_help() -> str:
    """The sections for the help."""
    return "; ".join(f"{name} ({about})" for name, about in SECTIONS.items())


if __name__ == "__main__":
    raise SystemExit(main())
