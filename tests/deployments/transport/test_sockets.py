"""The carrier through sockets of one Ray node, with real sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deployments.transport import sockets
from deployments.transport.link import Channel, spawn
from deployments.transport.sockets import SocketAnswerer, address, dial_socket
from deployments.transport.wire import MAX_FRAME_BYTES, Hello, LinkError, encode
from tests.deployments.transport.nodes import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system is not asked whose process the other is")
HELLO = Hello("w", "r", "Target")


class Ends:
    """An answerer, and what it takes: it keeps channels and answers nothing."""

    def __init__(self) -> None:
        self.node, self.taken = uuid.uuid4().hex, []
        self.place = address(self.node, "r")
        self.answerer = SocketAnswerer("r", self.node, self._answer)

    async def _answer(self, channel: Channel) -> None:
        self.taken.append(channel)

    async def listening(self) -> None:
        await until(lambda: self.answerer._server is not None)

    async def dial(self, callee: str = "r") -> Channel:
        return await dial_socket(self.node, Hello("w", callee, "Target"))

    async def linked(self) -> tuple[Channel, Channel]:
        mine = await self.dial()
        await until(lambda: bool(self.taken))
        assert await self.taken[-1].receive() == encode(HELLO)
        return mine, self.taken[-1]

    def stranger(self) -> socket.socket:
        """Somebody who speaks the language of sockets, and not of links."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(self.place)
        return end


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    await ends.listening()
    yield ends
    ends.answerer.close()
    for channel in ends.taken:
        channel.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)


def test_a_long_name_fits_into_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: "/tmp")
    assert len(address("n" * 56, "r" * 32)) <= 107


async def test_frames_of_any_size_travel_both_ways_in_order(ends: Ends) -> None:
    mine, theirs = await ends.linked()
    frames = [bytes([size]) * (1 << size) for size in range(23)]

    async def send_all(channel: Channel) -> None:
        for frame in frames:
            await channel.send(frame)

    senders = [spawn(send_all(mine)), spawn(send_all(theirs))]
    assert [await theirs.receive() for _ in frames] == frames
    assert [await mine.receive() for _ in frames] == frames
    await asyncio.gather(*senders)
    mine.close()


@pytest.mark.parametrize("side", ["caller", "callee"])
async def test_either_sides_end_is_seen_by_the_other(ends: Ends, side: str) -> None:
    mine, theirs = await ends.linked()
    closer, other = (mine, theirs) if side == "caller" else (theirs, mine)
    closer.close()
    with pytest.raises(LinkError, match="ended"):
        await other.receive()
    other.close()


async def test_who_is_not_on_this_node_has_no_socket(ends: Ends) -> None:
    with pytest.raises(LinkError, match="no socket"):
        await ends.dial("x")
    ends.answerer.close()
    with pytest.raises(LinkError, match="no socket"):
        await ends.dial()


async def test_another_users_process_is_not_talked_to(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "address", lambda _node, _replica: ends.place)
    monkeypatch.setattr(sockets.os, "geteuid", lambda: 12345)
    with pytest.raises(LinkError, match="another user"):
        await ends.dial()
    with ends.stranger() as end:
        assert await _all_that_comes(end) == b""
    assert not ends.taken


async def test_where_the_system_refuses_a_socket_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(sockets.socket.socket, "bind", refuse)
    ends = Ends()
    assert not os.path.exists(ends.place)
    with pytest.raises(LinkError, match="no socket"):
        await ends.dial()
    ends.answerer.close()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="specdec") as folder:
        monkeypatch.setattr(sockets.tempfile, "gettempdir", lambda: folder)
        yield Path(folder)


async def test_the_folder_is_its_users_alone_and_is_left_empty(temporary: Path) -> None:
    first, second = Ends(), Ends()
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {str(place) for place in folder.iterdir()} == {first.place, second.place}
    await first.listening()
    first.answerer.close()
    await second.listening()
    second.answerer.close()
    assert not list(folder.iterdir())


async def test_sockets_without_a_process_are_removed_and_nothing_else_is(temporary: Path) -> None:
    live = Ends()
    [folder] = temporary.iterdir()
    for name in ("dead", "new"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.bind(str(folder / name))
    busy = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    busy.bind(str(folder / "busy"))
    busy.listen(0)
    in_line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    in_line.connect(str(folder / "busy"))
    (folder / "file").touch()
    (folder / "folder").mkdir()
    for place in folder.iterdir():
        if place.name != "new":
            os.utime(place, (0, 0))
    another = Ends()
    left = {place.name for place in folder.iterdir()}
    assert left == {"new", "busy", "file", "folder", *(Path(ends.place).name for ends in (live, another))}
    for end in (busy, in_line):
        end.close()
    for ends in (live, another):
        await ends.listening()
        ends.answerer.close()


@pytest.mark.parametrize("wrong", ["readable", "file", "link", "none"])
async def test_a_folder_that_others_have_a_hand_in_is_not_used(
    wrong: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(address("node", "r")).parent
    match wrong:
        case "readable":
            folder.mkdir()
            folder.chmod(0o750)
        case "file":
            folder.touch()
        case "link":
            (temporary / "another").mkdir(mode=0o700)
            folder.symlink_to(temporary / "another")
        case "none":
            monkeypatch.setattr(sockets.tempfile, "gettempdir", _fail)
    answerer = SocketAnswerer("r", "node", Ends._answer)
    assert answerer._socket is None
    with pytest.raises(LinkError, match="no socket"):
        await dial_socket("node", HELLO)
    answerer.close()


def _fail() -> str:
    raise FileNotFoundError("no usable folder for temporary files")


async def test_an_answerer_closes_where_its_socket_is_gone(temporary: Path) -> None:
    ends = Ends()
    shutil.rmtree(Path(ends.place).parent)
    await ends.listening()
    ends.answerer.close()
    assert not ends.answerer._server.is_serving()


async def test_a_peer_that_hangs_while_many_dial_is_not_waited_for() -> None:
    ends = Ends()
    ends.answerer._starting.cancel()  # its loop never accepts
    strangers = []
    with pytest.raises(BlockingIOError):  # noqa: PT012 - until nobody else is let in
        for _ in range(10_000):
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            strangers.append(end)
            end.setblocking(False)
            end.connect(ends.place)
    with pytest.raises(LinkError, match="no socket"):
        await ends.dial()
    for end in (*strangers, ends.answerer._socket):
        end.close()


async def test_an_answerer_that_is_closed_while_it_starts_answers_nobody() -> None:
    ends = Ends()
    ends.answerer.close()
    await ends.listening()
    assert not ends.answerer._server.is_serving()
    with pytest.raises(LinkError, match="no socket"):
        await ends.dial()


@pytest.mark.parametrize("said", [b"", b"\x00\x00", struct.pack("!I", 5) + b"ab"])
async def test_who_stops_amidst_a_frame_is_cut_off(ends: Ends, said: bytes) -> None:
    with ends.stranger() as end:
        end.sendall(said)
        end.shutdown(socket.SHUT_WR)
        await until(lambda: bool(ends.taken))
        with pytest.raises(LinkError, match="ended"):
            await ends.taken[0].receive()


async def test_a_frame_that_says_it_is_too_long_is_not_waited_for(ends: Ends) -> None:
    with ends.stranger() as end:
        end.sendall(struct.pack("!I", MAX_FRAME_BYTES + 1))
        await until(lambda: bool(ends.taken))
        with pytest.raises(LinkError, match="too long"):
            await ends.taken[0].receive()


async def _all_that_comes(end: socket.socket) -> bytes:
    end.setblocking(False)
    try:
        return await asyncio.get_running_loop().sock_recv(end, 1 << 16)
    except ConnectionResetError:
        return b""
