"""Read by schemathesis itself, in its own environment: most requests are such that tokens are generated.

What a schema allows is refused in nearly every case: a body of forty random fields always has one out of its range, and
the model's name is any text. So most bodies are of the served model, short, and of few fields beside.
"""

from __future__ import annotations

import os
import random
from typing import Any

import schemathesis

MODEL = os.environ["FUZZED_MODEL"]
ANSWERS = os.environ["FUZZED_ANSWERS"]
"""File that gets a line for every answer: the path, and the status; 0 where there was no answer."""

TAMED = 0.75
"""Share of the bodies."""

RNG = random.Random(1)
PROMPTS = ["def f(x):", "x" * 200, "🙂 é\n", [5, 6, 7], ["a", "b"], [[1], [2, 3]]]
MESSAGES = [[{"role": "user", "content": text}] for text in ("add two numbers", "", "🙂")]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a body before it is sent."""
    if isinstance(case.body, dict) and RNG.random() < TAMED:
        case.body = tamed(case.body, case.operation.path)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Note an answer."""
    _note(case, response.status_code)


@schemathesis.hook
def after_network_error(context: Any, case: Any, request: Any) -> None:
    """Note that there was none."""
    _note(case, 0)


def tamed(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Few fields of a body, with those that it takes to be served."""
    fields = dict(RNG.sample(list(body.items()), min(len(body), RNG.randrange(4))))
    if "chat" in path:
        needed = {"messages": RNG.choice(MESSAGES)}
    elif "detokenize" in path:
        needed = {"tokens": [5, 6, 7]}
    else:
        needed = {"prompt": RNG.choice(PROMPTS if "completions" in path else PROMPTS[:3])}
    kept = {name: body[name] for name in needed if name in body and RNG.random() < 0.3}
    limits = {"max_tokens": RNG.randrange(1, 17)} if "completions" in path else {}
    return fields | needed | kept | limits | {"model": MODEL}


def _note(case: Any, status: int) -> None:
    with open(ANSWERS, "a") as answers:
        answers.write(f"{case.method} {case.operation.path} {status}\n")
