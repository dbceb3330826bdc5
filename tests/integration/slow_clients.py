"""Clients that take nothing of what they asked for: one that does not read, and one whose network has gone silent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit

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
