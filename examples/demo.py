"""``make demo``: drafts change no text, and a killed target ends no stream. A service of its own, about a minute.

The exit code is 1 if a text differs, or if the service does not start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.integration.kills import Stream, Streams, kill_one
from tests.integration.running import RunningService, eventually

MODEL = "specdec-demo"
DRAFT_TOKENS = 4
"""Draft tokens in each round of the runs with drafts."""
MAX_TOKENS = 128
KILLED_MAX_TOKENS = 384
CHUNKS_BEFORE_KILL = 10
PROMPTS = {
    "a network": "class MLP(nn.Module):\n    def __init__(self, hidden_size):\n        super().__init__()\n",
    "a test": "def test_addition(self):\n        self.assertEqual(",
    "a program": "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "a class": "class Config:\n    def __init__(self, path, name, size):\n        self.path = path\n",
}
"""Beginnings of Python code by name, which the demo pair continues."""


@dataclass(frozen=True)
class Row:
    """One prompt: its text in two runs.

    Attributes:
        name: Name of the prompt.
        num_tokens: Tokens of the first run.
        is_same: Whether both runs ended and gave the same text.
        seconds: Durations of both runs, or empty if they are not compared.
        pause_s: Longest time without new text in the second run, in seconds, or 0 if it does not matter.
    """

    name: str
    num_tokens: int
    is_same: bool
    seconds: tuple[float, ...] = ()
    pause_s: float = 0.0


def main() -> int:
    """Run the demo and return its exit code."""
    started_s = time.monotonic()
    say("Starting a service of two small models on this machine's CPU. This takes about half a minute.")
    try:
        service = RunningService("--served-model-name", MODEL, "--num-speculative-tokens", str(DRAFT_TOKENS))
    except AssertionError as error:
        say(str(error))
        return 1
    try:
        say(f"It is ready at {service.url} after {service.started_s:.0f} s.")
        rows = [*speeds(service), killed(service)]
    finally:
        service.stop()
    return report(rows, time.monotonic() - started_s)


def speeds(service: RunningService) -> list[Row]:
    """Run act 1: every prompt without and with drafts, one stream at a time."""
    say("\nAct 1: the same prompts without and with drafts\n")
    plain, drafted = (streams_of(service, num_draft_tokens) for num_draft_tokens in (0, DRAFT_TOKENS))
    for streams in (plain, drafted):
        streams.run(0)  # the first requests of a service are slower
    rows = []
    for i, name in enumerate(PROMPTS):
        (without, without_s), (with_drafts, with_s) = timed(plain, i), timed(drafted, i)
        row = Row(name, without.num_tokens or 0, is_same(without, with_drafts), (without_s, with_s))
        rows.append(row)
        say(f"  {name:10} {speed(row, 0):4.0f} tokens/s without, {speed(row, 1):4.0f} with drafts, {verdict(row)}")
    return rows


def killed(service: RunningService) -> Row:
    """Run act 2: one stream undisturbed, then again while the process of its target is killed."""
    say("\nAct 2: the target is killed while it writes\n")
    streams = streams_of(service, DRAFT_TOKENS, KILLED_MAX_TOKENS, count=1)
    undisturbed = streams.run(0)
    with streams.running() as wait:
        eventually(lambda: streams.num_chunks.get(0, 0) >= CHUNKS_BEFORE_KILL, 60, "the stream has begun")
        process = kill_one(service, "target")
        is_in_midstream = process is not None and streams.are_running()
        say(f"  A stream is running. Its target, process {process and process.pid}, is killed (SIGKILL).")
        (stream,) = wait()
    row = Row(
        "killed",
        undisturbed.num_tokens or 0,
        is_same(undisturbed, stream) and is_in_midstream,
        pause_s=stream.longest_pause_s,
    )
    if stream.error is not None:
        say(f"  The stream broke: {stream.error}")
    elif not is_in_midstream:
        say("  The stream had ended before the target was killed: run the demo again.")
    else:
        say(f"  The stream paused for {row.pause_s:.1f} s while a new target started, then went on to its end.")
    return row


def report(rows: Sequence[Row], took_s: float) -> int:
    """Print act 3, a table of all rows, and return the exit code: 1 if a text differs."""
    say("\nAct 3: all of it in a table\n")
    titles = ["prompt", "tokens", "without, tokens/s", "with, tokens/s", "pause, s", "text"]
    lines = [titles, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    for line in lines:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    timed_rows = [row for row in rows if row.seconds]
    if timed_rows:
        without_s, with_s = (sum(row.seconds[i] for row in timed_rows) for i in (0, 1))
        ratio = without_s / with_s
        comment = "" if ratio > 1 else ": here they do not pay, as both models share these cores"
        say(f"\nWith drafts the service wrote at {ratio:.2f} times the speed without{comment}.")
    if not all(row.is_same for row in rows):
        say(f"FAILED: a text differs ({', '.join(row.name for row in rows if not row.is_same)}).")
        return 1
    say(f"Every text is the same: without drafts, with drafts, and after a kill. The demo took {took_s:.0f} s.")
    return 0


def streams_of(
    service: RunningService, num_draft_tokens: int, max_tokens: int = MAX_TOKENS, count: int = len(PROMPTS)
) -> Streams:
    """Build a stream for each of the first ``count`` prompts, at temperature 0."""
    fields = {"temperature": 0, "num_speculative_tokens": num_draft_tokens}
    kinds = [{"prompt": prompt} for prompt in PROMPTS.values()]
    return Streams(service.url, MODEL, count, max_tokens, fields, kinds=kinds)


def timed(streams: Streams, i: int) -> tuple[Stream, float]:
    """Run stream ``i`` and return it with its duration in seconds."""
    started_s = time.monotonic()
    return streams.run(i), time.monotonic() - started_s


def is_same(one: Stream, other: Stream) -> bool:
    """Return whether both streams ended, with the same text and number of tokens."""
    ended = one.error is None and other.error is None
    return ended and (one.text, one.num_tokens) == (other.text, other.num_tokens)


def speed(row: Row, run: int) -> float:
    """Return the tokens per second of one of the two runs."""
    return row.num_tokens / row.seconds[run]


def verdict(row: Row) -> str:
    """Return in words whether both texts are the same."""
    return "same text" if row.is_same else "ANOTHER TEXT"


def cells(row: Row) -> list[str]:
    """Return the row's cells of the table."""
    speeds_of_row = [f"{speed(row, run):.0f}" for run in (0, 1)] if row.seconds else ["-", "-"]
    return [row.name, str(row.num_tokens), *speeds_of_row, f"{row.pause_s:.1f}" if row.pause_s else "-", verdict(row)]


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
