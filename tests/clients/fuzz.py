"""Thousands of made-up requests against the API's own schema: no 5xx, no hang, nothing left open.

``python -m tests.clients.fuzz`` starts a service and has ``schemathesis`` make the requests: a program that ``make
test-clients`` puts into an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.integration.running import RunningService, eventually, nothing_held

PROGRAMS = Path(sys.prefix) / "clients" / "bin"
"""Where ``make test-clients`` puts other people's programs."""
HOOKS = Path(__file__).with_name("fuzz_hooks.py")
REQUEST_TIMEOUT_S = 60

Answers = Counter[tuple[str, int]]
"""How many there were, by method and path, and by status; 0 where there was no answer."""


def fuzz(service: RunningService, examples: int, seed: int, timeout_s: float | None) -> Answers:
    """Have the requests made.

    Args:
        service: Gets them.
        examples: Requests of each endpoint and phase, at most.
        seed: Of schemathesis.
        timeout_s: It is ended after so long, whatever is left; what it has found counts. None does not bound it.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        answers = Path(folder) / "answers"
        answers.touch()
        command = [PROGRAMS / "schemathesis", "run", f"{service.url}/openapi.json", "--url", service.url]
        command += ["--phases", "examples,coverage,fuzzing", "--checks", "not_a_server_error", "--continue-on-failure"]
        command += ["--max-examples", str(examples), "--seed", str(seed), "--no-color", "--workers", "1"]
        command += ["--request-timeout", str(REQUEST_TIMEOUT_S), "--suppress-health-check", "all"]
        told = {"SCHEMATHESIS_HOOKS": HOOKS.stem, "PYTHONPATH": str(HOOKS.parent), "FUZZED_ANSWERS": str(answers)}
        process = subprocess.Popen(command, cwd=folder, env=os.environ | told | {"FUZZED_MODEL": service.model})
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        lines = answers.read_text().splitlines()
    return Counter((asked, int(status)) for asked, _, status in (line.rpartition(" ") for line in lines))


def by_status(answers: Answers) -> dict[int, int]:
    """How many answers of each status there were."""
    statuses = Counter[int]()
    for (_, status), count in answers.items():
        statuses[status] += count
    return dict(sorted(statuses.items()))


def main() -> int:
    """Run it, and print what came of it; 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1500, help="requests per endpoint and phase, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="end after so long, whatever is left")
    given = parser.parse_args()
    service = RunningService()
    try:
        answers = fuzz(service, given.examples, given.seed, given.seconds)
        eventually(lambda: nothing_held(service), 60, "no sequence and no block is held")
        generated = service.count("generation_tokens")
    finally:
        service.stop()
    for (asked, status), count in sorted(answers.items()):
        print(f"{count:6} {asked} {status}")
    print(f"{answers.total()} answers, by status: {by_status(answers)}; {generated:.0f} tokens generated; nothing held")
    return int(any(not 200 <= status < 500 for status in by_status(answers)))


if __name__ == "__main__":
    sys.exit(main())
