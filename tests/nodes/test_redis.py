"""The Redis of ``prod`` as its container starts it: it asks for the password, and SIGTERM ends it with nothing lost."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from tests.integration.running import eventually, free_port
from tests.k8s.examples import built, of_kind

PASSWORD = "a$b`c d\"e\\f'"


def asked(port: int, *commands: str) -> str:
    """What Redis answers to some commands; nothing where nobody listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
            return b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    except OSError:
        return ""


def test_it_asks_for_the_password_and_ends_at_sigterm_with_what_it_was_told(tmp_path: Path) -> None:
    (redis,) = of_kind(built("prod"), "StatefulSet")
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    port, quoted = free_port(), '"' + PASSWORD.replace("\\", "\\\\").replace('"', '\\"') + '"'
    here = f"dir {tmp_path}\nbind 127.0.0.1\nport {port}"
    (script,) = container["args"]
    assert script.count("dir /data") == 1
    command = [*container["command"], script.replace("dir /data", here)]
    environment = os.environ | {"REDIS_PASSWORD": PASSWORD}
    for told in ("", "$1\r\nv"):  # the second one reads what the first one wrote
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            eventually(lambda: asked(port, "PING"), 30, "Redis listens")
            assert asked(port, "GET k").startswith("-NOAUTH")
            assert told in asked(port, f"AUTH {quoted}", "GET k", "SET k v")
            server.terminate()
            assert server.wait(30) == 0
            assert asked(port, "PING") == "", "it went on behind the shell"
        finally:
            server.kill()
            server.wait()
