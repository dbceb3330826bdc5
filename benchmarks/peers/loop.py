"""What every peer's process does: load, say that it is ready, then answer requests line by line.

It imports nothing of the project, nor anything outside the standard library, so that any peer's Python runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[int], int, int], dict[str, Any]]
"""Takes prompt ids, output tokens and draft tokens a round (0: plain); gives ``token_ids``, and ``num_accepted`` if it
is known."""


def arguments() -> argparse.Namespace:
    """What a peer's process is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--num-speculative-tokens", type=int, required=True)
    return parser.parse_args()


def answer_requests(versions: dict[str, str], settings: str, generate: Generate) -> None:
    """Answer until the input ends. What a library prints goes to stderr: the answers have stdout to themselves."""
    answers, sys.stdout = sys.stdout, sys.stderr

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({"versions": versions, "settings": settings})
    for line in sys.stdin:
        request = json.loads(line)
        started_s = time.perf_counter()
        result = generate(request["prompt_ids"], request["max_tokens"], request["num_speculative_tokens"])
        say(result | {"duration_s": time.perf_counter() - started_s})
