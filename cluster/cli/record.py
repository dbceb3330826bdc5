"""``specdec record``: sends requests to a running service, and writes its answers as a recording."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cluster.cli.flags import Parser
from cluster.config.environment import client_key
from specdec.core.errors import InvalidParameterError

USAGE = "FILE --out RECORDING [--url URL] [--streams N]"
_TRIES = 5
_BUSY = (429, 503)
_TIMEOUT_S = 3600.0
_NOT_ALLOWED = ("stream", "stream_options")

Json = dict[str, Any]


class _Asked(NamedTuple):
    number: int
    path: str
    body: Json


def add_arguments(parser: Parser) -> None:
    """The flags of ``specdec record``."""
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="a request's body a line, of completions (prompt) or chat completions (messages), or of OpenAI's batches",
    )
    parser.add_argument("--out", metavar="RECORDING", type=Path, required=True, help="where to write; not there yet")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the service; an API key is taken from OPENAI_API_KEY"
    )
    parser.add_argument("--streams", type=int, default=8, help="requests at once")


def run(arguments: argparse.Namespace) -> int:
    """Send all requests; returns 0 if every one was answered, else 1."""
    if arguments.streams < 1:
        raise InvalidParameterError("streams", f"streams must be at least 1, and is {arguments.streams}")
    if arguments.out.exists():
        raise InvalidParameterError("out", f"{arguments.out} is there already: name a file that is not")
    requests = list(_requests(arguments.file))
    service = _Service(arguments.url.rstrip("/"))
    num_samples = num_failed = 0
    with arguments.out.open("w", encoding="utf-8") as file, ThreadPoolExecutor(arguments.streams) as threads:
        for asked, answer in zip(requests, threads.map(service.ask, requests), strict=True):
            if isinstance(answer, str):
                num_failed += 1
                print(f"{arguments.file}, line {asked.number}: {answer}", file=sys.stderr, flush=True)
                continue
            for sample in answer:
                num_samples += 1
                file.write(json.dumps(sample, separators=(",", ":")) + "\n")
            file.flush()
    print(f"{num_samples} samples of {len(requests) - num_failed} requests in {arguments.out}; {num_failed} failed")
    return int(num_failed > 0)


def _requests(path: Path) -> Iterator[_Asked]:
    """Read requests.

    Raises:
        InvalidParameterError: A line is none; the message names it.
    """
    from specdec.audition.recording import numbered_lines

    for number, line in numbered_lines(path):
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise InvalidParameterError("file", f"{where}: not JSON: {error}") from None
        body = found.get("body", found) if isinstance(found, dict) else None
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise InvalidParameterError("file", f"{where}: must be an object with either prompt or messages")
        body = {name: value for name, value in body.items() if name not in _NOT_ALLOWED}
        yield _Asked(number, "completions" if "prompt" in body else "chat/completions", body)


class _Service:
    """A running service.

    Args:
        url: Without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if key := client_key():
            self._headers["Authorization"] = f"Bearer {key}"
        self._model: str = self._call("models")["data"][0]["id"]

    def ask(self, asked: _Asked) -> list[Json] | str:
        """Return the samples of one request, or why there are none."""
        try:
            answer = self._call(asked.path, {"model": self._model} | asked.body | {"return_recording": True})
            return [choice["recording"] for choice in answer["choices"]]
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}: {_reason(error.read())}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or repr(error)
        except KeyError as error:
            return f"the answer has no {error}: is this a service of this version?"

    def _call(self, path: str, body: Json | None = None) -> Json:
        """Send a request, and retry while the service is busy."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/{path}", data, self._headers)
        for number in range(_TRIES):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                    answer: Json = json.load(response)
                    return answer
            except urllib.error.HTTPError as error:
                if error.code not in _BUSY or number == _TRIES - 1:
                    raise
                time.sleep(_wait_s(error.headers.get("Retry-After"), 2.0**number))
        raise AssertionError("the last try returns or raises")


def _wait_s(retry_after: str | None, otherwise_s: float) -> float:
    try:
        wait_s = float(retry_after or "")
    except ValueError:
        return otherwise_s
    return wait_s if math.isfinite(wait_s) and wait_s >= 0 else otherwise_s


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
