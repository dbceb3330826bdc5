"""Prompt tokens that conversations find cached on two targets: with affinity, and placed by load alone.

``python -m benchmarks.conversations [--talks 24] [--turns 6]`` starts a service of two targets for each, and holds
the same conversations with both: each turn repeats all that was said before, and comes after a pause drawn from a seed.
It prints a row for each, and fails where the answers of the two differ.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from openai import OpenAI

from tests.integration.running import RunningService

MODES = {"with affinity": 2, "by load alone": -1}
"""Each with its ``affinity_slack``."""
WORDS = (
    "def",
    "return",
    "value",
    "item",
    "list",
    "for",
    "in",
    "range",
    "print",
    "self",
    "open",
    "close",
    "name",
    "key",
)
NUM_WORDS, MAX_TOKENS, MOST_PAUSE_S = 24, 24, 2.0


@dataclass(frozen=True)
class Row:
    """What became of the conversations.

    Attributes:
        num_prompt_tokens: Of all turns.
        num_cached_tokens: Of these, those that were not read.
        num_repeated_tokens: Of these, those of earlier turns: what can be cached at most.
        placements: Choices of a target by whether it was known to have a part cached, and what could be and was reused.
        answers: In the order of conversations and turns.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_repeated_tokens: int
    placements: dict[str, int]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """One answer."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int


def talk(client: OpenAI, model: str, number: int, num_turns: int) -> list[Turn]:
    """Hold one conversation."""
    rng, said, turns = random.Random(number), "", list[Turn]()
    for _ in range(num_turns):
        time.sleep(rng.uniform(0, MOST_PAUSE_S))
        said += f"\n# {' '.join(rng.choices(WORDS, k=NUM_WORDS))}\n"
        done = client.completions.create(model=model, prompt=said, max_tokens=MAX_TOKENS, temperature=0)
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        cached = done.usage.prompt_tokens_details.cached_tokens or 0
        turns.append(Turn(done.choices[0].text, done.usage.prompt_tokens, cached, done.usage.total_tokens))
        said += done.choices[0].text
    return turns


def measure(slack: int, num_talks: int, num_turns: int) -> Row:
    """Hold all conversations with a service of two targets."""
    service = RunningService("--replicas-target", "2", "--num-speculative-tokens", "0", "--affinity-slack", str(slack))
    try:
        client, model = service.client(), service.model
        with ThreadPoolExecutor(num_talks) as pool:
            talks = list(pool.map(lambda number: talk(client, model, number, num_turns), range(num_talks)))
        time.sleep(2)  # counters are gathered once a second
        placements = {
            name: int(service.count(f"{name}"))
            for name in ("target_placements", "placement_reusable_tokens", "placement_reused_tokens")
        }
    finally:
        service.stop()
    turns = [turn for turns in talks for turn in turns]
    return Row(
        sum(turn.num_prompt_tokens for turn in turns),
        sum(turn.num_cached_tokens for turn in turns),
        sum(turn.num_tokens for turns in talks for turn in turns[:-1]),
        placements,
        tuple(turn.text for turn in turns),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each policy."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args(arguments)
    rows = {mode: measure(slack, options.talks, options.turns) for mode, slack in MODES.items()}
    print(
        "| placement | prompt tokens | of earlier turns | cached | choices | known to be reusable | of these reused |"
    )
    print("|---|---|---|---|---|---|---|")
    for mode, row in rows.items():
        counts = (row.num_prompt_tokens, row.num_repeated_tokens, row.num_cached_tokens, *row.placements.values())
        print(f"| {mode} | {' | '.join(map(str, counts))} |")
    if len({row.answers for row in rows.values()}) > 1:
        raise SystemExit("the answers differ")


if __name__ == "__main__":
    main()
