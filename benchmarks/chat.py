"""The chat demo over its target alone: ``python -m benchmarks.chat [--rounds 5] [--temperatures 0,1] [KEY ...]``.

Two services side by side answer the same questions by turns, one stream: the demo as it is served, and its target alone
with all threads. None of the questions is among those that its draft learnt from. The keys are those of
``specdec serve``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from urllib.request import urlopen

from openai import OpenAI

from benchmarks.modes.services import Services
from benchmarks.turns import by_turns, spread
from cluster.cli.flags import Parser, add_config_flags, config_overrides
from cluster.cli.serve import serve
from cluster.config.files import load_config

QUESTIONS = (
    "What is the difference between weather and climate?",
    "My neighbour plays the drums at night. What can I do?",
    "Name three rivers of Europe and a city on each.",
    "How do I boil an egg so that its yolk stays soft?",
    "Write a short thank-you note to my teacher.",
    "Why do leaves fall in autumn?",
    "What should I pack for two days in the mountains?",
    "Rewrite this more politely: Send me the report now.",
)
MAX_TOKENS = 96


def asked(client: OpenAI, model: str, temperature: float) -> tuple[int, list[str]]:
    """Tokens of all answers, and the answers."""
    answers = [
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=temperature,
            seed=i,
            max_tokens=MAX_TOKENS,
        )
        for i, question in enumerate(QUESTIONS)
    ]
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage is not None)
    return tokens, [answer.choices[0].message.content or "" for answer in answers]


def drafted(url: str) -> tuple[float, float, float]:
    """Counters of a service so far: rounds that verified drafts, draft tokens, and those of them that were accepted."""
    with urlopen(f"{url}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    first, second, third = (
        sum(float(li.rpartition(" ")[2]) for li in lines if li.startswith(f"specdec_spec_decode_{name}_total{{"))
        for name in names
    )
    return first, second, third


def row(urls: Mapping[str, str], temperature: float, rounds: int) -> str:
    """A row of Markdown."""
    clients = {name: OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=600) for name, url in urls.items()}
    model = clients["alone"].models.list().data[0].id
    before = drafted(urls["drafts"])
    turns = by_turns([partial(asked, clients[name], model, temperature) for name in ("alone", "drafts")], rounds)
    num_drafts, num_tokens, num_accepted = (b - a for a, b in zip(before, drafted(urls["drafts"]), strict=True))
    same = all(alone[1] == ours[1] for (_, alone), (_, ours) in turns)
    rates = [
        statistics.median(tokens / seconds for seconds, (tokens, _) in column) for column in zip(*turns, strict=True)
    ]
    ratios = [alone_s / our_s for (alone_s, _), (our_s, _) in turns]
    share = f"{num_accepted / num_tokens:.2f} of {num_tokens / num_drafts:.1f}" if num_drafts else "none drafted"
    texts = "the same" if same else "differ"
    return f"| {temperature:g} | {rates[0]:.1f} | {rates[1]:.1f} | {spread(ratios)} | {share} | {texts} |"


def main() -> None:
    """Measure, and print a row of Markdown for each temperature."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperatures", default="0,1")
    add_config_flags(parser)
    arguments = parser.parse_args()
    config = load_config(None, config_overrides(arguments) | {"demo": "chat"})
    alone = load_config(None, config_overrides(arguments) | {"demo": "chat", "num_speculative_tokens": 0})
    with Services({"alone": alone, "drafts": config}, serve) as services:
        print("| T | alone, tokens/s | with drafts | ratio (least, median, most) | accepted | answers |")
        print("|---|---|---|---|---|---|")
        for temperature in map(float, arguments.temperatures.split(",")):
            print(row(services.urls, temperature, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
