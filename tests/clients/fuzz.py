"""Thousands of made-up requests against the API's own schema: no 5xx, no hang, nothing left open.

The API stands over a script, on a port of this machine. ``schemathesis`` makes the requests: a program of its own,
which needs no place among this project's packages::

    python -m tests.clients.fuzz --schemathesis PATH/TO/bin/schemathesis --examples 1500
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoTokenizer

import specdec.demo
from deployments.openai import ApiSettings, ModelInfo, SequenceRequest, ServedModel, create_app
from deployments.openai.scripted import ScriptedService, Step, rounds
from specdec.types import TokenLogprobs

_ENTRY = TokenLogprobs(-0.5, 1, tuple((token, -0.5 - token) for token in range(20)))


class CountAnswers:
    """Counts answers by path and status.

    Attributes:
        counts: How many there were.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.counts: Counter[tuple[str, int]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.counts[scope["path"], message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counting)


def _script(request: SequenceRequest) -> list[Step]:
    """A few tokens, with everything told that may be asked for."""
    count = min(request.spec.max_tokens, 9)
    logprobs = None if request.spec.sampling.logprobs is None else [_ENTRY] * count
    of_prompt = (None, *[_ENTRY] * (len(request.prompt) - 1))
    return [*rounds([60 + i for i in range(count)], 3, "length", logprobs, of_prompt)]


async def fuzz(schemathesis: str, phases: str, examples: int, seed: int, seconds: float | None) -> int:
    """Run it, and print what came of it; 0 if all is well."""
    tokenizer = AutoTokenizer.from_pretrained(f"{specdec.demo.__path__[0]}/target")
    target = ServedModel("demo", "target", 512, 4096, (0,))
    draft = ServedModel("demo-draft", "draft", 512, 4096, (0,))
    service = ScriptedService(ModelInfo(target, draft, 4, ("coupled", "rejection")), _script)
    app = CountAnswers(create_app(service, ApiSettings(trust_request_chat_template=False), tokenizer))
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", 0, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/openapi.json"
    options = ["--phases", phases, "--checks", "not_a_server_error", "--continue-on-failure"]
    options += ["--max-examples", str(examples), "--request-timeout", "60", "--seed", str(seed), "--no-color"]
    folder = tempfile.mkdtemp(prefix="fuzz-")  # it keeps what it found in the folder where it runs
    process = await asyncio.create_subprocess_exec(schemathesis, "run", url, *options, cwd=folder)
    try:
        code = await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        print(f"ended after {seconds:g} s")
        process.terminate()
        await process.wait()
        code = 0
    statuses: Counter[int] = Counter()
    for (_, status), count in app.counts.items():
        statuses[status] += count
    num_failed = sum(count for status, count in statuses.items() if status >= 500)
    print(f"{sum(statuses.values())} answers, by status: {dict(sorted(statuses.items()))}")
    print(
        f"{len(service.opened)} sequences opened, {len(service.cancelled)} cancelled; {num_failed} answers above 499",
        flush=True,
    )
    server.should_exit = True
    await serving
    return code or (1 if num_failed else 0)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="the program")
    parser.add_argument("--phases", default="examples,coverage,fuzzing", help="of schemathesis")
    parser.add_argument("--examples", type=int, default=1500, help="requests per endpoint and phase, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="end after so long, whatever is left")
    given = parser.parse_args()
    sys.exit(asyncio.run(fuzz(given.schemathesis, given.phases, given.examples, given.seed, given.seconds)))


if __name__ == "__main__":
    main()
