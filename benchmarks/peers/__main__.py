"""The same pair in other engines: same prompts, dtype, cores and draft length, interleaved, one stream, T = 0.

    python -m benchmarks.peers --target FOLDER --draft FOLDER --work FOLDER [--peers KEY,KEY,...]

The peers are the keys of ``install.PEERS``. One that does not install or run is skipped with a message. Models and
environments are kept in ``--work``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.modes.prompts import prompts_of
from benchmarks.modes.report import processor_name
from benchmarks.peers.install import HERE, PEERS, SkippedError, models_of, python_of

STOP_TIMEOUT_S = 20
HEAD = (
    "| peer | versions | plain tokens/s (least, median, most) | speculative | speculative over plain "
    "| the first's speculative over this one's, round by round | same text |"
)


class Process:
    """A running peer; a context manager."""

    def __init__(self, key: str, options: argparse.Namespace) -> None:
        python = python_of(key, options.work, options.install_timeout)
        pair = (options.target, options.draft)
        target, draft = models_of(key, python, pair, options.dtype, options.work, options.install_timeout)
        flags = ["--target", target, "--draft", draft, "--dtype", options.dtype, "--threads", str(options.threads)]
        length = ["--num-speculative-tokens", str(options.num_speculative_tokens)]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        if PEERS[key].packages:  # another Python must not find this one's packages
            environment.pop("PYTHONPATH", None)
        else:
            environment["PYTHONPATH"] = str(HERE.parents[1])
        self._answer_timeout_s = options.answer_timeout
        self._log = options.work / f"{key}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(HERE / f"run_{key}.py"), *flags, *length],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # so that what it started can be ended with it
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        """End it: its input ends, and after a while it is killed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _give_up(self, late: threading.Event) -> None:
        """End it, in good order if it can; a child that lives on would keep its output open."""
        late.set()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._kill()

    def read(self) -> dict[str, Any]:
        """The next message.

        Raises:
            SkippedError: The process has ended instead, or did not answer in time and was ended.
        """
        assert self._process.stdout is not None
        late = threading.Event()
        timer = threading.Timer(self._answer_timeout_s, self._give_up, [late])
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    return dict(json.loads(line))
        finally:
            timer.cancel()
        if late.is_set():
            raise SkippedError(f"it did not answer within {self._answer_timeout_s:g} s (its words: {self._log})")
        lines = self._log.read_text().strip().splitlines()
        raise SkippedError(f"{lines[-1] if lines else 'it ended without a word'} (all of it: {self._log})")

    def ask(self, prompt_ids: list[int], max_tokens: int, num_speculative_tokens: int) -> dict[str, Any]:
        """Have a prompt continued.

        Raises:
            SkippedError: The process has ended instead.
        """
        assert self._process.stdin is not None
        request = {"prompt_ids": prompt_ids, "max_tokens": max_tokens, "num_speculative_tokens": num_speculative_tokens}
        with suppress(BrokenPipeError):  # it has ended, which reading tells with its last words
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self.read()


@dataclass
class Results:
    """What one peer did.

    Attributes:
        rates: Tokens per second, round by round, plain and speculative.
        texts: Token ids by prompt and whether it was speculative.
    """

    versions: dict[str, str]
    settings: str
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    texts: dict[tuple[int, bool], list[int]] = field(default_factory=dict)


def measure(options: argparse.Namespace, processes: dict[str, Process]) -> tuple[dict[str, Results], list[float]]:
    """Ask all peers in turns; the first round does not count. One that fails on the way is skipped from there on.

    Returns:
        What each did, and the machine's load average after each round that counts.
    """
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = [tokenizer.encode(prompt) for prompt in prompts_of(options.prompts, options.num_prompts)]
    results: dict[str, Results] = {}
    loads: list[float] = []
    for key, process in list(processes.items()):
        try:
            ready = process.read()
        except SkippedError as error:
            skip(key, error, processes)
            continue
        results[key] = Results(ready["versions"], ready["settings"])
    for number in range(options.rounds + 1):
        for key in list(processes):
            try:
                run_round(options, processes[key], prompts, results[key], counts=number > 0)
            except SkippedError as error:
                skip(key, error, processes)
                del results[key]
        loads.append(os.getloadavg()[0])
        say(f"round {number} of {options.rounds} done, load {loads[-1]:.1f}")
    return results, loads[1:]


def run_round(
    options: argparse.Namespace, process: Process, prompts: list[list[int]], results: Results, *, counts: bool
) -> None:
    """All prompts plainly, and all with drafts."""
    for is_speculative in (False, True):
        num_tokens, duration_s = 0, 0.0
        for index, prompt in enumerate(prompts):
            length = options.num_speculative_tokens if is_speculative else 0
            answer = process.ask(prompt, options.max_tokens, length)
            num_tokens, duration_s = num_tokens + len(answer["token_ids"]), duration_s + answer["duration_s"]
            results.texts[index, is_speculative] = answer["token_ids"]
        if counts:
            results.rates[is_speculative].append(num_tokens / duration_s)


def skip(key: str, error: Exception, processes: dict[str, Process]) -> None:
    """Say why a peer is missing."""
    processes.pop(key, None)
    say(f"{PEERS[key].name}: skipped: {error}")


def table(results: dict[str, Results]) -> list[str]:
    """Lines of Markdown; texts are compared with those of the first peer's plain decoding.

    Peers take turns in every round, so that the first's rate over another's in the same round tells more than medians.
    """
    lines = [HEAD, "|---" * 7 + "|"]
    first = next(iter(results.values()), None)
    for key, found in results.items():
        assert first is not None
        ratio = statistics.median(b / a for a, b in zip(found.rates[False], found.rates[True], strict=True))
        plain, speculative = (spread(found.rates[kind]) for kind in (False, True))
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        ahead = [a / b for a, b in zip(first.rates[True], found.rates[True], strict=True)]
        cells = [f"{PEERS[key].name}: {found.settings}", versions, plain, speculative, f"{ratio:.2f}"]
        cells.append(spread(ahead, 2))
        lines.append(f"| {' | '.join([*cells, f'{same_texts(found, first)} of {len(found.texts)}'])} |")
    return lines


def same_texts(found: Results, first: Results) -> int:
    """How many of a peer's texts are those of the first peer's plain decoding."""
    return sum(tokens == first.texts[index, False] for (index, _), tokens in found.texts.items())


def as_json(options: argparse.Namespace, results: dict[str, Results], loads: list[float]) -> str:
    """All rounds' rates, with the versions, settings and load that they were made with."""
    first = next(iter(results.values()), None)
    peers = {
        key: {
            "name": PEERS[key].name,
            "versions": found.versions,
            "settings": found.settings,
            "plain_tokens_per_s": found.rates[False],
            "speculative_tokens_per_s": found.rates[True],
            "num_texts": len(found.texts),
            "num_same_texts": same_texts(found, first) if first is not None else 0,
        }
        for key, found in results.items()
    }
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return json.dumps({"machine": processor_name(), "options": asked, "load": loads, "peers": peers}, indent=1)


def spread(values: Sequence[float], num_digits: int = 1) -> str:
    """Least, median and most."""
    return ", ".join(f"{value:.{num_digits}f}" for value in (min(values), statistics.median(values), max(values)))


def say(line: str) -> None:
    """A line to whoever watches."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Start every peer that can be had, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, converted models and logs")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1, help="of each peer; taskset chooses the cores of all")
    parser.add_argument("--prompts", default="code", help="kind of prompts")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each prompt")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--install-timeout", type=float, default=600, help="seconds for each step of an installation")
    parser.add_argument(
        "--answer-timeout", type=float, default=600, help="seconds a peer may take to load, or to answer"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures of every round there")
    options = parser.parse_args(arguments)
    keys = options.peers.split(",")
    unknown = [key for key in keys if key not in PEERS]
    if unknown:
        parser.error(f"--peers: {unknown[0]} is none of {', '.join(PEERS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for key in keys:
            try:
                processes[key] = stack.enter_context(Process(key, options))
            except SkippedError as error:
                skip(key, error, processes)
        results, loads = measure(options, processes)
    work = f"{options.num_prompts} prompts ({options.prompts}), {options.max_tokens} tokens each, one at a time, T = 0"
    say(f"\n{processor_name()}, {options.threads} thread(s), {options.dtype}; {work}; {options.rounds} rounds\n")
    say("\n".join(table(results)))
    say(f"\nLoad after a round: {statistics.median(loads):.1f} (median).")
    if options.json is not None:
        options.json.write_text(as_json(options, results, loads), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
