"""What each client is asked for, and how it tells what came; imported by the ``ask_*`` scripts, in their environments.

A script is run as ``ask_CLIENT.py URL MODEL``, and prints a report as JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

THINGS = ("text", "pieces", "order", "call", "streamed_order", "streamed_call", "loop", "retry")
"""Methods of a way to ask.

They give a text, its pieces as a stream brings them, an order, and a call's name and arguments; order and call of a
stream; the text after a call and its result were sent back; how many answers came where the first was found invalid.
"""
KEY = "none"
RESULT = "Rain."
"""Of a call."""
TEXT = "a function that adds two numbers"
MESSAGES: list[Any] = [{"role": "user", "content": TEXT}]
NUM_TOKENS = 24
"""Of an answer in words."""
MOST_TOKENS = 120
"""Of one that a schema ends."""


class Order(BaseModel, extra="forbid"):
    """A table in a restaurant."""

    kind: Literal["inside", "outside"]
    names: Annotated[list[Annotated[str, Field(max_length=6)]], Field(max_length=2)]


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Rome", "Oslo", "Lima"]
    days: Annotated[int, Field(ge=1, le=9)]


def tell(packages: list[str], *modes: type[Any]) -> None:
    """Ask in each way for each thing that it has, and print the report.

    Args:
        packages: Whose versions the report has.
        modes: Made with the API's URL and the model's name.
    """
    url, model = sys.argv[1:]
    report: dict[str, Any] = {"versions": {name: version(name) for name in packages}}
    for mode in modes:
        asked = mode(f"{url}/v1", model)
        report[mode.__name__] = {name: _outcome(asked, name) for name in THINGS if hasattr(asked, name)}
    print(json.dumps(report, default=BaseModel.model_dump))


def _outcome(asked: Any, name: str) -> Any:
    try:
        return getattr(asked, name)()
    except Exception:
        return {"error": traceback.format_exc()}
