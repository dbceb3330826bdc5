"""llama.cpp's step of one row, by the times that its server reports of a long answer; the model is a GGUF file."""

from __future__ import annotations

import json
import urllib.request

import xllamacpp
from run_llama_cpp import common_params
from step_loop import Given, take_steps


def main() -> None:
    """Start a server, and have it answer."""
    given = Given.read()
    server = xllamacpp.Server(common_params(given.model, "float32", given.threads))

    def step(count: int) -> float:
        # The prompt is cached but for its last token, whose step gives the first: the time is of the steps after it.
        body = {"prompt": [*range(1, given.context + 1)], "n_predict": count, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body | {"cache_prompt": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            timings = json.load(response)["timings"]
        return float(timings["predicted_ms"]) / 1e3 * count / (count - 1)

    take_steps("weights as the file has them, cache float32", step)


if __name__ == "__main__":
    main()
