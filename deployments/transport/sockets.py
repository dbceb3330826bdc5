"""The carrier within one Ray node: a Unix socket per link.

Sockets lie in a folder that is its user's alone, named after Ray node and replica: they are not to be had from another
machine, nor from a container with files of its own. Both ends also ask the system who the other one is, and talk to
nobody but their own user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
import sys
import tempfile
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from deployments.transport.link import Channel, spawn
from deployments.transport.wire import MAX_FRAME_BYTES, Hello, LinkError, encode

logger = logging.getLogger("ray.serve")

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")
_NEW_S = 60.0


def address(node: str, replica: str) -> str:
    """Path of the socket on which a replica answers; the system takes at most 107 bytes."""
    return os.path.join(tempfile.gettempdir(), f"specdec-{os.geteuid()}", f"{node[:16]}-{replica}")


class SocketChannel:
    """One end of a link through a socket: frames, each after its length."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, frame: bytes) -> None:
        """Send a frame; see ``Channel``."""
        try:
            self._writer.write(_LENGTH.pack(len(frame)) + frame)
            await self._writer.drain()
        except OSError as error:
            raise LinkError(f"the socket failed: {error!r}") from error

    async def receive(self) -> bytes:
        """The next frame; see ``Channel``."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise LinkError(f"a frame of {length} bytes is too long; at most {MAX_FRAME_BYTES} are taken")
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise LinkError("the peer ended the link") from error
        except OSError as error:
            raise LinkError(f"the socket failed: {error!r}") from error

    def close(self) -> None:
        """Close the socket."""
        self._writer.close()


async def dial_socket(node: str, hello: Hello) -> Channel:
    """Open a channel to a replica on this node, by Ray's id of it; see ``Carrier``."""
    try:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)  # it connects at once, or not at all: nobody of that name is here, or it hangs
            end.connect(address(node, hello.callee))
            if not _is_ours(end):
                raise LinkError(f"another user's process answers to the name of {hello.callee}")
            channel = SocketChannel(*await asyncio.open_unix_connection(sock=end))
        except BaseException:
            end.close()
            raise
    except (OSError, AttributeError) as error:  # some systems have no such sockets
        raise LinkError(f"no socket: {error!r}") from error
    await channel.send(encode(hello))
    return channel


class SocketAnswerer:
    """Takes channels on a replica's own socket, where the system has one.

    Args:
        me: Replica id of this replica.
        node: Ray's id of the node that it is on.
        answer: Runs the link of a channel to its end.
    """

    def __init__(self, me: str, node: str, answer: Callable[[Channel], Coroutine[Any, Any, None]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._socket = _listening(node, me)
        self._starting = None if self._socket is None else spawn(self._serve(self._socket))

    def close(self) -> None:
        """Take no more; links that are up stay."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):
                os.unlink(self._socket.getsockname())
        if self._server is not None:
            self._server.close()

    async def _serve(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_unix_server(self._connected, sock=listening)
        if self._is_closed:
            self._server.close()

    def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as end:
            is_ours = _is_ours(end)
        if not is_ours:
            writer.close()
            return
        link = spawn(self._answer(SocketChannel(reader, writer)))
        self._links.add(link)
        link.add_done_callback(self._links.discard)


def _is_ours(end: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


def _listening(node: str, replica: str) -> socket.socket | None:
    """A replica's socket; None where the system refuses it, or others could have a hand in it."""
    if sys.platform != "linux":  # elsewhere the system does not tell whose process the other is
        return None
    end = None
    try:
        place = address(node, replica)
        _make_private(os.path.dirname(place))
        _remove_dead(os.path.dirname(place))
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.bind(place)
        end.listen()
    except OSError as error:
        if end is not None:
            end.close()
        logger.warning("There is no socket for links within this machine, which go over Serve: %r", error)
        return None
    return end


def _make_private(folder: str) -> None:
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def _remove_dead(folder: str) -> None:
    """Remove sockets without a process: Ray ends replicas without a word. New ones may be about to listen."""
    for place in Path(folder).iterdir():
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            status = place.lstat()
            if not stat.S_ISSOCK(status.st_mode) or time.time() - status.st_mtime < _NEW_S:
                continue
            end.setblocking(False)
            try:
                end.connect(os.fspath(place))
            except ConnectionRefusedError:
                place.unlink()
