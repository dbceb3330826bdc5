"""A running service's drafters, each alone and all together, on the same work by turns, one stream.

    specdec serve --drafters NAME=MODEL ...
    python -m benchmarks.drafter_sets --url http://127.0.0.1:8000 --drafters drafter,NAME [--rounds 12]

A round asks the same prompt with the same seed once without drafts, once with each drafter, and once with all. The
texts must be the same. Prints tokens per second over those without drafts, tokens a round of the target, and who
drafted what was kept; last, all drafters over the better one alone, with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from typing import Any

import httpx2

from benchmarks.chat import QUESTIONS
from benchmarks.modes.load import fresh_salt
from benchmarks.modes.prompts import CODE
from benchmarks.several_drafters import interval
from benchmarks.turns import spread

Answer = tuple[tuple[int, ...], Counter[str], float]
"""Tokens; how many came how (``accepted`` under its drafter's name); seconds from the first token to the last."""


def ask(client: httpx2.Client, path: str, drafters: tuple[str, ...], fields: dict[str, Any]) -> Answer:
    """A completion that these drafters draft for."""
    tokens: list[int] = []
    came: Counter[str] = Counter()
    first_s = last_s = 0.0
    body = fields | {"drafters": drafters, "cache_salt": fresh_salt()}
    with client.stream("POST", path, json=body) as response:
        if response.is_error:
            raise RuntimeError(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", ()):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                tokens += choice.get("token_ids") or ()
                said = choice.get("specdec") or {"kind": (), "drafter": ()}
                came.update(drafter or kind for kind, drafter in zip(said["kind"], said["drafter"], strict=True))
    return tuple(tokens), came, last_s - first_s


def main() -> None:
    """Measure, and print a row of Markdown for each set of drafters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--drafters", required=True, type=lambda text: tuple(text.split(",")))
    parser.add_argument("--chat", action="store_true", help="ask questions, where it is the chat demo")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    sets: list[tuple[str, ...]] = [(), *((name,) for name in given.drafters), given.drafters]
    common = {
        "max_tokens": given.max_tokens,
        "temperature": given.temperature,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_speculation": True},
    }
    path = "/v1/chat/completions" if given.chat else "/v1/completions"
    rounds: list[list[Answer]] = []
    with httpx2.Client(base_url=given.url, timeout=600, trust_env=False) as client:
        common["model"] = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for number in range(given.rounds + 1):
            question, code = QUESTIONS[number % len(QUESTIONS)], CODE[number % len(CODE)]
            asked = {"messages": [{"role": "user", "content": question}]} if given.chat else {"prompt": code}
            order = random.Random(number).sample(sets, len(sets))
            answered = {drafters: ask(client, path, drafters, common | asked | {"seed": number}) for drafters in order}
            rounds.append([answered[drafters] for drafters in sets])
    rounds = rounds[1:]  # the first warms up
    for answers in rounds:
        assert all(tokens == answers[0][0] for tokens, _, _ in answers), "drafters changed the text"
    print("| drafters | over none (least, median, most) | tokens a round | kept, by drafter |\n|---|---|---|---|")
    for number, drafters in enumerate(sets):
        came = sum((answers[number][1] for answers in rounds), Counter[str]())
        num_kept = sum(came[name] for name in drafters)
        ratios = [answers[0][2] / answers[number][2] for answers in rounds]
        by_name = ", ".join(f"{name} {came[name]}" for name in drafters)
        a_round = came.total() / (came.total() - num_kept)
        print(f"| {', '.join(drafters) or 'none'} | {spread(ratios)} | {a_round:.2f} | {by_name} |")
    seconds = [statistics.median(answers[number][2] for answers in rounds) for number in range(len(sets))]
    better = min(range(1, len(sets) - 1), key=lambda number: seconds[number])
    mean, low, high = interval([answers[better][2] / answers[-1][2] for answers in rounds])
    print(f"\nall over {sets[better][0]} alone: {mean:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
