"""Links within one machine: a Unix socket for each, from process to process.

An item of a stream of Serve's passes five threads and takes each of them a core for a while; through a socket it
passes two. Where router, workers and ingress share cores, that decides whether offers are in time. Between machines,
and where the system has no such sockets, links go over Serve's streams.

Sockets lie in a folder that is its user's alone, named after Ray node and replica: they are not to be had from another
machine, nor from a container with files of its own. What travels is pickled, as over Serve; so both ends also ask the
system who the other one is, and talk to nobody but their own user. It is a faster way and no other one: where there is
no socket, or where it led nowhere the last time, the link goes over Serve for as long as it is up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import stat
import struct
import sys
import tempfile
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deployments.transport.host import Host
from deployments.transport.links import Dial, new_hello, read_stream, spawn, until_first_ends
from deployments.transport.mailbox import Mailbox
from deployments.transport.wire import Greeting, Hello, LinkError, LinkRefusedError, LinkTimes

logger = logging.getLogger("ray.serve")

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("iII")
_NEW_S = 60.0


def address(node: str, replica: str) -> str:
    """Path of the socket on which a replica answers; the system takes at most 107 bytes."""
    return os.path.join(tempfile.gettempdir(), f"specdec-{os.geteuid()}", f"{node[:16]}-{replica}")


class _Items:
    """What the other end of a socket says, item by item, until it ends; for one reader."""

    def __init__(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def __aiter__(self) -> _Items:
        return self

    async def __anext__(self) -> Any:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise LinkError("it ended amidst an item") from error
            raise StopAsyncIteration from error

    def cancel(self) -> None:
        """Close the socket."""
        self._writer.close()


async def _write(writer: StreamWriter, item: object) -> None:
    data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(data)) + data)
    await writer.drain()


async def _write_all(writer: StreamWriter, mailbox: Mailbox, times: LinkTimes) -> None:
    async for batch in mailbox.batches(times.heartbeat_s):
        await _write(writer, batch)


def _is_ours(end: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


def _listening(node: str, replica: str) -> socket.socket | None:
    """A replica's socket; None where the system refuses it, or others could have a hand in it."""
    if sys.platform != "linux":
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


class LocalAnswerer:
    """Answers on a replica's own socket, where the system has one.

    Args:
        me: Replica id of this replica.
        node: Ray's id of the node that it is on.
        host: Gets what the callers send.
        refusal: Why a call is refused; None if it is not.
        times: How patient to be.
    """

    def __init__(
        self, me: str, node: str, host: Host[Any], refusal: Callable[[Hello], str | None], times: LinkTimes
    ) -> None:
        self._me = me
        self._host = host
        self._refusal = refusal
        self._times = times
        self._socket = _listening(node, me)
        self._starting: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._is_closed = False

    def start(self) -> None:
        """Answer; on the event loop."""
        if self._socket is not None:
            self._starting = spawn(self._serve(self._socket))

    def close(self) -> None:
        """Answer no more; links that are up end with their mailboxes."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):
                os.unlink(self._socket.getsockname())
        if self._server is not None:
            self._server.close()
        elif self._starting is None and self._socket is not None:
            self._socket.close()

    async def _serve(self, listening: socket.socket) -> None:
        try:
            server = await asyncio.start_unix_server(self._answer, sock=listening)
        except OSError as error:
            logger.warning("No links within this machine: %r", error)
            listening.close()
            return
        if self._is_closed:
            server.close()
        else:
            self._server = server

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as end:
                is_ours = _is_ours(end)
            if is_ours:
                async with asyncio.timeout(self._times.open_timeout_s):
                    hello = await anext(_Items(reader, writer), None)
                if hello is not None:  # else somebody looked whether we are alive
                    await self._run(hello, reader, writer)
        except Exception as error:
            logger.info("A link within this machine ended: %r", error)
        finally:
            writer.close()

    async def _run(self, hello: Hello, reader: StreamReader, writer: StreamWriter) -> None:
        refusal = self._refusal(hello)
        await _write(writer, Greeting(self._me, refusal))
        if refusal is not None:
            return
        mailbox = self._host.attach(hello.caller)
        try:
            await until_first_ends(
                read_stream(_Items(reader, writer), hello.caller, self._times, self._host.post),
                _write_all(writer, mailbox, self._times),
            )
        finally:
            self._host.detach(hello.caller, mailbox)


class LocalDialer:
    """Opens links within this machine, and leaves others to another dial.

    Args:
        me: Replica id of this replica.
        node: Ray's id of the node that it is on.
        host: Gets what the peers send.
        elsewhere: Opens links to peers that are not on this machine.
        times: How patient to be.
    """

    def __init__(self, me: str, node: str, host: Host[Any], elsewhere: Dial, times: LinkTimes) -> None:
        self._me = me
        self._node = node
        self._host = host
        self._elsewhere = elsewhere
        self._times = times
        self._dead_ends: set[str] = set()

    async def dial(self, peer: str, on_up: Callable[[], None]) -> None:
        """Run one link; see ``Dial``. A peer whose socket led nowhere is dialled elsewhere the next time."""
        ends = None if peer in self._dead_ends else await self._connect(peer)
        self._dead_ends.discard(peer)
        if ends is None:
            await self._elsewhere(peer, on_up)
            return
        was_up = False

        def up() -> None:
            nonlocal was_up
            was_up = True
            on_up()

        try:
            await self._run(peer, up, *ends)
        except LinkError as error:
            if not was_up and not isinstance(error, LinkRefusedError):
                logger.warning("The socket to %s led nowhere, the next attempt goes over Serve: %s", peer, error)
                self._dead_ends.add(peer)
            raise

    async def _connect(self, peer: str) -> tuple[StreamReader, StreamWriter] | None:
        if sys.platform != "linux":
            return None
        end = None
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.setblocking(False)  # it connects at once, or not at all: nobody of that name is here, or it hangs
            end.connect(address(self._node, peer))
            if _is_ours(end):
                streams = await asyncio.open_unix_connection(sock=end)
                end = None  # it is theirs
                return streams
            logger.warning("Another user's process answers to the name of %s.", peer)
        except OSError as error:
            logger.debug("No socket to %s: %r", peer, error)
        finally:
            if end is not None:
                end.close()
        return None

    async def _run(self, peer: str, on_up: Callable[[], None], reader: StreamReader, writer: StreamWriter) -> None:
        hello = new_hello(self._me, peer)
        mailbox = self._host.attach(peer)
        try:
            await _write(writer, hello)
            await until_first_ends(
                read_stream(_Items(reader, writer), peer, self._times, self._host.post, on_up),
                _write_all(writer, mailbox, self._times),
            )
        except OSError as error:
            raise LinkError(f"the socket to {peer} failed: {error!r}") from error
        finally:
            self._host.detach(peer, mailbox)
            writer.close()
