"""Clients that take nothing of what they asked for: one that does not read, and one whose network has gone silent.

``python -m tests.integration.slow_clients`` prints as JSON how the memory of the ingress grows with 256 that read
nothing of 20 log probabilities a token, and falls while others are served after they have gone, in MB. Steps are
emulated.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tests.integration.kills import processes_of
from tests.integration.running import RunningService

BUFFER_BYTES = 2048
"""Of the kernel, for what nobody has read."""
WINDOW = "window"
SILENT = "silent"
"""What becomes of a client: its window is full, or nothing that is sent to it arrives any more, nor any end of it."""
_REQUEST = (
    "POST /v1/completions HTTP/1.1\r\nHost: api\r\nConnection: close\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\n\r\n"
)


@contextmanager
def asking(url: str, kind: str, body: dict[str, object]) -> Iterator[socket.socket]:
    """A client that has sent a request, got the beginning of its answer, and takes nothing after it."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    with ExitStack() as stack:
        if kind == SILENT:
            port = stack.enter_context(_relay(host, port))
        client = stack.enter_context(closing(socket.socket()))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        client.settimeout(60)
        client.connect((host, port))
        written = json.dumps(body).encode()
        client.sendall(_REQUEST.format(len(written)).encode() + written)
        begin = client.recv(16)
        assert begin.startswith(b"HTTP/1.1 200"), begin
        yield client


@contextmanager
def _relay(host: str, port: int) -> Iterator[int]:
    """A network in between, which carries a request there, a piece of its answer back, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        server.connect((host, port))

        def carry() -> None:
            with suppress(OSError):
                client, _ = listener.accept()
                threading.Thread(target=forth, args=(client,), daemon=True).start()
                client.sendall(server.recv(64))

        def forth(client: socket.socket) -> None:
            with suppress(OSError):
                while part := client.recv(1 << 16):
                    server.sendall(part)

        threading.Thread(target=carry, daemon=True).start()
        yield listener.getsockname()[1]


def main() -> None:
    """Start a service and the clients, and watch the ingress."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--watched-s", type=float, default=240.0, help="each time")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--ordinary", type=int, default=1024, help="requests before and after, until memory is steady")
    options = parser.parse_args()
    emulated = ("--backend", "benchmarks.backends:stand_in:target=60,draft=6", "--max-num-seqs", "256")
    service = RunningService("--demo", "plain", *emulated, "--num-speculative-tokens", "4")
    body = {
        "model": service.model,
        "prompt": "x",
        "max_tokens": 2000,
        "logprobs": 20,
        "ignore_eos": True,
        "stream": True,
    }
    (ingress,) = processes_of(service, "ingress")

    def serve_others() -> None:
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda _: _read(service, body | {"max_tokens": 40}), range(options.ordinary)))

    serve_others()
    for _ in range(options.times):
        megabytes = [ingress.memory_info().rss >> 20]
        with ExitStack() as stack:
            started_s = time.monotonic()
            threads = [
                threading.Thread(target=lambda: stack.enter_context(asking(service.url, WINDOW, body)), daemon=True)
                for _ in range(options.clients)
            ]
            for thread in threads:
                thread.start()
            while time.monotonic() < started_s + options.watched_s:
                time.sleep(1.0)
                megabytes.append(ingress.memory_info().rss >> 20)
            num_begun = sum(not thread.is_alive() for thread in threads)
        left = ingress.memory_info().rss >> 20
        serve_others()
        figures = {
            "begun": num_begun,
            "before": megabytes[0],
            "most": max(megabytes),
            "at_s": megabytes.index(max(megabytes)),
            "left": left,
            "after_others": ingress.memory_info().rss >> 20,
        }
        print(json.dumps(figures), flush=True)
    service.stop()


def _read(service: RunningService, body: dict[str, object]) -> None:
    request = Request(f"{service.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    main()
