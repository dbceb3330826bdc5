"""Links through sockets of one machine: two hosts in one process, with a real socket between them."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import struct
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.transport import local
from deployments.transport.host import LoopHost
from deployments.transport.links import spawn
from deployments.transport.local import LocalAnswerer, LocalDialer, address
from deployments.transport.wire import Greeting, Hello, LinkError, LinkRefusedError, LinkTimes
from tests.deployments.transport.test_streams import Inbox, ended, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system is not asked whose process the other is")
TIMES = LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, silence_s=60.0)


class Ends:
    """A router that dials and a worker that answers, on a node of their own."""

    def __init__(self, times: LinkTimes = TIMES) -> None:
        self.node, self.refusal = uuid.uuid4().hex, None
        self.router, self.worker = LoopHost(Inbox(), tick_s=60.0), LoopHost(Inbox(), tick_s=60.0)
        self.place = address(self.node, "w")
        self.answerer = LocalAnswerer("w", self.node, self.worker, lambda _hello: self.refusal, times)
        self.dialer = LocalDialer("r", self.node, self.router, self._elsewhere, times)
        self.ups, self.elsewhere = 0, []

    async def _elsewhere(self, peer: str, on_up: Callable[[], None]) -> None:
        self.elsewhere.append(peer)
        raise LinkError("it went elsewhere")

    def dial(self, peer: str = "w") -> asyncio.Task[None]:
        def up() -> None:
            self.ups += 1

        return spawn(self.dialer.dial(peer, up))

    async def linked(self) -> asyncio.Task[None]:
        link = self.dial()
        await until(lambda: self.ups > 0 or link.done())
        assert self.ups == 1
        return link

    def stranger(self) -> socket.socket:
        """Somebody who speaks the language of sockets, and not of links."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(self.place)
        return end


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    ends.router.start()
    ends.worker.start()
    ends.answerer.start()
    await until(lambda: ends.answerer._server is not None)
    yield ends
    ends.answerer.close()
    ends.router.stop()
    ends.worker.stop()
    await until(lambda: len(asyncio.all_tasks()) == 1)


def test_a_long_name_fits_into_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.tempfile, "gettempdir", lambda: "/tmp")
    assert len(address("n" * 56, "r" * 32)) <= 107


async def test_batches_of_any_size_travel_both_ways_in_order(ends: Ends) -> None:
    link = await ends.linked()
    sent = [(number, "x" * (1 << number)) for number in range(23)]
    ends.router.tell(lambda m, _now_s: m.outbox["w"].extend(sent))
    ends.worker.tell(lambda m, _now_s: m.outbox["r"].extend(reversed(sent)))
    await until(lambda: len(ends.worker._machine.got) == len(ends.router._machine.got) == len(sent))
    assert ends.worker._machine.got == sent
    assert ends.router._machine.got == sent[::-1]
    assert not link.done()
    assert not ends.elsewhere


async def test_a_peer_that_is_not_on_this_machine_is_dialled_elsewhere(ends: Ends) -> None:
    assert str(await ended(ends.dial("x"))) == "it went elsewhere"
    ends.answerer.close()
    assert str(await ended(ends.dial())) == "it went elsewhere"
    assert ends.elsewhere == ["x", "w"]


async def test_a_refusal_is_told_and_links_nothing(ends: Ends) -> None:
    ends.refusal = "the replica is shutting down"
    for _ in range(2):
        error = await ended(ends.dial())
        assert isinstance(error, LinkRefusedError)
        assert ends.refusal in str(error)
    assert (ends.ups, ends.worker._mailboxes, ends.elsewhere) == (0, {}, [])


@pytest.mark.parametrize("side", ["router", "worker"])
async def test_either_sides_end_ends_the_link_on_both(ends: Ends, side: str) -> None:
    link = await ends.linked()
    await until(lambda: "r" in ends.worker._mailboxes)
    getattr(ends, side).unlink_all()
    assert isinstance(await ended(link), LinkError)
    await until(lambda: not ends.worker._mailboxes and not ends.router._mailboxes)


async def test_a_link_that_is_dialled_anew_takes_the_place_of_the_old_one(ends: Ends) -> None:
    old = await ends.linked()
    new = ends.dial()
    await until(lambda: ends.ups == 2)
    assert isinstance(await ended(old), LinkError)
    ends.worker.tell(lambda m, _now_s: m.outbox["r"].append("up"))
    await until(lambda: ends.router._machine.got == ["up"])
    assert not new.done()


async def test_silence_ends_a_link() -> None:
    ends = Ends(LinkTimes(open_timeout_s=60.0, heartbeat_s=60.0, silence_s=0.05))
    ends.answerer.start()
    await until(lambda: ends.answerer._server is not None)
    error = await ended(await ends.linked())
    assert "silent" in str(error) or "ended" in str(error)
    ends.answerer.close()


async def test_heartbeats_keep_an_idle_link(ends: Ends) -> None:
    ends.dialer._times = ends.answerer._times = LinkTimes(open_timeout_s=60.0, heartbeat_s=0.01, silence_s=1.0)
    link = await ends.linked()
    await asyncio.sleep(1.5)
    assert not link.done()


async def test_another_users_process_is_not_talked_to(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "address", lambda _node, _replica: ends.place)
    monkeypatch.setattr(local.os, "geteuid", lambda: 12345)
    assert str(await ended(ends.dial())) == "it went elsewhere"
    with ends.stranger() as end:
        end.sendall(_framed(Hello("r", "w", "link")))
        assert await _all_that_comes(end) == b""
    assert (ends.ups, ends.worker._mailboxes) == (0, {})


async def test_where_the_system_refuses_a_socket_links_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    ends = Ends()
    with monkeypatch.context() as patch:
        patch.setattr(local.socket.socket, "connect", refuse)
        assert str(await ended(ends.dial())) == "it went elsewhere"
    ends.answerer.close()
    monkeypatch.setattr(local.socket.socket, "bind", refuse)
    none = LocalAnswerer("w", ends.node, ends.worker, lambda _hello: None, TIMES)
    none.start()
    assert not os.path.exists(ends.place)
    assert str(await ended(ends.dial())) == "it went elsewhere"
    none.close()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="specdec") as folder:
        monkeypatch.setattr(local.tempfile, "gettempdir", lambda: folder)
        yield Path(folder)


async def test_the_folder_is_its_users_alone_and_is_left_empty(temporary: Path) -> None:
    first, second = Ends(), Ends()
    [folder] = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {str(place) for place in folder.iterdir()} == {first.place, second.place}
    first.answerer.close()
    second.answerer.start()
    await until(lambda: second.answerer._server is not None)
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
        ends.answerer.close()


@pytest.mark.parametrize("wrong", ["readable", "file", "link", "none"])
async def test_a_folder_that_others_have_a_hand_in_is_not_used(
    wrong: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(address("node", "w")).parent
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
            monkeypatch.setattr(local.tempfile, "gettempdir", _fail)
            monkeypatch.setattr(sys.modules[__name__], "address", lambda _node, _replica: "")
    ends = Ends()
    assert ends.answerer._socket is None
    assert str(await ended(ends.dial())) == "it went elsewhere"
    ends.answerer.close()


def _fail() -> str:
    raise FileNotFoundError("no usable folder for temporary files")


async def test_an_answerer_closes_where_its_socket_is_gone(temporary: Path) -> None:
    ends = Ends()
    shutil.rmtree(Path(ends.place).parent)
    ends.answerer.start()
    await until(lambda: ends.answerer._server is not None)
    ends.answerer.close()
    assert not ends.answerer._server.is_serving()


async def test_a_peer_that_accepts_and_never_greets_is_dialled_elsewhere_in_turns() -> None:
    ends = Ends(LinkTimes(open_timeout_s=0.05, heartbeat_s=60.0, silence_s=60.0))
    for attempt in range(4):  # its answerer was not started
        assert ("silent", "it went elsewhere")[attempt % 2] in str(await ended(ends.dial()))
    ends.answerer.close()


async def test_a_link_that_was_lost_is_dialled_through_the_socket_again(ends: Ends) -> None:
    for number in range(3):
        link = ends.dial()
        await until(lambda count=number: ends.ups > count)
        ends.worker.unlink_all()
        ends.router.unlink_all()
        await ended(link)
    assert not ends.elsewhere


async def test_a_peer_that_hangs_while_many_dial_is_dialled_elsewhere() -> None:
    ends = Ends()  # its loop never accepts, as it was not started
    strangers = []
    with pytest.raises(BlockingIOError):  # noqa: PT012 - until nobody else is let in
        for _ in range(10_000):
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            strangers.append(end)
            end.setblocking(False)
            end.connect(ends.place)
    assert str(await ended(ends.dial())) == "it went elsewhere"
    for end in strangers:
        end.close()
    ends.answerer.close()


async def test_an_answerer_that_is_closed_while_it_starts_answers_nobody() -> None:
    ends = Ends()
    ends.answerer.start()
    await asyncio.sleep(0)
    ends.answerer.close()
    await asyncio.sleep(0.05)
    assert ends.answerer._server is None or not ends.answerer._server.is_serving()
    assert str(await ended(ends.dial())) == "it went elsewhere"


@pytest.mark.parametrize("said", [b"", b"\x00\x00", struct.pack("!Q", 5) + b"ab", struct.pack("!Q", 3) + b"abc"])
async def test_who_speaks_another_language_harms_nobody(ends: Ends, said: bytes) -> None:
    link = await ends.linked()
    with ends.stranger() as end:
        end.sendall(said)
        end.shutdown(socket.SHUT_WR)
        assert await _all_that_comes(end) == b""
    ends.router.tell(lambda m, _now_s: m.outbox["w"].append("down"))
    await until(lambda: ends.worker._machine.got == ["down"])
    assert not link.done()


async def test_what_is_cut_off_amidst_a_batch_is_not_received(ends: Ends) -> None:
    with ends.stranger() as end:
        end.sendall(_framed(Hello("r", "w", "link")) + _framed(("whole",)) + _framed(("half",))[:-3])
        end.shutdown(socket.SHUT_WR)
        assert (await _all_that_comes(end)).startswith(_framed(Greeting("w")))
    assert ends.worker._machine.got == ["whole"]


def _framed(item: Any) -> bytes:
    data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    return struct.pack("!Q", len(data)) + data


async def _all_that_comes(end: socket.socket) -> bytes:
    end.setblocking(False)
    came = b""
    while True:
        try:
            data = await asyncio.get_running_loop().sock_recv(end, 1 << 16)
        except ConnectionResetError:
            return came
        if not data:
            return came
        came += data
